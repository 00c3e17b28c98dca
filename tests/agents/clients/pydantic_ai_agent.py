"""pydantic-ai: its loop calls the tool; and an answer that is a pydantic model."""

import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel

model = OpenAIChatModel(os.environ["MODEL"])
agent = Agent(model)
cities = []


@agent.tool_plain
def get_weather(city: str) -> str:
    """The temperature in a city."""
    cities.append(city)
    return "21"


result = agent.run_sync("What is the weather in Paris?")
assert result.output == "It is 21 degrees in Paris.", result
assert cities == ["Paris"], cities


class Weather(BaseModel):
    city: str
    celsius: int


result = Agent(model, output_type=NativeOutput(Weather)).run_sync("An object, please.")
assert result.output == Weather(city="Paris", celsius=21), result
