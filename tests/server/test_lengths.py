"""The longest sequence that an engine can run: default of max_tokens, refusals, `/v1/models`."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
import pytest

from tests.server.fake_llm import MODEL
from tests.server.hosted import hosted
from tests.server.http_answers import CHAT
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.llm import LLM
from tllm_spec.server.replicas import Replicas
from tllm_spec.text.tokenizer import load_tokenizer

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "max_batch_size": 4,
    "guided_decoding_backend": None,
}
DRAFTED = {
    "decoding_type": "Draft_Target",
    "max_draft_len": 3,
    "speculative_model": "zoo:llama-draft",
}


class Served(NamedTuple):
    url: str
    llm: LLM
    log: str

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={"model": MODEL, **body})

    def refusal(self, **body: Any) -> Any:
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 400
        return answer.json()["error"]

    @property
    def model_len(self) -> int:
        return int(httpx.get(f"{self.url}/v1/models").json()["data"][0]["max_model_len"])


def served(caplog: pytest.LogCaptureFixture, **options: Any) -> Iterator[Served]:
    caplog.set_level(logging.INFO)
    with LLM("zoo:llama", **OPTIONS | options) as llm:
        engine: Any = llm
        with hosted(engine) as url:
            yield Served(url, llm, caplog.text)


@pytest.mark.parametrize("speculation", [None, DRAFTED], ids=["plain", "drafted"])
def test_a_cache_below_the_context_is_the_length_that_is_served_everywhere(
    caplog: pytest.LogCaptureFixture, speculation: dict[str, Any] | None
) -> None:
    cache = {"max_tokens": 128}
    for small in served(caplog, kv_cache_config=cache, speculative_config=speculation):
        longest = small.llm.max_seq_len
        assert 100 < longest < 128
        assert small.model_len == longest
        assert small.post("/tokenize", prompt="a").json()["max_model_len"] == longest
        assert f"a request may have {longest} tokens" in small.log
        for path, body in (
            ("/v1/chat/completions", {"messages": CHAT}),
            ("/v1/responses", {"input": "hello"}),
            ("/v1/completions", {"prompt": [5] * (longest - 1)}),
        ):
            assert small.post(path, **body, temperature=0).status_code == 200, path
        full = {"prompt": [5] * (longest - 9), "ignore_eos": True}
        usage = small.post("/v1/completions", **full).json()["usage"]
        assert usage["completion_tokens"] == 9
        for body in ({"prompt": [5] * longest}, {"prompt": [5], "max_tokens": longest + 1}):
            assert small.refusal(**body)["code"] == "context_length_exceeded"


def test_max_num_tokens_is_told_where_it_limits_prompts(caplog: pytest.LogCaptureFixture) -> None:
    for narrow in served(caplog, max_num_tokens=64):
        assert narrow.model_len == 64
        assert "a prompt may have 64 tokens, which is max_num_tokens" in narrow.log
        error = narrow.refusal(prompt=[5] * 65)
        assert error["code"] == "context_length_exceeded"
        assert "max_num_tokens without enable_chunked_prefill" in error["message"]
        longer = narrow.post("/v1/completions", prompt=[5] * 64, max_tokens=9, ignore_eos=True)
        assert longer.json()["usage"]["total_tokens"] == 73


def test_chunked_prefill_serves_the_whole_context(caplog: pytest.LogCaptureFixture) -> None:
    for chunked in served(caplog, max_num_tokens=64, enable_chunked_prefill=True):
        assert chunked.model_len == chunked.llm.max_seq_len == 2048
        assert "a prompt may have" not in chunked.log and "a request may have" not in chunked.log
        assert chunked.post("/v1/completions", prompt=[5] * 65, max_tokens=1).status_code == 200


def test_a_cache_without_room_for_two_tokens_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"no room for a request: .* raise kv_cache_config.max_t"):
        cache = {"max_tokens": 4, "tokens_per_block": 4}
        LLM("zoo:llama", **OPTIONS, kv_cache_config=cache, speculative_config=DRAFTED)


def test_the_engine_with_the_smallest_cache_limits_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tllm_spec.server.replicas.EngineClient", lambda *arguments: None)
    replicas = Replicas(LlmArgs.from_kwargs("zoo:llama"), load_tokenizer("zoo:llama"), ["a"], None)
    connection: Any = None
    first = RequestLimits(512, (), 300, 0, None)
    for number, length in enumerate((300, 200, 250)):
        replicas._use(number, connection, replace(first, max_seq_len=length))
    assert replicas.max_seq_len == 200
    with pytest.raises(ValueError, match="maximum context length is 200 tokens"):
        replicas.check_length([5] * 200)
