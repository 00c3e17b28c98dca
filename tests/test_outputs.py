"""Outputs: diffs of a growing completion, and the definitions of the speculation figures."""

import asyncio
import contextlib
import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tllm_spec.executor.request import Response, StopMatch
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.grammars import end_ids_of
from tllm_spec.llm import LLM
from tllm_spec.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculativeStats,
)
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.registry import resolve_model

# Three rounds: 3, 3 and 1 drafts proposed; 3, 1 and 0 accepted; a stop cut the first run by one
# token.
STATS = SpeculativeStats(
    rounds=3, num_emitted_tokens=6, per_position_drafted=(3, 2, 2), per_position_accepted=(2, 1, 1)
)


def test_acceptance_length_counts_emitted_tokens_with_the_bonus_token() -> None:
    assert STATS.acceptance_length == 2.0


def test_acceptance_rate_counts_proposed_drafts_only() -> None:
    assert (STATS.num_drafted_tokens, STATS.num_accepted_tokens) == (7, 4)
    assert STATS.draft_acceptance_rate == 4 / 7
    assert STATS.per_position_acceptance == (2 / 3, 1 / 2, 1 / 2)


def test_the_histogram_counts_rounds_by_accepted_drafts() -> None:
    assert STATS.acceptance_histogram == (1, 1, 0, 1)
    assert sum(STATS.acceptance_histogram) == STATS.rounds


def test_figures_of_several_samples_are_added() -> None:
    other = SpeculativeStats(1, 2, (1,), (1,))
    total = STATS + other
    assert total == SpeculativeStats(4, 8, (4, 2, 2), (3, 1, 1))
    assert total == other + STATS
    assert STATS + SpeculativeStats() == STATS


def test_figures_without_rounds_are_zero() -> None:
    empty = SpeculativeStats()
    assert (
        empty.acceptance_length,
        empty.draft_acceptance_rate,
        empty.per_position_acceptance,
    ) == (0, 0, ())


def test_diffs_begin_at_the_last_delivery() -> None:
    output = CompletionOutput(
        index=0, text="ab", token_ids=[1, 2], logprobs=[{1: Logprob(-0.5, 1)}, {2: Logprob(-1.0)}]
    )
    assert (output.text_diff, output.token_ids_diff, output.length) == ("ab", [1, 2], 2)
    output.start_next_diff()
    assert (output.text_diff, output.token_ids_diff, output.logprobs_diff) == ("", [], [])
    output.text += "c"
    output.token_ids.append(3)
    output.logprobs.append({3: Logprob(-0.1, 1)})
    assert (output.text_diff, output.token_ids_diff) == ("c", [3])
    assert output.logprobs_diff == [{3: Logprob(-0.1, 1)}]


def test_a_request_sums_the_speculation_of_its_samples() -> None:
    samples = [CompletionOutput(index=0, speculative_decoding=STATS), CompletionOutput(index=1)]
    metrics = RequestMetrics(arrival_time=10.0, first_scheduled_time=10.5, first_token_time=11.0)
    request = RequestOutput(1, "a", [5], samples, metrics)
    assert request.speculative_decoding == STATS
    assert RequestOutput(1, "a", [5], samples[1:], metrics).speculative_decoding is None
    assert (metrics.queue_time, metrics.time_to_first_token, metrics.latency) == (0.5, 1.0, None)


def test_speculative_figures_show_the_acceptance() -> None:
    shown = repr(SpeculativeStats(4, 10, (4, 4), (4, 2)))
    assert "rounds=4, acceptance_length=2.50, draft_acceptance_rate=0.75" in shown


# Which tokens end a text: those of the model's files and the tokenizer's.


PROMPT = "def add(a, b):\n    return"


@pytest.mark.parametrize(
    ("model", "tokenizer", "expected"),
    [
        ((1, 2), 7, (1, 2, 7)),
        ((1, 2), 2, (1, 2)),
        ((), 7, (7,)),
        ((1,), None, (1,)),
        ((1, 99, -1), 100, (1,)),
    ],
)
def test_the_end_tokens_are_the_models_and_the_tokenizers_of_the_vocabulary(
    model: tuple[int, ...], tokenizer: int | None, expected: tuple[int, ...]
) -> None:
    limits = RequestLimits(99, model, 64, 0, None)
    own: Any = SimpleNamespace(eos_token_id=tokenizer)
    assert end_ids_of(limits, own) == expected
    assert end_ids_of(limits, None) == tuple(each for each in model if 0 <= each < 99)


