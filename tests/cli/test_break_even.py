"""The throughput equation of chain drafts, and what it makes of measured times."""

import json
import struct
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.bench_command import ngram, ran, run
from tllm_spec.bench.break_even import (
    chains_of,
    expected_tokens,
    least_acceptance,
    speedup_row,
    with_rates,
    with_trees,
)
from tllm_spec.bench.plot import (
    STYLES,
    LoadPoint,
    check_format,
    comparison_curves,
    draw,
    image,
    serve_curve,
)
from tllm_spec.cli.bench import main
from tllm_spec.config.draft_shape import DraftShape, chain_of
from tllm_spec.config.speculative_config import speculative_config_from
from tllm_spec.outputs import SpeculativeStats

PAIRS = (0.3, 2), (0.5, 3), (0.7, 4), (0.85, 5)


def test_the_tokens_of_a_round_follow_the_closed_form() -> None:
    for acceptance, draft_len in PAIRS:
        tokens = (1 - acceptance ** (draft_len + 1)) / (1 - acceptance)
        assert expected_tokens(acceptance, draft_len) == pytest.approx(tokens)
    assert expected_tokens(0.6, 4) == pytest.approx(2.3056)


def test_drafts_that_are_always_accepted_never_accepted_or_absent() -> None:
    assert (expected_tokens(1, 5), expected_tokens(0, 5), expected_tokens(0.7, 0)) == (6, 1, 1)


def test_the_speedup_is_the_tokens_of_a_round_over_its_time_in_plain_rounds() -> None:
    row = speedup_row(0.5, 3, 1.5, 0.75, SpeculativeStats(10, 19, (10, 9), (5, 4)))
    assert row["predicted"] == pytest.approx(1.875 / 1.5)
    assert row["difference"] == pytest.approx(0.75 / 1.25 - 1)
    assert (row["drafted_share"], row["measured_tokens_per_round"]) == (1, pytest.approx(1.9))


def test_rounds_without_drafts_count_as_plain_ones() -> None:
    """A drafter that finds its drafts in the text has them in 4 of 10 rounds."""
    row = speedup_row(0.5, 3, 1.5, 0.75, SpeculativeStats(10, 14, (4, 4), (3, 1)))
    assert (row["drafted_share"], row["measured_tokens_per_round"]) == (0.4, 2)
    assert row["predicted"] == pytest.approx((6 + 4 * 1.875) / (6 + 4 * 1.5))
    never = speedup_row(0.5, 3, 1.5, 0.75, SpeculativeStats(10, 10, (), ()))
    assert (never["predicted"], never["measured_tokens_per_round"]) == (1, None)


@pytest.mark.parametrize("draft_len", [1, 3, 7])
def test_at_the_least_acceptance_the_speedup_is_one(draft_len: int) -> None:
    cost = 1 + draft_len * 0.1
    least = least_acceptance(draft_len, cost)
    assert least is not None and expected_tokens(least, draft_len) == pytest.approx(cost)
    assert 0 < least < 1


def test_there_is_no_least_acceptance_when_drafting_never_pays() -> None:
    assert least_acceptance(1, cost=3.0) is None


# `tllm-bench break-even` on the zoo, and the engines that it makes.


def test_engines_use_the_files_drafter_with_a_fixed_length_and_synthetic_acceptance() -> None:
    spec = {
        "decoding_type": "Eagle3",
        "max_draft_len": 7,
        "speculative_model": "head",
        "adaptive": {},
        "max_concurrency": 5,
    }
    drafted = speculative_config_from(with_rates(chains_of({"speculative_config": spec}), 0.5, 3))
    assert drafted.decoding_type == "Eagle3"
    assert (drafted.max_draft_len, drafted.synthetic_acceptance_rates) == (3, (0.5, 0.25, 0.125))
    limits = drafted.adaptive, drafted.max_concurrency, drafted.max_rejected_rounds
    assert limits == (None, None, None)


def test_a_files_own_shape_gives_way_by_any_of_its_names() -> None:
    spec = {
        "decoding_type": "Eagle3",
        "speculative_model": "head",
        "speculative_num_steps": 4,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 5,
    }
    trees = [DraftShape(5, 31, 8), DraftShape(3, 6, 2)]
    chains = chains_of({"speculative_config": spec})
    chain = speculative_config_from(with_rates(chains, 0.5, 3))
    assert chain.shapes.longest == chain_of(3)
    shapes = speculative_config_from(with_trees(spec, trees)).shapes
    assert shapes.longest == DraftShape(5, 31, 8)
    assert [shapes.of(tier) for tier in shapes.further_tiers] == trees[::-1]


