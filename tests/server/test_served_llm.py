"""`tllm-serve` as a process of its own, with the real engine: its texts are those of `LLM` in this
process."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.http_answers import events_of
from tests.server.served_process import MODEL, OPTIONS, ServedProcess, complete
from tllm_spec import LLM, SamplingParams

MORE: dict[str, Any] = {
    "guided_decoding_backend": "xgrammar",
    "enable_iter_perf_stats": True,
    "speculative_config": {
        "decoding_type": "Draft_Target",
        "max_draft_len": 3,
        "max_rejected_rounds": 100_000,
        "speculative_model": "zoo:llama-draft",
        "load_format": "dummy",
        # Draft length 3 is left unless nearly all drafts are accepted, and tried again at once: a
        # switch every 3 rounds.
        "adaptive": {
            "strategy": "ema",
            "warmup_batches": 0,
            "update_interval": 3,
            "1": {"candidate_steps": [0, 3], "down_hysteresis": 2.0},
        },
    },
}
SAMPLED = {"temperature": 0.8, "seed": 5, "max_tokens": 40}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """An interrupt ends it cleanly."""
    with ServedProcess(tmp_path_factory.mktemp("serve"), **MORE) as served:
        yield served
        info = httpx.get(f"{served.url}/server_info").json()
        num_switches = info["internal_states"][0]["controller"]["decisions"]["num_switches"]
        assert served.end(signal.SIGINT) == 0, served.text
        assert "Traceback" not in served.text
        lines = re.findall(r"INFO \S+decisions: draft length \d -> \d at batch", served.text)
        assert len(lines) == num_switches, "one log line a switch"


@pytest.fixture(scope="module")
def url(served: ServedProcess) -> str:
    return served.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3) as client:
        yield client


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, **OPTIONS | MORE) as llm:
        yield llm


def test_a_front_does_without_torch(served: ServedProcess) -> None:
    pytest.importorskip("llguidance")
    assert complete(served.url) == 200
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    guided = chat | {"guided_choice": ["x", "yes"]}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=guided, timeout=60)
    assert answer.json()["choices"][0]["message"]["content"] in ("x", "yes")
    wrong = chat | {"guided_regex": "("}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=wrong, timeout=60)
    assert answer.status_code == 400
    (engine,), (front,) = served.pids("engine_process"), served.pids("front_process")
    assert "libtorch" in Path(f"/proc/{engine}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{front}/maps").read_text()
    assert "PyTorch" not in served.text


def test_a_completion_is_the_text_of_the_llm_streamed_or_not(
    client: openai.OpenAI, llm: LLM
) -> None:
    expected = llm.generate("def f(", SamplingParams(**SAMPLED), use_tqdm=False).outputs[0].text
    whole = client.completions.create(model=MODEL, prompt="def f(", **SAMPLED)
    streamed = client.completions.create(model=MODEL, prompt="def f(", **SAMPLED, stream=True)
    assert whole.choices[0].text == expected
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected


def test_the_loglikelihoods_that_lm_eval_reads_are_those_of_the_llm(url: str, llm: LLM) -> None:
    prompt = llm.tokenizer.encode("def f(x): return x")  # type: ignore[union-attr]  # it has one
    body = {"model": MODEL, "prompt": [prompt], "temperature": 0, "max_tokens": 1}
    body |= {"logprobs": 1, "seed": 1234, "echo": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    known = llm.generate(prompt, params, use_tqdm=False).outputs[0].prompt_logprobs  # type: ignore[union-attr]  # one prompt
    expected = [at[token].logprob for token, at in zip(prompt[1:], known[1:], strict=True) if at]
    found = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert found[0] is None and found[1:-1] == pytest.approx(expected)
    best = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert all(max(top.values()) >= own for own, top in zip(found[1:], best[1:], strict=True))


def test_the_echo_of_a_prompt_that_is_cut_is_the_text_of_its_tokens(client: openai.OpenAI) -> None:
    prompt = "def f(x): return x"
    answer = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=2,
        echo=True,
        logprobs=0,
        extra_body={"truncate_prompt_tokens": 2},
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert choice.text == "".join(choice.logprobs.tokens) and prompt not in choice.text


def test_the_metrics_of_a_process_have_histograms_and_its_pages_open(url: str) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3, "stream": True}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    text = httpx.get(f"{url}/metrics", timeout=60).text
    for name in ("trtllm_time_to_first_token_seconds", "tllm_spec_request_acceptance_length"):
        found = re.search(rf"^{name}_count (\S+)", text, re.MULTILINE)
        assert found is not None and float(found[1]) > 0, name
    assert "Draft_Target" in httpx.get(f"{url}/").text
    data = httpx.get(f"{url}/dashboard/data", timeout=60).json()
    assert data["emitted_tokens"] >= data["request_rounds"] > 0 and data["why"]


@pytest.mark.parametrize("choice", ["required", "f"])
def test_a_forced_call_matches_its_schema(client: openai.OpenAI, choice: str) -> None:
    pytest.importorskip("llguidance")
    city = {"type": "object", "properties": {"at": {"enum": ["Rome"]}}, "required": ["at"]}
    schema = city | {"additionalProperties": False}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    named: Any = {"type": "function", "function": {"name": "f"}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a"}],
        tools=tools,
        tool_choice="required" if choice == "required" else named,
        parallel_tool_calls=False,
        max_tokens=500,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "f"
    assert json.loads(call.function.arguments) == {"at": "Rome"}


def test_the_schemas_of_forced_calls_may_refer_to_themselves(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    nothing = {"type": "null"}
    pair = {"type": "object", "required": ["next"], "additionalProperties": False}
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    **pair,
                    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Next"}, nothing]}},
                    "$defs": {"Next": {**pair, "properties": {"next": {"const": name}}}},
                },
            },
        }
        for name in ("f", "g")
    ]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a"}],
        tools=tools,
        tool_choice="required",
        max_tokens=500,
        seed=3,
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    inner = json.loads(call.function.arguments)["next"]
    assert inner is None or inner == {"next": call.function.name}


NO_TYPE = {"type": "objekt"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": NO_TYPE}}}}
FORMAT = {"type": "json_schema", "name": "a", "schema": NO_TYPE}


@pytest.mark.parametrize(
    ("path", "option", "own"),
    [
        ("completions", "guided_json", {"guided_json": NO_TYPE}),
        ("completions", "guided_regex", {"guided_regex": "(a"}),
        ("completions", "structured_outputs", {"structured_outputs": {"grammar": "a"}}),
        (
            "chat/completions",
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": NO_TYPE}}},
        ),
        ("chat/completions", "tools", {"tools": [TOOL], "tool_choice": "required"}),
        ("responses", "text.format", {"text": {"format": FORMAT}}),
        ("messages", "output_config.format", {"output_config": {"format": FORMAT}}),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_called_as_the_client_called_it(
    url: str, path: str, option: str, own: dict[str, Any]
) -> None:
    pytest.importorskip("llguidance")
    prompts = {
        "completions": {"prompt": "a"},
        "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "responses": {"input": "a"},
        "messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
    }
    body = {"model": MODEL, **prompts[path], **own}
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error.get("param", option)) == (400, option)
    assert error["message"].startswith(f"{option} = ")


@pytest.mark.parametrize(
    "own",
    [
        {"guided_grammar": 'root ::= "a" rest\nrest ::= rest'},
        {"guided_choice": ["a"], "min_tokens": 5},
        {"guided_choice": ["a"], "bad": "a"},
    ],
)
def test_a_grammar_that_leaves_no_token_is_the_requests_mistake(
    client: openai.OpenAI, url: str, own: dict[str, Any]
) -> None:
    pytest.importorskip("llguidance")
    body = {"model": MODEL, "prompt": "a", **own}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert "no token can be chosen" in error["message"]
    streamed = httpx.post(f"{url}/v1/completions", json=body | {"stream": True}, timeout=60)
    *_, last = events_of(streamed)
    assert last == {"error": error}


def test_streams_of_several_samples_are_not_mixed_up(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["import os", "class A:", "return x"]
    results = llm.generate(prompts, SamplingParams(**SAMPLED, n=2), use_tqdm=False)
    texts = [""] * 6
    for chunk in client.completions.create(
        model=MODEL, prompt=prompts, **SAMPLED, n=2, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [output.text for result in results for output in result.outputs]


def test_an_answer_has_the_figures_of_its_speculation(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_completion_tokens=20,
        temperature=0,
    )
    figures: Any = answer.choices[0].model_extra["speculative_decoding"]
    assert answer.usage.completion_tokens <= 20
    assert figures["rounds"] > 0
    assert figures["num_drafted_tokens"] >= figures["num_accepted_tokens"]


def test_logprobs_end_with_the_text_at_a_stop_string(client: openai.OpenAI) -> None:
    full = client.completions.create(model=MODEL, prompt="a", **SAMPLED).choices[0].text
    stop = full[len(full) // 2 :][:3]
    choice = client.completions.create(
        model=MODEL, prompt="a", **SAMPLED, stop=stop, logprobs=1
    ).choices[0]
    assert choice.text == full[: full.index(stop)]
    assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", stop)
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)


@pytest.mark.parametrize("enabled", [True, False])
def test_streamed_logprobs_are_those_of_the_whole_answer_up_to_a_stop_string(
    client: openai.OpenAI, enabled: bool
) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "prompt": "a",
        **SAMPLED,
        "logprobs": 1,
        "extra_body": {"speculation": {"enabled": enabled}},
    }
    full = client.completions.create(**request).choices[0]
    middle = len(full.logprobs.tokens) // 2
    stop = "".join(full.logprobs.tokens[middle : middle + 4])
    whole = client.completions.create(**request, stop=stop).choices[0]
    streamed = [
        chunk.choices[0] for chunk in client.completions.create(**request, stop=stop, stream=True)
    ]
    assert whole.model_extra["stop_reason"] == stop
    assert [token for each in streamed for token in each.logprobs.tokens] == whole.logprobs.tokens
    logprobs = [logprob for each in streamed for logprob in each.logprobs.token_logprobs]
    assert logprobs == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)


def test_a_prompt_that_is_too_long_is_refused_and_the_server_keeps_serving(
    client: openai.OpenAI, url: str
) -> None:
    for prompt in ([5] * 5000, "a " * 100_000):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as refusal:
            client.completions.create(model=MODEL, prompt=prompt)
        assert refusal.value.code == "context_length_exceeded"
    assert httpx.get(f"{url}/health").status_code == 200
    assert (
        client.completions.create(model=MODEL, prompt="a", max_tokens=2).usage.completion_tokens
        == 2
    )


def test_the_engine_is_probed_and_requests_are_timed(client: openai.OpenAI, url: str) -> None:
    assert httpx.get(f"{url}/health_generate", timeout=60).status_code == 200
    httpx.get(f"{url}/perf_metrics")
    client.completions.create(model=MODEL, prompt="def f(", max_tokens=30)
    rounds = httpx.get(f"{url}/iteration_stats").json()
    assert sum(each["numCompletedRequests"] for each in rounds) >= 1
    (record,) = httpx.get(f"{url}/perf_metrics").json()
    times = record["perf_metrics"]["timing_metrics"]
    assert list(times.values()) == sorted(times.values())


def test_server_info_and_metrics_count_what_was_served(client: openai.OpenAI, url: str) -> None:
    before = httpx.get(f"{url}/server_info").json()["internal_states"][0]
    client.completions.create(
        model=MODEL, prompt="def f(", max_tokens=60, extra_body={"ignore_eos": True}
    )
    info = httpx.get(f"{url}/server_info").json()
    state = info["internal_states"][0]
    assert (info["served_model_name"], info["max_batch_size"]) == (MODEL, 4)
    assert state["totals"]["generated_tokens"] == before["totals"]["generated_tokens"] + 60
    assert state["speculative_num_steps"] in (0, 3) and state["avg_spec_accept_length"] >= 1
    decisions = state["controller"]["decisions"]
    assert decisions["num_switches"] > before["controller"]["decisions"]["num_switches"]
    assert decisions["last"][-1]["reason"]
    text = httpx.get(f"{url}/metrics").text
    assert f"tllm_spec_generated_tokens_total {state['totals']['generated_tokens']:.1f}" in text
    assert f"tllm_spec_draft_len_switches_total {decisions['num_switches']:.1f}" in text
    assert 'tllm_spec_rounds_total{draft_len="0"}' in text


def test_metrics_are_answered_while_requests_run(client: openai.OpenAI, url: str) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="a", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert "trtllm_num_requests_running 1.0" in httpx.get(f"{url}/metrics").text
    stream.close()
