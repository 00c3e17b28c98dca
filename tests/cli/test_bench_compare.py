"""Comparisons: the order of the runs, the differences between texts, the rows of the table."""

import math
from typing import Any

import pytest

from tests.cli.fake_llm import FakeHandle, FakeLLM, make_output
from tllm_spec.bench.compare import (
    Contestant,
    comparison,
    differences,
    fidelity,
    first_difference,
    run_in_turn,
)
from tllm_spec.bench.dataset import BenchRequest
from tllm_spec.bench.plot import comparison_curves
from tllm_spec.bench.report import FIDELITY, format_rows
from tllm_spec.bench.runner import Run, sampling_for
from tllm_spec.outputs import Logprob, RequestOutput, SpeculativeStats

REQUESTS = [BenchRequest(3, [1, 2], 6), BenchRequest(5, [1, 2], 6)]


def contestant(
    name: str,
    *seconds: float,
    stats: SpeculativeStats | None = None,
    concurrency: int = 1,
    **llm: Any,
) -> Contestant:
    """With one run for each number of seconds; a run is two requests of 6 tokens."""
    runs = [
        Run([make_output(2, 6, stats=stats), make_output(2, 6, stats=stats)], each)
        for each in seconds
    ]
    return Contestant(name, FakeLLM("zoo:llama", **llm), concurrency, runs)


def test_warm_up_runs_are_discarded() -> None:
    llm = FakeLLM("zoo:llama")
    fake = Contestant("plain", llm)
    run_in_turn([fake], REQUESTS, sampling_for(REQUESTS), repeat=3, warmup=2, streaming=False)
    assert len(fake.runs) == 3 and len(llm.sampling) == 2 * (3 + 2)


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("streaming", [False, True])
def test_each_contestant_runs_at_its_own_concurrency(concurrency: int, streaming: bool) -> None:
    llm = FakeLLM("zoo:llama")
    fake = Contestant("plain", llm, concurrency)
    run_in_turn([fake], REQUESTS, sampling_for(REQUESTS), repeat=1, warmup=0, streaming=streaming)
    assert llm.max_under_way == concurrency and llm.num_streamed == (2 if streaming else 0)


def test_speeds_are_medians_and_the_speedup_is_their_ratio() -> None:
    stats = SpeculativeStats(2, 5, (2, 2), (2, 1))
    contestants = [contestant("plain", 3, 12, 4), contestant("drafted", 1, 2, 12, stats=stats)]
    rows = comparison(contestants, streaming=False)
    assert rows[0]["output_tokens_per_s"] == 3 and rows[0]["output_tokens_per_s_range"] == [1, 4]
    assert rows[1]["output_tokens_per_s"] == 6 and rows[1]["speedup"] == 2
    assert rows[0]["acceptance_length"] is None and rows[0]["speedup"] == 1
    assert (rows[1]["acceptance_length"], rows[1]["draft_acceptance_rate"]) == (2.5, 0.75)
    assert rows[1]["per_position_acceptance"] == [1, 0.5]


def test_only_streamed_requests_have_times_to_the_first_token_and_between_tokens() -> None:
    (row,) = comparison([contestant("plain", 3)], streaming=True)
    times = [row[name]["p50"] for name in ("ttft_ms", "tpot_ms", "e2el_ms")]
    assert times == [500, 300, 2000], "0.5 s to the first of 6 tokens, and 2 s to the last"
    (row,) = comparison([contestant("plain", 3)], streaming=False)
    assert row["e2el_ms"]["p50"] == 2000 and not {"ttft_ms", "tpot_ms"} & row.keys()


def test_the_picture_has_a_curve_for_each_configuration_and_a_point_for_each_load() -> None:
    rows = [
        row
        for limit, seconds in ((1, 4.0), (8, 2.0), (-1, 1.0))
        for row in comparison(
            [
                contestant("plain", seconds, concurrency=limit),
                contestant("drafted", seconds / 2, concurrency=limit),
            ],
            streaming=False,
        )
    ]
    curves = comparison_curves(rows)
    points = {
        name: [(point.load, point.output_tokens_per_s) for point in curve]
        for name, curve in curves.items()
    }
    assert points == {
        "plain": [("1", 3), ("8", 6), ("no limit", 12)],
        "drafted": [("1", 6), ("8", 12), ("no limit", 24)],
    }
    assert curves["plain"][0].latencies == {"e2el_ms": 2000}


