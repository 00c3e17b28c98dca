"""The benchmarks' harness: what it times, that the scripts run, and that the page shows their
results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import auto, cpu, experts, fp8, ngram, rounds, several_devices, verify_budget
from benchmarks.harness import engine, report
from benchmarks.harness.device_time import idle_us
from benchmarks.harness.engine import Rounds, in_turns, stopwatch
from benchmarks.harness.models import Models
from benchmarks.harness.scripted_tokens import MIXED, TokenScript, quantiles, scripted_tokens
from benchmarks.harness.simulated_rows import Simulation, round_ms
from benchmarks.harness.tables import DOCUMENTS, filled
from benchmarks.verify_budget import STEPS, Measurement
from tllm_spec.config.draft_shape import DraftShape, DraftShapes, chain_of
from tllm_spec.executor.device.transfer import ToHost
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes


def test_host_time_leaves_out_the_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def take(seconds: float) -> None:
        now[0] += seconds

    def step() -> None:
        take(0.002)
        ToHost([]).wait()

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(engine, "time", clock)
    monkeypatch.setattr(ToHost, "wait", lambda self: take(0.2))
    driven = Rounds.__new__(Rounds)
    driven.executor = SimpleNamespace(step=step)  # type: ignore[assignment] # only step is used
    found = driven.host_time(3)
    assert found.median == pytest.approx(2.0) and found.launch == 0.0


def test_a_stopwatch_leaves_the_method_as_it_was() -> None:
    before = ToHost.wait
    with stopwatch(ToHost, "wait") as seconds:
        assert ToHost([]).wait() == []
    assert len(seconds) == 1 and ToHost.wait is before


def test_rounds_of_fewer_requests_are_not_timed(tmp_path: Path) -> None:
    models = Models("zoo", "cpu", tmp_path)
    driven = Rounds(models.target, max_batch_size=2, max_seq_len=48, **models.options)
    driven.start(2, 16)
    assert driven.timed(4).tokens_per_round == 1.0
    with pytest.raises(RuntimeError, match="max_seq_len is too small"):
        driven.run(20)
    driven.stop()
    driven.executor.check_integrity()


def test_sides_take_turns_and_the_first_turn_does_not_count() -> None:
    log: list[str] = []

    def side(name: str) -> float:
        log.append(name)
        return float(len(log))

    assert in_turns({n: lambda n=n: side(n) for n in "ab"}, 2) == {"a": [3, 5], "b": [4, 6]}
    assert log == ["a", "b"] * 3


def work(start: float, duration: float, graph: int, kind: str = "kernel") -> dict[str, object]:
    return {"cat": kind, "ts": start, "dur": duration, "args": {"correlation": graph}}


def launches(number: int) -> list[dict[str, object]]:
    return [{"name": "cudaGraphLaunch", "args": {"correlation": 1 + i}} for i in range(number)]


def test_idle_time_between_graphs_does_not_include_copies() -> None:
    copy = work(105, 10, 7, "gpu_memcpy")
    events = [*launches(2), work(0, 50, 1), work(40, 60, 1), copy, work(130, 50, 2)]
    assert idle_us(events, 2) == 20


def test_idle_time_of_a_round_of_two_graphs_is_before_and_between_them() -> None:
    """Three rounds: the gap before each, then 1 between its target and its draft."""
    starts = (0, 11, 25, 36, 56, 67)
    events = launches(6) + [work(start, 10, 1 + i) for i, start in enumerate(starts)]
    assert idle_us(events, 3) == (5 + 11) / 2
    with pytest.raises(RuntimeError, match="6 graph launches in 4 rounds"):
        idle_us(events, 4)


@pytest.mark.parametrize(
    ("script", "subject", "num_rows"),
    [
        pytest.param(rounds, "zero_drafts", 5, marks=pytest.mark.slow),
        pytest.param(rounds, "sampling_params", 8, marks=pytest.mark.slow),
        (ngram, "search", 6),
        (experts, "qwen3", 4),
        (experts, "gpt_oss", 4),
        (experts, "qwen3_next", 4),
        pytest.param(experts, "gemma3", 4, marks=pytest.mark.slow),
        pytest.param(experts, "qwen3_5_mtp3", 2, marks=pytest.mark.slow),
        pytest.param(experts, "gemma4_26b", 4, marks=pytest.mark.slow),
        (experts, "gemma4_26b_mtp3", 2),
        (fp8, "llama-8b", 8),
        pytest.param(fp8, "activations", 8, marks=pytest.mark.slow),
        pytest.param(fp8, "cache", 8, marks=pytest.mark.slow),
        pytest.param(fp8, "qwen3-30b", 4, marks=pytest.mark.slow),
        pytest.param(fp8, "v3", 4, marks=pytest.mark.slow),
        (experts, "v3", 7),
        (experts, "mtp1", 4),
        pytest.param(cpu, "sampling", 3, marks=pytest.mark.slow),
        pytest.param(cpu, "trees", 4, marks=pytest.mark.slow),
        pytest.param(cpu, "matches", 18, marks=pytest.mark.slow),
        pytest.param(cpu, "windows", 4, marks=pytest.mark.slow),
        (rounds, "trees", 2),
        pytest.param(cpu, "transformers", 7, marks=pytest.mark.slow),
        pytest.param(auto, "zoo", 9, marks=pytest.mark.slow),
        pytest.param(auto, "heads", 2, marks=pytest.mark.slow),
    ],
)
def test_a_script_runs_on_a_cpu_and_adds_its_result_to_the_file(
    script: SimpleNamespace,
    subject: str,
    num_rows: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "WARM_UP_ROUNDS", 1)
    file = tmp_path / "result.json"
    file.write_text('{"another subject": {}}')
    options = ["--quick", "--device", "cpu", "--output", str(file)]
    assert report.main(script.SUBJECTS, None, [subject, *options]) == 0
    result = json.loads(file.read_text())
    assert result.keys() == {"another subject", subject}
    assert len(result[subject]["rows"]) == num_rows
    assert result[subject]["about"]["torch"]


def test_a_subject_that_needs_a_gpu_is_refused_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        report.main(rounds.SUBJECTS, None, ["deterministic", "--device", "cpu"])
    assert "deterministic needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "num_tables"), list(zip(DOCUMENTS, (25, 1, 2, 14, 1, 1, 2, 2, 1), strict=True))
)
def test_a_document_shows_the_tables_of_the_results(document: Path, num_tables: int) -> None:
    text = document.read_text(encoding="utf-8")
    assert text.count(": `python -m benchmarks.") == num_tables
    assert filled(text) == text, "run python -m benchmarks.harness.tables --write"


def test_a_heading_without_a_result_is_refused() -> None:
    with pytest.raises(ValueError, match="no result for 'Other: `python -m benchmarks"):
        filled("### Other: `python -m benchmarks.cpu transformers`\n")


def test_a_tree_wins_where_its_tokens_outweigh_its_longer_round() -> None:
    always, never = rounds.winning(32, 1.0), rounds.winning(32, 3.0)
    assert len(always) == 99 and not never
    wins = rounds.winning(32, 1.3)
    assert wins == [p for p in always if min(wins) <= p <= max(wins)] and max(wins) < 0.95


# `benchmarks.soak` runs and passes, for a moment.


@pytest.mark.slow
def test_the_soak_passes_with_few_clients() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.05", "--clients", "12"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all parts have passed" in done.stdout


# `benchmarks.several_devices` measures tiny models on one and two ranks of this machine's CPU.


@pytest.mark.slow
def test_every_job_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mpi4py")
    file = tmp_path / "results.json"
    arguments = ["llama-8b", "v3", "--device", "cpu", "--output", str(file)]
    assert report.main(several_devices.SUBJECTS, None, arguments, ranks="1,2", layers=80) == 0
    results = json.loads(file.read_text())
    rounds = [row for row in results["llama-8b"]["rows"] if "batch" in row]
    assert {(row["ranks"], row["batch"]) for row in rounds} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert {row["job"] for row in results["v3"]["rows"]} == {"V3-style, tp", "V3-style, ep"}
    assert "| llama-8b, plain | 2 | 1 |" in capsys.readouterr().out


# `benchmarks/verify_budget.py`: how much of the possible the choice of drafts reaches, and that a
# running engine counts what it verifies.


SHAPES = DraftShapes.with_budgets(7, STEPS)


@pytest.mark.parametrize(("means", "least"), [(MIXED, 1.4), ((0.6,), 1.02)])
def test_the_drafts_reach_most_of_what_true_probabilities_would(
    means: tuple[float, ...], least: float
) -> None:
    """And more than chains with as many rows."""
    simulation, shape = Simulation(32, means), DraftShape(7, 7, mean_rows=4)
    found, chains = simulation.play(shape, 30), simulation.play(chain_of(3), 30)
    assert found.reached > 0.97 * found.oracle
    assert (found.reached - 32) / (chains.reached - 32) > least


@pytest.mark.parametrize(("means", "best", "least"), [(MIXED, 3, 1.12), ((0.9,), 5, 0.97)])
def test_the_choice_beats_the_best_length_or_is_as_good(
    means: tuple[float, ...], best: int, least: float
) -> None:
    tiers = (*STEPS, *SHAPES.budgeted_tiers)
    ms = {tier: round_ms(SHAPES.of(tier), 64) for tier in tiers}
    own = AdaptiveController.from_config(
        {"candidate_steps": STEPS}, round_times=MeasuredRoundTimes({64: ms}), shapes=SHAPES
    )
    simulation = Simulation(64, means)
    rate = simulation.play(chain_of(best), 30).reached / ms[best]
    assert simulation.chosen_rate(own, SHAPES, 60) > least * rate


def test_round_times_are_those_measured_at_chains() -> None:
    measured = [round_ms(chain_of(length), 64) for length in (0, 1, 2, 3, 5)]
    assert measured == pytest.approx([6.18, 7.13, 8.59, 10.11, 13.67], abs=0.01)
    assert measured[1] < round_ms(SHAPES.of(SHAPES.budgeted_tiers[0]), 64) < measured[3]


def test_quantiles_have_the_mean() -> None:
    assert float(quantiles(0.6).mean()) == pytest.approx(0.6, abs=0.01)


@pytest.mark.slow
def test_an_engine_counts_what_its_drafts_are_expected_to_bring() -> None:
    script = TokenScript.new(21, STEPS[-1], "cpu")
    script.table.fill_(0.5)
    with scripted_tokens(script):
        measurement = Measurement(Models("zoo", "cpu", Path()), (20,), script)
        measurement.rounds.start(20, 16)
        for length, each in ((0, 1.0), (1, 1.5), (3, 1.875)):
            block = measurement.play(AdaptiveController.fixed(length), 4)
            assert block.tokens / block.rounds / 20 == pytest.approx(each, abs=1e-3)
        tier = measurement.shapes.budgeted_tiers[0]
        block = measurement.play(AdaptiveController.fixed(tier), 4)
        assert 1.5 < block.tokens / block.rounds / 20 < 1.75  # the drafter's noise chooses
        measurement.rounds.stop()
    assert torch.isfinite(script.total).all() and verify_budget.SUBJECTS
