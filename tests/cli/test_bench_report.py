"""The report's figures against numbers calculated by hand."""

import json
from typing import Any

import pytest

from tests.cli.fake_llm import make_output
from tllm_spec.bench.report import (
    build_report,
    decoding_section,
    draft_lens_section,
    format_report,
    format_table,
    percentiles,
    performance_section,
    request_section,
    streaming_section,
)
from tllm_spec.bench.runner import Run
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.outputs import SpeculativeStats

# Prompt 10 and 30 tokens, output 20 and 5; the first token after 0.5 s, the end after 2 s and 1 s.
OUTPUTS = [make_output(10, 20, latency_s=2.0), make_output(30, 5, latency_s=1.0)]
RUN = Run(OUTPUTS, elapsed_s=2.5)


def eagle3_args(**options: Any) -> LlmArgs:
    spec = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "head"}
    return LlmArgs.from_kwargs("zoo:llama", speculative_config=spec | options)


def test_percentiles_are_interpolated_linearly() -> None:
    expected = {
        "minimum": 1,
        "maximum": 5,
        "average": 3,
        "p50": 3,
        "p90": 4.6,
        "p95": 4.8,
        "p99": 4.96,
    }
    assert percentiles([5, 3, 1, 4, 2]) == pytest.approx(expected)


def test_throughput_counts_all_tokens_over_the_whole_time() -> None:
    figures = performance_section(RUN)
    assert figures["total_latency_ms"] == 2500
    assert figures["avg_request_latency_ms"] == 1500
    assert figures["request_throughput_req_s"] == 0.8
    assert figures["system_output_throughput_tok_s"] == 10  # 25 / 2.5
    assert figures["system_total_throughput_tok_s"] == 26  # (25 + 40) / 2.5
    assert figures["output_throughput_per_user_tok_s"] == 7.5  # mean of 20 / 2 and 5 / 1
    assert figures["output_throughput_per_gpu_tok_s"] == 10
    assert figures["request_latency_percentiles_ms"]["p90"] == pytest.approx(1900)


def test_average_concurrency_is_the_sum_of_latencies_over_the_runs_time() -> None:
    figures = request_section(RUN)
    assert figures["avg_num_concurrent_requests"] == pytest.approx(1.2)  # (2 + 1) / 2.5
    assert (figures["avg_input_length"], figures["avg_output_length"]) == (20, 12.5)


def test_time_per_output_token_excludes_the_first_token() -> None:
    figures = streaming_section(OUTPUTS)
    assert figures["avg_ttft_ms"] == 500
    # 1.5 s for 19 tokens, 0.5 s for 4
    assert figures["tpot_percentiles"]["minimum"] == pytest.approx(1500 / 19)
    assert figures["tpot_percentiles"]["maximum"] == pytest.approx(125)
    assert figures["gen_tps_percentiles"]["minimum"] == pytest.approx(8)
    assert figures["token_output_speed_tok_s"] == pytest.approx((19 / 1.5 + 8) / 2)


def test_a_request_of_one_token_has_no_time_per_output_token() -> None:
    figures = streaming_section([*OUTPUTS, make_output(1, 1)])
    assert figures["tpot_percentiles"]["minimum"] == pytest.approx(1500 / 19)


