"""The wall clock may jump while the server runs: only times that people read depend on it."""

import itertools
import logging
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from tests.server.fake_llm import MODEL, SLOW_PROMPT, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import events_of, wait_for
from tests.server.served_process import OPTIONS
from tllm_spec import LLM, SamplingParams
from tllm_spec.server.options import ServerOptions

HOUR, DAY = 3600, 86400
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "def f(",
    "max_tokens": 40,
    "ignore_eos": True,
    "temperature": 0,
}
SPECULATION = {"decoding_type": "NGram", "max_draft_len": 3, "adaptive": {"strategy": "cost_model"}}


def let_jump(monkeypatch: pytest.MonkeyPatch, offsets: Iterator[float]) -> list[float]:
    """Each reading of the wall clock has the next offset. The list grows with each."""
    read: list[float] = []
    real = time.time  # noqa: TID251  # it is replaced

    def jumping() -> float:
        read.append(real() + next(offsets))
        return read[-1]

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
    return read


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("zoo:llama", **OPTIONS, speculative_config=SPECULATION) as llm:
        yield llm


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    """Generated while the clock is right."""
    params = SamplingParams(max_tokens=BODY["max_tokens"], ignore_eos=True, temperature=0)
    return llm.generate(BODY["prompt"], params, use_tqdm=False).outputs[0].text


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    options = ServerOptions(request_timeout=HOUR / 2, shutdown_timeout=HOUR / 2)
    with hosted(llm, options) as url:  # type: ignore[arg-type]  # any engine is served
        yield url


def test_texts_durations_and_time_outs_do_not_depend_on_the_wall_clock(
    text: str, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = let_jump(monkeypatch, itertools.cycle([0, -HOUR, DAY]))
    caplog.set_level(logging.INFO, "tllm_spec.access")
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(partial(send, url), [True, False, True, False]))
    for answer in answers[::2]:
        *events, end = events_of(answer)
        assert end == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events) == text
    assert [answer.json()["choices"][0]["text"] for answer in answers[1::2]] == [text] * 2
    assert len(read) > 4, "each answer has the date on which it was created"
    records = httpx.get(f"{url}/perf_metrics").json()
    assert len(records) == 4
    for record in records:
        times = list(record["perf_metrics"]["timing_metrics"].values())
        assert times == sorted(times) and times[-1] - times[0] < HOUR / 2
    sums = re.findall(r"^\w+_seconds_sum (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert len(sums) >= 4 and all(0 <= float(seconds) < HOUR for seconds in sums)
    wait_for(lambda: len(logged_seconds(caplog)) >= 4)
    assert all(0 <= seconds < HOUR / 2 for seconds in logged_seconds(caplog))


def logged_seconds(caplog: pytest.LogCaptureFixture) -> list[float]:
    """The durations in the access log."""
    records: list[Any] = [each for each in caplog.records if each.name == "tllm_spec.access"]
    return [record.fields["seconds"] for record in records]


def send(url: str, stream: bool) -> httpx.Response:
    answer = httpx.post(f"{url}/v1/completions", json=BODY | {"stream": stream}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_out_ends_a_request_although_the_wall_clock_goes_back(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    let_jump(monkeypatch, itertools.count(0, -HOUR))
    body = {"model": MODEL, "prompt": SLOW_PROMPT, "stream": stream}
    with hosted(FakeLLM(), ServerOptions(request_timeout=0.05, shutdown_timeout=5)) as url:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert "took longer than 0.05 s" in answer.text
