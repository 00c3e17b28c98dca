"""A chat template that does not come to its end, and the clients that wait for others."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.fake_llm import MODEL, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import CHAT, wait_for
from tllm_spec.text import template_process

MANY = "{% for a in range(99999) %}"
TEMPLATE = (
    "{% if loop_on %}" + MANY * 4 + "{% endfor %}" * 4 + "{% endif %}"
    "{% if grow %}{{ 'a' * 10 ** 10 }}{% endif %}{{ messages[0].content }}"
)


def chat(url: str, **variables: bool) -> httpx.Response:
    body = {"model": MODEL, "messages": CHAT, "chat_template_kwargs": variables}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
def test_a_template_that_never_ends_delays_no_other_requests(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "MAX_SECONDS", 300.0)  # the test ends the process
    llm = FakeLLM()
    llm.tokenizer.chat_template = TEMPLATE
    body = {"model": MODEL, "messages": CHAT, "chat_template_kwargs": {"loop_on": True}}
    with hosted(llm) as url, ThreadPoolExecutor(1) as thread:
        assert chat(url).status_code == 200
        process = template_process.template_process()
        slow = thread.submit(httpx.post, f"{url}{route}", json=body, timeout=300)
        try:
            wait_for(process._lock.locked)
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
            completion = {"model": MODEL, "prompt": "a"}
            answer = httpx.post(f"{url}/v1/completions", json=completion, timeout=60)
            assert answer.status_code == 200 and not slow.done()
        finally:
            process._child.kill()
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
