"""`LLM.get_stats`: one entry a round under TensorRT-LLM's names, only when enabled, bounded.
`print_iter_log`: one line of the log a round."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.executor.harness import user_provided
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

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