def test_acceptance_is_relative_to_the_proposed_drafts() -> None:
    # Draft length 3. First request: 4 rounds with 3, 3, 1, 0 drafts, of which 3, 1, 0, 0 were
    # accepted: 8 tokens. Second: 2 rounds with 3 drafts each, of which 0 and 2 were accepted:
    # 4 tokens. The others have no rounds.
    outputs = [
        make_output(1, 9, stats=SpeculativeStats(4, 8, (3, 2, 2), (2, 1, 1))),
        make_output(1, 5, stats=SpeculativeStats(2, 4, (2, 2, 2), (1, 1, 0))),
        make_output(1, 5, stats=SpeculativeStats()),
        make_output(1, 5),
    ]
    figures = decoding_section("NGram", outputs)
    assert (
        figures["num_draft_tokens_percentiles"]["average"] == 6.5
    )  # 7 and 6; K x rounds would be 12 and 6
    assert figures["num_accepted_draft_tokens_percentiles"]["average"] == 3
    assert figures["draft_acceptance_rate_percentiles"]["maximum"] == pytest.approx(4 / 7)
    assert figures["acceptance_length_percentiles"]["minimum"] == 2
    assert figures["acceptance_length"] == 2  # 12 tokens in 6 rounds
    assert figures["draft_acceptance_rate"] == pytest.approx(6 / 13)
    assert figures["per_position_acceptance"] == pytest.approx([3 / 5, 2 / 4, 1 / 4])


def test_a_report_has_what_auto_stands_for_and_no_gpu_figures_of_a_cpu() -> None:
    args = LlmArgs(model="zoo:llama", device="cpu")
    assert build_report("m", args, RUN, streaming=False)["engine"]["dtype"] == "auto"
    rank = {"dtype": "float32", "attn_backend": "VANILLA"}
    info = {"internal_states": [{"ranks": [rank]}]}
    report = build_report("m", args, RUN, False, (info, info))
    assert report["engine"].items() >= rank.items()
    assert report["world_info"]["kv_cache_percentage"] is None


def test_a_report_has_only_the_sections_that_apply() -> None:
    plain = build_report("zoo:llama", LlmArgs(model="zoo:llama"), RUN, streaming=False)
    assert list(plain) == [
        "engine",
        "machine",
        "world_info",
        "request_info",
        "performance",
        "dataset",
    ]
    spec = {"decoding_type": "NGram", "max_draft_len": 3}
    args = LlmArgs.from_kwargs("zoo:llama", speculative_config=spec)
    full = build_report("zoo:llama", args, RUN, streaming=True)
    assert full["decoding_stats"]["mode"] == "NGram"
    assert full.keys() - plain.keys() == {"streaming_metrics", "speculation", "decoding_stats"}
    assert full["dataset"]["osl_stats"]["average"] == 12.5


@pytest.mark.parametrize("one_model", [True, False])
def test_a_report_distinguishes_the_two_paths_of_eagle3(one_model: bool) -> None:
    report = build_report(
        "zoo:llama", eagle3_args(eagle3_one_model=one_model), RUN, streaming=False
    )
    assert report["decoding_stats"]["mode"] == "Eagle3"
    assert report["speculation"]["eagle3_one_model"] is one_model


def test_plain_rounds_overlap_unless_overlap_is_disabled() -> None:
    for disabled in (False, True):
        args = LlmArgs(model="zoo:llama", disable_overlap_scheduler=disabled)
        report = build_report("zoo:llama", args, RUN, streaming=False)
        assert report["world_info"]["rounds_overlap"] is not disabled


def test_synthetic_acceptance_rates_are_in_the_report() -> None:
    args = eagle3_args(
        synthetic_acceptance_rates=[0.73, 0.52, 0.35], draft_len_schedule={1: 3, 9: 0}
    )
    report = build_report("zoo:llama", args, RUN, streaming=False)
    text = format_report(json.loads(json.dumps(report)))
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    assert ["synthetic_acceptance_rates", "(0.73, 0.52, 0.35)"] in lines
    assert ["draft_len_schedule", "{1: 3, 9: 0}"] in lines
    assert "max_concurrency" not in text, "options without a value are left out"


def test_the_printed_report_shows_every_section_and_figure() -> None:
    report = build_report("zoo:llama", LlmArgs(model="zoo:llama"), RUN, streaming=True)
    text = format_report(report)
    for section in report.values():
        for key in section:
            assert key in text
    assert "system_output_throughput_tok_s" in text and " 10.00" in text


