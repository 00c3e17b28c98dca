"""langchain: its agent calls the tool; and an answer with a schema."""

import os

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(model=os.environ["MODEL"])
cities = []


def get_weather(city: str) -> str:
    """The temperature in a city."""
    cities.append(city)
    return "21"


agent = create_agent(model, tools=[get_weather])
messages = agent.invoke({"messages": [("user", "What is the weather in Paris?")]})["messages"]
assert messages[-1].content == "It is 21 degrees in Paris.", messages
assert cities == ["Paris"], cities


class Weather(BaseModel):
    city: str
    celsius: int


answer = model.with_structured_output(Weather, method="json_schema").invoke("An object, please.")
assert answer == Weather(city="Paris", celsius=21), answer
