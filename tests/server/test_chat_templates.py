"""A chat template that does not come to its end, and the clients that wait for others."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.fake_llm import MODEL, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import CHAT, wait_for
from tllm_spec.child_process import ChildProcess
from tllm_spec.server.strict_body import LONG_BODY
from tllm_spec.text import template_process
from tllm_spec.text.template_process import template_processes

MANY = "{% for a in range(99999) %}"
TEMPLATE = (
    "{% if loop_on %}" + MANY * 4 + "{% endfor %}" * 4 + "{% endif %}"
    "{% if grow %}{{ 'a' * 10 ** 10 }}{% endif %}{{ messages[0].content }}"
)


def chat(url: str, **variables: object) -> httpx.Response:
    body = {"model": MODEL, "messages": CHAT, "chat_template_kwargs": variables}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)


def busy_process() -> ChildProcess | None:
    """The process that renders, if there is one."""
    processes = template_processes()
    idle = set(processes._idle.queue)
    return next((each for each in processes.all if each not in idle), None)


@pytest.mark.parametrize(
    ("route", "num_chars"),
    [
        ("/v1/chat/completions", 0),
        ("/tokenize", 0),
        pytest.param("/tokenize", LONG_BODY, marks=pytest.mark.slow),
    ],
)
def test_a_template_that_never_ends_delays_no_other_requests(
    route: str, num_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template of a long conversation delays short ones no more than others."""
    monkeypatch.setattr(template_process, "MAX_SECONDS", 300.0)  # the test ends the process
    llm = FakeLLM()
    llm.tokenizer.chat_template = TEMPLATE
    variables = {"loop_on": True, "unused": "a" * num_chars}
    body = {"model": MODEL, "messages": CHAT, "chat_template_kwargs": variables}
    num_others = [1, LONG_BODY + 1] if num_chars else [1]
    with hosted(llm) as url, ThreadPoolExecutor(1) as thread:
        assert chat(url).status_code == 200
        slow = thread.submit(httpx.post, f"{url}{route}", json=body, timeout=300)
        try:
            wait_for(lambda: busy_process() is not None)
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
            for size in num_others:
                completion = {"model": MODEL, "prompt": "a" * size, "truncate_prompt_tokens": 1}
                answer = httpx.post(f"{url}/v1/completions", json=completion, timeout=60)
                assert answer.status_code == 200
            assert not num_chars or chat(url).status_code == 200
            assert not slow.done()
        finally:
            if (process := busy_process()) is not None:
                process.kill()
        assert slow.result().status_code == 400
        assert chat(url).status_code == 200


def test_templates_over_their_limits_are_answered_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = FakeLLM()
    llm.tokenizer.chat_template = TEMPLATE
    with hosted(llm) as url:
        large = chat(url, grow=True)
        assert large.status_code == 400 and "made more than" in large.text
        monkeypatch.setattr(template_process, "MAX_SECONDS", 0.2)
        slow = chat(url, loop_on=True)
        assert slow.status_code == 400 and "the chat template took over 0.2 s" in slow.text
        monkeypatch.undo()
        assert chat(url).status_code == 200
