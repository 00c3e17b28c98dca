"""Rounds that take what a table says, however long they really take."""

from pathlib import Path

import pytest

from benchmarks.table_clock import TableClock
from tllm_spec import LLM, SamplingParams

TIMES = Path(__file__).parents[2] / "benchmarks" / "zoo_round_times.json"


@pytest.mark.parametrize(("temperature", "a_round"), [(0.0, 4.2), (1.0, 4.3)])
def test_a_request_takes_its_prompt_and_its_rounds(temperature: float, a_round: float) -> None:
    with LLM("zoo:llama", max_batch_size=8, max_seq_len=64) as llm:
        clock = TableClock(llm, TIMES, start_up_spread=0.1, round_spread=0.5, seed=0)
        params = SamplingParams(max_tokens=11, temperature=temperature, ignore_eos=True)
        llm.generate([[3, 1, 4]], params, use_tqdm=False)
        assert clock.total == pytest.approx((8.0 + 10 * a_round) / 1e3)


def test_a_controller_starts_with_the_table_off_by_something() -> None:
    speculation = {
        "decoding_type": "NGram",
        "max_draft_len": 5,
        "adaptive": {"candidate_steps": [0, 1, 3, 5]},
    }
    with LLM("zoo:llama", max_batch_size=8, max_seq_len=64, speculative_config=speculation) as llm:
        TableClock(llm, TIMES, start_up_spread=0.1, round_spread=0.1, seed=0)
        times = llm._executor.parts.controller._times
        assert times is not None
        greedy, sampled = times.row(8, False), times.row(8, True)
        assert greedy[0] != 0.0095 and greedy[0] == pytest.approx(0.0095, rel=0.4)
        assert sampled[5] - greedy[5] == pytest.approx(0.0085, rel=0.4)