def test_table_columns_are_as_wide_as_their_widest_cell() -> None:
    assert (
        format_table(["a", "bb"], [["long", "1"], ["x", "234"]])
        == "a      bb\nlong    1\nx     234"
    )


def info_of(
    by_draft_len: dict[str, list[float]], num_changes: int, num_switches: int
) -> dict[str, Any]:
    """An engine's state; by draft length: rounds, request rounds, tokens, timed rounds, seconds."""
    names = ("rounds", "request_rounds", "emitted_tokens", "timed_rounds", "seconds")
    rows = {key: dict(zip(names, values, strict=True)) for key, values in by_draft_len.items()}
    totals = {"by_draft_len": rows, "draft_len_changes": num_changes}
    state = {"totals": totals, "controller": {"decisions": {"num_switches": num_switches}}}
    return {"internal_states": [state]}


BEFORE = info_of({"3": [10, 20, 50, 8, 1.0], "5": [7, 7, 7, 7, 7.0]}, 4, 2)
AFTER = info_of(
    {"0": [10, 40, 40, 10, 1.0], "3": [40, 50, 125, 38, 4.0], "5": [7, 7, 7, 7, 7.0]}, 9, 3
)


def test_draft_lengths_exclude_rounds_before_the_run() -> None:
    section = draft_lens_section(BEFORE, AFTER)
    assert (section["num_switches"], section["num_changes"]) == (1, 5)
    assert section["draft_len_0"] == {
        "rounds": 10,
        "share_of_rounds": 0.25,
        "share_of_time": 0.25,
        "round_ms": 100,
        "acceptance_length": 1,
    }
    three = section["draft_len_3"]
    assert (three["rounds"], three["share_of_rounds"], three["share_of_time"]) == (30, 0.75, 0.75)
    assert (three["round_ms"], three["acceptance_length"]) == (100, 2.5)  # 3 s / 30, 75 / 30
    assert "draft_len_5" not in section, "the run had no such round"


@pytest.mark.parametrize(
    ("options", "varies"),
    [
        ({}, False),
        ({"adaptive": {}}, True),
        ({"draft_len_schedule": {1: 3}}, True),
        ({"max_concurrency": 2}, True),
        ({"acceptance_rate_threshold": 0.5, "acceptance_rate_window_size": 4}, True),
    ],
)
def test_draft_lengths_are_reported_when_they_may_vary(
    options: dict[str, Any], varies: bool
) -> None:
    report = build_report("zoo:llama", eagle3_args(**options), RUN, False, (BEFORE, AFTER))
    assert ("draft_lens" in report) is varies
    if varies:
        lines = [line.split() for line in format_report(report).splitlines()]
        assert [
            "rounds",
            "share_of_rounds",
            "share_of_time",
            "round_ms",
            "acceptance_length",
        ] in lines
        assert ["draft_len_0", "10", "0.25", "0.25", "100.00", "1.00"] in lines


def max_rejected_rounds(decoding_type: str, **options: Any) -> object:
    """The value in the report; None: it has none."""
    spec = {"decoding_type": decoding_type, "max_draft_len": 3, **options}
    args = LlmArgs.from_kwargs("zoo:llama", speculative_config=spec)
    report = build_report("zoo:llama", args, RUN, streaming=False)
    return report["speculation"].get("max_rejected_rounds")


def test_max_rejected_rounds_is_reported_only_where_it_has_an_effect() -> None:
    weights = {"speculative_model": "folder"}
    assert max_rejected_rounds("Draft_Target", **weights) == 8
    assert max_rejected_rounds("Draft_Target", adaptive={}, **weights) == 8
    assert max_rejected_rounds("NGram") is None, "its drafts are made in the target's round"
    assert max_rejected_rounds("Eagle3", **weights) is None, "its drafts are made in the forward"
    assert max_rejected_rounds("Draft_Target", draft_target_one_model=True, **weights) is None
