"""The executor's totals: what they add up to, whatever was running when they were asked."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.executor.harness import Harness, output_of, user_provided
from tllm_spec.executor.totals import Totals
from tllm_spec.llm import LLM
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.sampling_params import SamplingParams


def test_rounds_are_kept_by_draft_length_and_changes_are_counted() -> None:
    totals = Totals()
    for draft_len, num_emitted, seconds in (
        (3, [1, 4], 0.5),
        (3, [2], None),
        (0, [1, 1, 1], 0.25),
        (3, [], 9.0),  # a round of prompts only
        (0, [1], 0.25),
        (3, [3], 0.5),
    ):
        totals.add_round(draft_len, len(num_emitted), sum(num_emitted), seconds)
    state = totals.state([])
    assert state["by_draft_len"] == {
        "0": {
            "rounds": 2,
            "request_rounds": 4,
            "emitted_tokens": 4,
            "timed_rounds": 2,
            "seconds": 0.5,
        },
        "3": {
            "rounds": 3,
            "request_rounds": 4,
            "emitted_tokens": 10,
            "timed_rounds": 2,
            "seconds": 1.0,
        },
    }
    assert state["draft_len_changes"] == 2
    assert state["latest_round"] == {"batch_size": 1, "draft_len": 3}


@pytest.mark.parametrize("disable_overlap", [True, False])
def test_plain_rounds_are_counted_too(tiny: Path, disable_overlap: bool) -> None:
    harness = Harness(tiny, disable_overlap_scheduler=disable_overlap)
    for prompt in ([1, 2, 3], [4, 5]):
        harness.submit(prompt, max_tokens=10)
    harness.run()
    totals = harness.executor.state()["totals"]
    row = totals["by_draft_len"]["0"]
    assert totals["generated_tokens"] == 20
    assert row["request_rounds"] == row["emitted_tokens"] == 18, (
        "the prompts' rounds gave one token each"
    )
    assert 0 < row["timed_rounds"] <= row["rounds"] and row["seconds"] > 0
    assert totals["requests_by_finish_reason"] == {"length": 2}
    assert totals["speculation"] == SpeculativeStats(0, 0, (), ()).to_dict()


def test_totals_are_the_sum_of_the_requests_whether_they_run_or_have_ended(tiny: Path) -> None:
    harness = Harness(tiny, **user_provided(lambda request: [1, 2, 3]))
    short, long = (
        harness.submit([1, 2, 3], max_tokens=6),
        harness.submit([4, 5, 6, 7], max_tokens=40),
    )
    while not short.is_finished:
        harness.round()
    for _ in range(2):
        totals = harness.executor.state()["totals"]
        stats = short.counters.stats() + long.counters.stats()
        assert totals["speculation"] == stats.to_dict()
        assert totals["generated_tokens"] == short.num_output_tokens + long.num_output_tokens
        assert totals["prompt_tokens"] == 7
        rows = totals["by_draft_len"].values()
        assert sum(row["request_rounds"] for row in rows) == stats.rounds
        assert sum(row["emitted_tokens"] for row in rows) == stats.num_emitted_tokens
        harness.run()


def test_tokens_after_a_stop_do_not_count_as_emitted(tiny: Path) -> None:
    plain = Harness(tiny)
    wanted = plain.submit([1, 2, 3], max_tokens=12)
    plain.run()
    known = output_of(wanted)
    stop = next(place for place in range(2, 5) if known[place] not in known[:place])
    harness = Harness(tiny, **user_provided(lambda request: known[len(output_of(request)) :][:4]))
    request = harness.submit([1, 2, 3], max_tokens=12, stop_token_ids=[known[stop]])
    harness.run()
    (row,) = harness.executor.state()["totals"]["by_draft_len"].values()
    assert output_of(request) == known[: stop + 1]
    assert row["emitted_tokens"] == stop < 5, (
        "the first token came with the prompt; all five were accepted"
    )


def test_rounds_with_prompts_in_them_are_not_timed(tiny: Path) -> None:
    harness = Harness(tiny, disable_overlap_scheduler=True)
    harness.submit([1, 2, 3], max_tokens=10)
    harness.rounds(4)
    harness.submit([4, 5, 6], max_tokens=4)
    harness.run()
    row = harness.executor.state()["totals"]["by_draft_len"]["0"]
    assert (row["rounds"], row["timed_rounds"]) == (9, 8)


def test_requests_are_counted_by_how_they_ended(tiny: Path) -> None:
    harness = Harness(tiny, kv_cache_config={"tokens_per_block": 4, "max_tokens": 40})
    harness.submit([1, 2, 3], max_tokens=4)
    cancelled = harness.submit([1, 2, 3], max_tokens=20)
    harness.submit([1, 2, 3], max_tokens=200)  # more than the cache has
    harness.round()
    state = harness.executor.state()
    assert state["num_requests_running"] == 2 and state["num_requests_waiting"] == 0
    harness.queue.cancel(cancelled.request_id)
    harness.run()
    totals = harness.executor.state()["totals"]
    assert totals["requests_by_finish_reason"] == {"error": 1, "cancelled": 1, "length": 1}


def test_every_page_is_free_or_used_or_cached(tiny: Path) -> None:
    harness = Harness(tiny, kv_cache_config={"tokens_per_block": 4, "max_tokens": 400})
    request = harness.submit(list(range(1, 11)), max_tokens=9)
    harness.round()
    cache = harness.executor.state()["kv_cache"]
    held = harness.parts.kv.held(request)[0]
    assert cache["used"] == held > 0
    assert cache["free"] + cache["used"] + cache["cached"] == cache["num_pages"] == 100
    harness.run()
    after = harness.executor.state()["kv_cache"]
    assert after["used"] == 0 and after["cached"] > 0
    assert after["free"] == 100 - after["cached"]


def test_the_draft_length_shown_is_the_one_for_the_latest_batch_size(tiny: Path) -> None:
    options = user_provided(lambda request: [1] * len(request.py_draft_tokens))
    options["speculative_config"]["draft_len_schedule"] = {1: 4, 2: 1}
    harness = Harness(tiny, **options)
    harness.submit([1, 2, 3], max_tokens=20)
    harness.submit([4, 5, 6], max_tokens=60)
    harness.rounds(3)
    assert harness.executor.state()["draft_len"] == 1
    harness.run()
    state = harness.executor.state()
    assert state["draft_len"] == 4 and state["totals"]["draft_len_changes"] >= 1
    assert {"1", "4"} <= state["totals"]["by_draft_len"].keys()


# `LLM.get_stats`: one entry a round under TensorRT-LLM's names, only when enabled, bounded.
# `print_iter_log`: one line of the log a round.


PARAMS = SamplingParams(max_tokens=9, ignore_eos=True)


def make_llm(tiny: Path, **options: Any) -> LLM:
    return LLM(tiny, skip_tokenizer_init=True, max_batch_size=4, max_seq_len=64, **options)


@pytest.mark.parametrize("disable_overlap", [True, False])
def test_every_round_has_an_entry_and_a_second_read_has_only_new_ones(
    tiny: Path, disable_overlap: bool
) -> None:
    with make_llm(
        tiny, enable_iter_perf_stats=True, disable_overlap_scheduler=disable_overlap
    ) as llm:
        llm.generate([[1, 2, 3], [4, 5]], PARAMS, use_tqdm=False)
        stats = llm.get_stats()
        assert [entry["iter"] for entry in stats] == list(range(len(stats)))
        assert llm.get_stats() == []
        llm.generate([7], PARAMS)
        later = llm.get_stats()
    assert later[0]["iter"] == len(stats)
    batching = [entry["inflightBatchingStats"] for entry in stats]
    assert batching[0]["numGenRequests"] == 0
    assert sum(round["numContextRequests"] for round in batching) == 2
    # 8 tokens of each request come from generation rounds.
    assert sum(round["numGenRequests"] for round in batching) >= 16
    assert sum(entry["numNewActiveRequests"] for entry in stats) == 2
    assert sum(entry["numCompletedRequests"] for entry in stats) == 2
    cache = stats[-1]["kvCacheStats"]
    assert cache["freeNumBlocks"] + cache["usedNumBlocks"] == cache["maxNumBlocks"]
    assert cache["tokensPerBlock"] == 32
    assert all("specDecodingStats" not in entry for entry in stats)


def test_speculation_is_counted_per_round(tiny: Path) -> None:
    options = user_provided(lambda request: [63] * len(request.py_draft_tokens))
    params = SamplingParams(max_tokens=9, ignore_eos=True, logit_bias={63: -100.0})
    with make_llm(tiny, enable_iter_perf_stats=True, **options) as llm:
        output = llm.generate([1, 2, 3], params)
        stats = llm.get_stats()
    rounds = [entry["specDecodingStats"] for entry in stats if "specDecodingStats" in entry]
    speculation = output.speculative_decoding
    assert sum(round["numDraftTokens"] for round in rounds) == speculation.num_drafted_tokens > 0
    assert {round["numAcceptedTokens"] for round in rounds} == {0}
    assert {round["acceptanceLength"] for round in rounds} == {1.0}


def test_a_line_of_the_log_says_what_each_round_did(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tllm_spec.executor.totals")
    options = user_provided(lambda request: [63] * len(request.py_draft_tokens))
    params = SamplingParams(max_tokens=4, ignore_eos=True, logit_bias={63: -100.0})
    with make_llm(tiny, print_iter_log=True, **options) as llm:
        drafts = llm.generate([1, 2, 3], params).speculative_decoding
        assert llm.get_stats() == []
    rounds = [line for line in caplog.messages if line.startswith("round ")]
    assert [line.partition(":")[0] for line in rounds] == [f"round {n}" for n in range(4)]
    assert "1 running, 0 waiting, 1 prefilling, 0 generating" in rounds[0]
    assert "0 prefilling, 1 generating 1 tokens, draft length" in rounds[1]
    num_drafts = sum(int(re.search(r"0 of (\d+) drafts", line)[1]) for line in rounds)
    assert num_drafts == drafts.num_drafted_tokens > 0


def test_only_the_latest_rounds_are_kept(tiny: Path) -> None:
    with make_llm(tiny, enable_iter_perf_stats=True, max_stats_len=3) as llm:
        llm.generate([1, 2, 3], PARAMS)
        stats = llm.get_stats()
    assert len(stats) == 3 and stats[0]["iter"] >= 6


def test_without_the_option_nothing_is_collected_and_a_warning_says_so(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_llm(tiny) as llm:
        llm.generate([1, 2, 3], PARAMS)
        assert llm.get_stats() == []
        assert llm._executor.parts.iteration_stats is None
    assert "enable_iter_perf_stats" in caplog.text