def test_a_text_ends_at_the_end_token_that_only_the_tokenizer_names(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_seq_len": 64, "max_num_tokens": 64}
    with LLM("zoo:llama", **options) as llm:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        plain = llm.generate(PROMPT, params, use_tqdm=False).outputs[0].token_ids
    end, folder = plain[6], tmp_path / "tokenizer"
    shutil.copytree(resolve_model("zoo:llama"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = {number: name for name, number in tokenizer["model"]["vocab"].items()}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    changed = settings | {"eos_token": names[end]}
    (folder / "tokenizer_config.json").write_text(json.dumps(changed))
    with LLM("zoo:llama", tokenizer=str(folder), **options) as llm:
        output = llm.generate(PROMPT, SamplingParams(max_tokens=12), use_tqdm=False).outputs[0]
        llm.check_integrity()
    assert output.finish_reason == "stop"
    assert output.token_ids[: plain.index(end)] == plain[: plain.index(end)]
    assert len(output.token_ids) <= plain.index(end) + 1


# `RequestHandle`: waiting, copies, stop strings, and readers that are gone.


def test_a_response_for_a_closed_event_loop_is_kept_without_an_error() -> None:
    handle = RequestHandle(1, None, [5], SamplingParams(), None, lambda: None)
    loop = asyncio.new_event_loop()
    reading = loop.create_task(handle.aresult())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()  # with the reader still waiting
    handle.receive(Response(1, [7], finish_reason="length"))
    assert handle.result(timeout=1).outputs[0].token_ids == [7]
    reading._log_destroy_pending = False
    with contextlib.suppress(RuntimeError):
        reading.get_coro().close()


def test_waiting_longer_than_the_timeout_raises() -> None:
    handle = RequestHandle(1, None, [5], SamplingParams(), None, lambda: None)
    with pytest.raises(TimeoutError, match="request 1"):
        handle.result(timeout=0.01)


def test_a_tokenizer_that_raises_raises_at_every_read_and_no_reader_hangs() -> None:
    class Failing:
        def decode(self, token_ids: list[int], **options: object) -> str:
            raise KeyError("no such piece")

    tokenizer: Any = Failing()
    handle = RequestHandle(1, None, [5], SamplingParams(), tokenizer, lambda: None)
    handle.receive(Response(1, [7], finish_reason="length"))
    for _ in range(2):
        with pytest.raises(KeyError, match="no such piece"):
            handle.result(timeout=1)


def finished_handle() -> RequestHandle:
    handle = RequestHandle(1, "a", [5], SamplingParams(n=2), None, lambda: None)
    for index in range(2):
        handle.receive(Response(1, [7, 8], index, finish_reason="length", cached_tokens=3))
    return handle.result(timeout=1)


def test_handles_can_be_gathered() -> None:
    async def gather() -> list[RequestHandle]:
        return await asyncio.gather(*handles)

    handles = [finished_handle(), finished_handle()]
    assert asyncio.run(gather()) == handles


def test_a_handle_equals_only_itself() -> None:
    handle, reference = finished_handle(), finished_handle()
    reference.metrics = handle.metrics
    assert handle == handle and handle != reference
    assert len({handle, reference}) == 2


@pytest.mark.parametrize(
    "copied", [lambda handle: pickle.loads(pickle.dumps(handle)), copy.deepcopy, copy.copy]
)
def test_a_copy_of_a_handle_is_a_plain_output(
    copied: Callable[[RequestHandle], RequestOutput],
) -> None:
    handle = finished_handle()
    output = copied(handle)
    assert type(output) is RequestOutput
    assert vars(output).items() <= vars(handle).items()
    assert output.finished and output.outputs[1].token_ids == [7, 8]


@pytest.mark.parametrize("detokenize", [True, False])
def test_tokens_of_a_stop_string_are_never_delivered(detokenize: bool) -> None:
    tokenizer = load_tokenizer("zoo:llama")
    kept, stop = tokenizer.encode("x = 1"), tokenizer.encode("\n\ndef")
    params = SamplingParams(stop=["\n\ndef"], logprobs=0, detokenize=detokenize)
    handle = RequestHandle(1, "a", [5], params, tokenizer, lambda: None)
    output, delivered, logprobs = handle.outputs[0], [], []
    for token in [*kept, *stop]:
        is_last = token == stop[-1]
        match = StopMatch("\n\ndef", "x = 1", len(kept)) if is_last else None
        reason = "stop" if is_last else None
        at = [{token: Logprob(-1.0)}]
        handle.receive(Response(1, [token], logprobs=at, finish_reason=reason, stop_match=match))
        next(handle)
        delivered += output.token_ids_diff
        logprobs += output.logprobs_diff
    assert delivered == output.token_ids == kept
    assert logprobs == output.logprobs == [{token: Logprob(-1.0)} for token in kept]
    assert output.text == ("x = 1" if detokenize else "")


def test_held_tokens_are_delivered_when_no_stop_string_came() -> None:
    tokenizer = load_tokenizer("zoo:llama")
    token_ids = tokenizer.encode("x = 1\n\n")
    handle = RequestHandle(1, "a", [5], SamplingParams(stop=["\n\ndef"]), tokenizer, lambda: None)
    handle.receive(Response(1, token_ids))
    next(handle)
    assert handle.outputs[0].text == "x = 1"
    handle.receive(Response(1, [], finish_reason="cancelled"))
    output = handle.result(timeout=1).outputs[0]
    assert (output.text, output.token_ids) == ("x = 1\n\n", token_ids)


@pytest.mark.parametrize("later", [0, 1])
def test_the_moments_of_several_samples_are_those_of_the_earliest(later: int) -> None:
    handle = RequestHandle(1, "a", [5], SamplingParams(n=2), None, lambda: None)
    for index in range(2):
        late = float(index == later)
        times = {"first_scheduled_time": 1 + late, "first_token_time": 3 + late}
        handle.receive(Response(1, [7], index, **times))
        handle.receive(Response(1, [8], index, finish_reason="length"))
    metrics = handle.result(timeout=1).metrics
    assert (metrics.first_scheduled_time, metrics.first_token_time) == (1, 3)


def test_a_handle_shows_itself_as_the_output_that_it_is() -> None:
    handle = RequestHandle(7, "a", [1], SamplingParams(n=2), None, lambda: None)
    shown = repr(handle)
    assert shown.startswith("RequestOutput(request_id=7, prompt='a', prompt_token_ids=[1]")
