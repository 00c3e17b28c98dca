"""openai-agents: its loop calls the tool and gives back the result, over both routes of OpenAI."""

import os

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
cities = []


@function_tool
def get_weather(city: str) -> str:
    """The temperature in a city."""
    cities.append(city)
    return "21"


for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    model = kind(os.environ["MODEL"], AsyncOpenAI())
    agent = Agent(name="weather", model=model, tools=[get_weather])
    result = Runner.run_sync(agent, "What is the weather in Paris?")
    assert result.final_output == "It is 21 degrees in Paris.", result
assert cities == ["Paris", "Paris"], cities