@pytest.mark.parametrize(
    ("example", "arguments", "sentence"),
    [
        ("eagle3_dynamic_tree", [], "has draft trees, and the equation is for chains; --trees"),
        ("eagle3_static_tree", [], "has draft trees, and the equation is for chains; --trees"),
        ("ngram_tree", ["--trees", "2x2/4"], "--trees is for drafters with draft weights"),
    ],
)
def test_a_drafter_that_cannot_be_measured_so_is_refused(
    example: str, arguments: list[str], sentence: str
) -> None:
    options = ["break-even", "--config", f"yaml_examples/{example}.yaml", *arguments]
    result = CliRunner().invoke(main, ["-m", "zoo:llama", *options])
    assert result.exit_code == 1 and sentence in result.output
    assert "synthetic" not in result.output and "candidate" not in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "speculative_config is missing"),
        (["--pairs", "0.5"], "is not a list of acceptance rates and draft lengths"),
        (["--pairs", "1.5:2"], "is not a list of acceptance rates and draft lengths"),
        (["--pairs", "0.5:0"], "is not a list of acceptance rates and draft lengths"),
        (["--trees", "5x8"], "is not a list of trees such as 5x8/31"),
        (["--trees", "2x2/4"], "--trees needs the options of a drafter"),
    ],
)
def test_a_mistake_is_reported_in_one_sentence(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(main, ["-m", "zoo:llama", "break-even", *arguments])
    assert result.exit_code and sentence in result.output and "Traceback" not in result.output


def test_an_output_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text(
        "speculative_config: {decoding_type: NGram, max_draft_len: 2}\ndevice: cpu\nmax_seq_len: 40"
    )
    arguments = ["-m", "zoo:llama", "break-even", "--config", str(config), "--pairs", "0.5:2"]
    result = CliRunner().invoke(main, [*arguments, "--input_len", "16", "--output_len", "25"])
    assert result.exit_code == 1
    assert "16 prompt tokens and 25 output tokens exceed max_seq_len = 40" in result.output


def test_predictions_are_compared_with_measurements_on_the_zoo(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, report = tmp_path / "x.yaml", tmp_path / "report.json"
    spec = "{decoding_type: Draft_Target, max_draft_len: 2, speculative_model: zoo:llama-draft}"
    config.write_text(
        f"speculative_config: {spec}\ndevice: cpu\nkv_cache_config: {{max_tokens: 4096}}"
    )
    small = [
        "--pairs",
        "0:1,1:3",
        "--output_len",
        "25",
        "--repeat",
        "1",
        "--report_json",
        str(report),
    ]
    result = CliRunner().invoke(
        main, ["-m", "zoo:llama", "break-even", "--config", str(config), *small]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text())
    assert "synthetic_acceptance_rates" not in caplog.text, "the command has set them"
    never, always = found["speedups"]
    assert never["rounds"] > always["rounds"] > 0
    assert (never["tokens_per_round"], always["tokens_per_round"]) == (1, 4)
    assert never["measured_tokens_per_round"] == 1 and always["measured_tokens_per_round"] == 4
    times = found["round_seconds"]
    assert times["draft_len"] == 3 and min(times["plain"], times["free"], times["drafted"]) > 0
    assert always["predicted"] == pytest.approx(4 * times["plain"] / times["drafted"])
    for row in found["speedups"]:
        assert row["difference"] == pytest.approx(row["measured"] / row["predicted"] - 1)
    assert never["drafted_share"] == always["drafted_share"] == 1
    assert "break-even at a" in result.output and f"{always['measured']:.2f}x" in result.output


@pytest.mark.slow
def test_a_drafter_that_often_has_no_draft_is_predicted_with_the_rounds_that_had_one(
    tmp_path: Path,
) -> None:
    config, report = tmp_path / "x.yaml", tmp_path / "report.json"
    spec = "{decoding_type: NGram, max_draft_len: 2, max_matching_ngram_size: 2}"
    config.write_text(
        f"speculative_config: {spec}\ndevice: cpu\nkv_cache_config: {{max_tokens: 4096}}"
    )
    arguments = ["-m", "zoo:llama", "break-even", "--config", str(config), "--repeat", "1"]
    options = ["--pairs", "1:2", "--output_len", "30", "--report_json", str(report)]
    result = CliRunner().invoke(main, [*arguments, *options])
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text())
    (row,) = found["speedups"]
    times, share = found["round_seconds"], row["drafted_share"]
    assert 0 < share < 1 and f"{share:.0%}" in result.output
    cost = times["drafted"] / times["plain"]
    assert row["predicted"] == pytest.approx((1 + share * 2) / (1 + share * (cost - 1)))


def test_trees_are_compared_by_the_tokens_they_have_and_need(tmp_path: Path) -> None:
    config, report, data = (tmp_path / name for name in ("x.yaml", "report.json", "data.jsonl"))
    spec = "{decoding_type: Eagle3, max_draft_len: 2, speculative_model: zoo:llama-eagle3}"
    config.write_text(
        f"speculative_config: {spec}\ndevice: cpu\nkv_cache_config: {{max_tokens: 4096}}"
    )
    entry = {"task_id": 0, "prompt": "import os\nimport sys\nfrom pathlib", "output_tokens": 60}
    data.write_text(json.dumps(entry))
    arguments = ["-m", "zoo:llama", "break-even", "--config", str(config), "--dataset", str(data)]
    options = ["--trees", "2x2/4,3x4/12", "--report_json", str(report)]
    result = CliRunner().invoke(main, [*arguments, *options])
    assert result.exit_code == 0, result.output
    plain, chain, *trees = json.loads(report.read_text())["shapes"]
    assert (plain["tokens"], plain["needed"], plain["speedup"]) == (1, 1, 1)
    assert [tree["shape"] for tree in trees] == ["2x2/4", "3x4/12"]
    assert chain["shape"] == "3" and 1 < chain["tokens"] < 4
    assert trees[1]["tokens"] > trees[0]["tokens"] > 1
    for row in (chain, *trees):
        assert row["needed"] == pytest.approx(row["round_ms"] / plain["round_ms"])
        assert f"{row['speedup']:.2f}x" in result.output


# The picture of throughput against latency: axes, curves, points and the file's format.


TITLE = "zoo:llama, 2026-01-02"
PLAIN = [
    LoadPoint("1", 100, {"tpot_ms": 10, "ttft_ms": 50, "e2el_ms": 500}),
    LoadPoint("8", 600, {"tpot_ms": 13, "ttft_ms": 90, "e2el_ms": 700}),
]
EAGLE = [
    LoadPoint("1", 200, {"tpot_ms": 5, "ttft_ms": 60, "e2el_ms": 300}),
    LoadPoint("8", 700, {"tpot_ms": 0, "ttft_ms": 95, "e2el_ms": 600}),
]


def test_a_panel_for_each_latency_has_a_curve_for_each_configuration() -> None:
    figure = draw({"plain": PLAIN, "eagle": EAGLE}, TITLE)
    left, right = figure.axes
    assert figure.get_suptitle() == TITLE
    assert left.get_ylabel() == "throughput (output tokens/s)"
    assert left.get_xlabel() == "time per output token, p50 (ms)"
    assert right.get_xlabel() == "time to first token, p50 (ms)"
    points = [[line.get_xydata().tolist() for line in panel.get_lines()] for panel in (left, right)]
    assert points[0] == [[[10, 100], [13, 600]], [[5, 200]]], "0 ms: no request has that time"
    assert points[1] == [[[50, 100], [90, 600]], [[60, 200], [95, 700]]]
    assert [text.get_text() for text in left.texts] == ["1", "8", "1"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["plain", "eagle"]


def test_labels_lie_within_their_panel_and_lines_behind_them() -> None:
    figure = draw({"plain": PLAIN, "eagle": EAGLE}, TITLE)
    image(figure, ".png")  # places everything
    for panel in figure.axes:
        box = panel.get_window_extent()
        for label in panel.texts:
            x, y = zip(*label.get_window_extent().get_points(), strict=True)
            assert box.x0 < min(x) and max(x) < box.x1 and box.y0 < min(y) and max(y) < box.y1
            assert label.get_bbox_patch() is not None


def test_axes_begin_at_0_and_hold_every_point() -> None:
    for panel in draw({"plain": PLAIN, "eagle": EAGLE}, TITLE).axes:
        (left, right), (bottom, top) = panel.get_xlim(), panel.get_ylim()
        assert left == bottom == 0 and top > 700
        assert right > max(x for line in panel.get_lines() for x in line.get_xdata())


def test_without_streamed_requests_the_whole_latency_is_drawn() -> None:
    (panel,) = draw({"plain": [LoadPoint("1", 100, {"e2el_ms": 500})]}, TITLE).axes
    assert panel.get_xlabel() == "request latency, p50 (ms)"
    (line,) = panel.get_lines()
    assert line.get_xydata().tolist() == [[500, 100]]


def test_curves_differ_without_colours() -> None:
    number = len(STYLES["marker"])
    panel = draw({str(name): PLAIN for name in range(number)}, TITLE).axes[0]
    assert len({line.get_marker() for line in panel.get_lines()}) == number


def test_a_load_without_an_answer_has_no_point() -> None:
    (panel,) = draw(
        {"down": [LoadPoint("1", 0, {"tpot_ms": 0, "ttft_ms": 0, "e2el_ms": 0})]}, TITLE
    ).axes
    (line,) = panel.get_lines()
    assert len(line.get_xydata()) == 0


def test_a_servers_loads_become_points_with_short_names() -> None:
    figures = {"output_throughput_tok_s": 7.0, "itl_ms": {"p50": 4.0}}
    figures |= {"ttft_ms": {"p50": 1.0}, "tpot_ms": {"p50": 2.0}, "e2el_ms": {"p50": 3.0}}
    curve = serve_curve([{"load": name, **figures} for name in ("concurrency 8", "2.5 requests/s")])
    latencies = {"tpot_ms": 2.0, "ttft_ms": 1.0, "e2el_ms": 3.0}
    assert curve == [LoadPoint("8", 7.0, latencies), LoadPoint("2.5/s", 7.0, latencies)]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("suffix", "head"), [(".png", b"\x89PNG"), (".PDF", b"%PDF"), (".svg", b"<?xml")]
)
def test_the_suffix_decides_the_format(suffix: str, head: bytes) -> None:
    check_format(Path(f"x{suffix}"))
    content = image(draw({"plain": PLAIN}, TITLE), suffix)
    assert content.startswith(head)
    if suffix == ".png":
        width, height = struct.unpack(">II", content[16:24])  # of the IHDR chunk
        assert 1000 <= width <= 2000 and 400 <= height <= 1000


@pytest.mark.usefixtures("fake_llm")
def test_compare_draws_its_sweep(dataset: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    options = ("--dataset", dataset, "--concurrency", "1,2,-1", "--streaming", "--plot", plot)
    result = ran("compare", ngram(tmp_path, "first"), ngram(tmp_path, "second"), *options)
    assert "in every run at each concurrency" in result.output and "TPOT p50" in result.output
    drawn = plot.read_text()
    for text in ("first", "second", "no limit", "time per output token, p50 (ms)"):
        assert f"<!-- {text} -->" in drawn


@pytest.mark.usefixtures("fake_llm")
def test_files_of_one_name_stay_two_configurations(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    configs = [ngram(tmp_path), ngram(tmp_path / "other"), ngram(tmp_path, "third")]
    report = tmp_path / "report.json"
    ran("compare", *configs, "--dataset", dataset, "--report_json", report)
    rows = json.loads(report.read_text())["configurations"]
    assert list(comparison_curves(rows)) == ["ngram", "ngram#2", "third"]


@pytest.mark.parametrize("name", ["plot.txt", "plot", "plot.png.gz"])
def test_an_unknown_suffix_is_refused_before_anything_runs(
    dataset: Path, tmp_path: Path, name: str
) -> None:
    result = run("compare", ngram(tmp_path), "--dataset", dataset, "--plot", tmp_path / name)
    assert result.exit_code == 2
    assert f"{name!r} does not end in a format of matplotlib; accepted: " in result.output
    assert ".png" in result.output


def test_a_missing_matplotlib_is_a_sentence(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    plot = tmp_path / "plot.png"
    result = run("compare", ngram(tmp_path), "--dataset", dataset, "--plot", plot)
    assert result.exit_code == 2
    sentence = "the package matplotlib is missing: pip install 'tllm_spec[plot]'"
    assert f"Invalid value for '--plot': {sentence}" in result.output