def test_a_row_has_the_options_of_its_speculation() -> None:
    spec = {
        "decoding_type": "Eagle3",
        "max_draft_len": 3,
        "speculative_model": "head",
        "eagle3_one_model": False,
    }
    plain, drafted = comparison(
        [contestant("a", 1), contestant("b", 1, speculative_config=spec)], streaming=False
    )
    assert plain["speculation"] is None
    assert spec.items() <= drafted["speculation"].items()


def test_a_difference_is_reported_once_with_its_first_position() -> None:
    plain, drafted = (contestant(name, 1, 1, concurrency=4) for name in ("plain", "drafted"))
    for run in drafted.runs:
        run.outputs[1].outputs[0].token_ids[3:5] = [77, 78]
    (found,) = differences([plain, drafted], REQUESTS)
    assert str(found) == (
        "drafted, concurrency 4, task_id 5: output token 3 is 77, the baseline has 3"
    )


def test_a_later_run_of_the_baseline_that_differs_is_reported_too() -> None:
    plain = contestant("plain", 1, 1)
    plain.runs[1].outputs[0].outputs[0].token_ids.pop()
    (found,) = differences([plain], REQUESTS)
    assert (found.name, found.task_id, found.position, found.found) == ("plain", 3, 5, None)


def test_the_end_of_the_shorter_text_is_a_difference() -> None:
    assert first_difference([1, 2], [1]) == (1, 2, None)
    assert first_difference([1], [1, 2]) == (1, None, 2)
    assert first_difference([1, 2], [1, 2]) is None


# What `compare --with_model` says of two models: equal tokens, equal first choices, perplexities.


READ = [BenchRequest(0, [4, 5, 6], 4), BenchRequest(1, [4], 4)]


class Reader(FakeLLM):
    """Gives prompt tokens after the first the probability `own`, and each position's first choice
    is its token, except of those in `wrong`."""

    def __init__(self, own: float, wrong: tuple[int, ...] = (), shift: int = 0) -> None:
        super().__init__("zoo:llama")
        self.own, self.wrong, self.shift = own, wrong, shift

    def generate_async(self, prompt: Any, params: Any, streaming: bool = False) -> FakeHandle:
        assert params.prompt_logprobs == 1
        handle = super().generate_async(prompt, params, streaming)
        handle.output.prompt_token_ids = [token + self.shift for token in prompt]
        handle.output.outputs[0].prompt_logprobs = [
            None, *(self.entry(token + self.shift) for token in prompt[1:])
        ]  # fmt: skip
        return handle

    def entry(self, token: int) -> dict[int, Logprob]:
        if token in self.wrong:
            return {token: Logprob(math.log(self.own), 2), 99: Logprob(math.log(0.5), 1)}
        return {token: Logprob(math.log(self.own), 1)}


def text_of(*tokens: int) -> RequestOutput:
    output = make_output(1, 1)
    output.outputs[0].token_ids = list(tokens)
    return output


def reader(name: str, llm: FakeLLM, *outputs: RequestOutput) -> Contestant:
    return Contestant(name, llm, runs=[Run(list(outputs), 1.0)])


def test_shares_are_of_all_positions_and_a_perplexity_is_of_predicted_tokens() -> None:
    original = reader("plain", Reader(0.25), text_of(1, 2, 3, 4), text_of(1, 2, 3, 4))
    copy = reader("int4", Reader(0.125, (6,)), text_of(1, 2, 3, 9), text_of(1, 2))
    rows = fidelity([original, copy], READ)
    assert rows == [
        {
            "configuration": "plain",
            "equal_tokens": 1.0,
            "equal_choices": 1.0,
            "perplexity": pytest.approx(4),
        },
        {
            "configuration": "int4",
            "equal_tokens": 5 / 8,
            "equal_choices": 0.5,
            "perplexity": pytest.approx(8),
        },
    ]
    assert format_rows(FIDELITY, rows).splitlines()[2].split() == [
        "int4",
        "62.5%",
        "50.0%",
        "8.0000",
    ]


def test_prompts_of_one_token_say_nothing() -> None:
    (row,) = fidelity([reader("plain", Reader(0.25), text_of(1))], READ[1:])
    assert (row["equal_choices"], row["perplexity"]) == (None, None)
    assert format_rows(FIDELITY, [row]).splitlines()[1].split() == ["plain", "100.0%", "-", "-"]


def test_models_with_other_tokens_are_refused() -> None:
    models = [
        reader("one", Reader(0.25), text_of(1), text_of(1)),
        reader("other", Reader(0.25, shift=1), text_of(1), text_of(1)),
    ]
    with pytest.raises(ValueError, match="different tokens of the prompts"):
        fidelity(models, READ)
