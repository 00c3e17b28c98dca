"""What tests of the HTTP server share: a conversation, and reading streamed answers."""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx

CHAT = [{"role": "user", "content": "hello"}]
FULL = 100  # tokens, more than any answer has
Post = Callable[..., httpx.Response]  # of a path and of what the body says, the fixture `post`


SECONDS = 300  # what hangs fails its test; on a busy machine a server starts in a minute


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {SECONDS} s"
        time.sleep(0.02)


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each server-sent event; "[DONE]" stays text."""
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def named_events(response: httpx.Response) -> list[Any]:
    """The data of each server-sent event with a name, which must be the data's type."""
    lines = response.text.splitlines()
    named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert named == [each["type"] for each in data]
    return data
