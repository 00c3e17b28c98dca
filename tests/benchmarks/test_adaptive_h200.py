"""`benchmarks/adaptive_h200.py`: acceptance and draft length really change in a running engine, and
what is counted."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import adaptive_h200
from benchmarks.adaptive_h200 import ZOO
from benchmarks.harness import adaptive_tables, forced_rounds
from benchmarks.harness import engine as driven_rounds
from benchmarks.harness.adaptive_tables import (
    LADDER,
    Cell,
    Found,
    Phase,
    RoundTimes,
    misses,
    over_best_static,
)
from benchmarks.harness.forced_rounds import Block, ForcedRounds
from benchmarks.harness.models import Models
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController

SETUP = Models("zoo", "cpu", Path())


@pytest.fixture(scope="module")
def engine() -> Iterator[ForcedRounds]:
    adaptive = {"candidate_steps": list(LADDER)}
    rounds = ForcedRounds(
        SETUP.target,
        max_batch_size=2,
        max_seq_len=160,
        **SETUP.options,
        speculative_config=SETUP.eagle3(5, adaptive=adaptive),
    )
    yield rounds
    rounds.stop()
    rounds.executor.check_integrity()


@pytest.mark.parametrize("draft_len", [0, 2, 5])
def test_a_forced_draft_length_is_that_of_every_counted_round(
    engine: ForcedRounds, draft_len: int
) -> None:
    engine.start(2, 8)
    engine.set_acceptance(0.5)
    engine.play(AdaptiveController.fixed(3), rounds=2)
    block = engine.play(AdaptiveController.fixed(draft_len), rounds=4)
    assert block.rounds_by_draft_len == Counter({draft_len: 4})
    assert block.tokens == pytest.approx(2 * 4 * (2 - 0.5**draft_len))


@pytest.mark.parametrize(("acceptance", "tokens_a_round"), [(0.0, 1), (1.0, 4)])
def test_acceptance_changes_in_a_running_engine(
    engine: ForcedRounds, acceptance: float, tokens_a_round: int
) -> None:
    engine.start(2, 8)
    three = AdaptiveController.fixed(3)
    engine.set_acceptance(1 - acceptance)
    engine.play(three, rounds=2)
    engine.set_acceptance(acceptance)
    block = engine.play(three, rounds=4)
    assert block.counted == block.tokens == 2 * 4 * tokens_a_round


def test_requests_that_run_out_of_room_are_replaced_and_their_prompts_cost_no_time(
    engine: ForcedRounds,
) -> None:
    engine.start(1, 8)
    engine.set_acceptance(1.0)
    first = engine.requests[0]
    block = engine.play(
        AdaptiveController.fixed(5), rounds=40
    )  # 240 tokens, and there is room for 160
    assert engine.requests[0] is not first
    assert block.rounds_by_draft_len == Counter({5: 40})
    assert block.counted == 240


def test_rounds_of_plain_decoding_are_counted_too() -> None:
    rounds = ForcedRounds(SETUP.target, max_batch_size=2, max_seq_len=64, **SETUP.options)
    rounds.start(2, 8)
    block = rounds.play(AdaptiveController.fixed(0), rounds=5)
    assert (block.rounds, block.tokens) == (5, 10)


@pytest.mark.slow
def test_a_run_measures_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = (0, 2, 5)
    monkeypatch.setattr(
        adaptive_h200,
        "ZOO",
        replace(ZOO, batch_sizes=(2,), acceptances=(0.5,), settling_rounds=2, adaptive_rounds=4),
    )
    for module in (adaptive_h200, adaptive_tables):
        monkeypatch.setattr(module, "LADDER", ladder)
    monkeypatch.setattr(driven_rounds, "WARM_UP_ROUNDS", 1)
    monkeypatch.setattr(forced_rounds, "CHECKED_ROUNDS", 2)
    output = tmp_path / "result.json"
    options = [
        "--shape",
        "zoo",
        "--device",
        "cpu",
        "--phase-seconds",
        "0.01",
        "--output",
        str(output),
    ]
    adaptive_h200.main(options)
    found = json.loads(output.read_text())
    assert [row["batch_size"] for row in found["times"]] == [2]
    assert list(found["times"][0]["by_draft_len"]) == list(map(str, ladder))
    assert sum(found["cells"][0]["rounds_by_draft_len"].values()) == 4
    assert found["cells"][0]["expected_ms"].keys() == found["cells"][0]["static"].keys()
    assert Counter(phase["traffic"] for phase in found["phases"]) == {"phases": 4, "bursts": 6}
    assert found["left_out"] == []


def test_parts_for_which_there_is_no_time_are_named(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    options = ["--shape", "zoo", "--device", "cpu", "--time-limit", "0", "--output", str(output)]
    assert adaptive_h200.main(options) == 1
    assert "not measured: batch size 4" in json.loads(output.read_text())["missed"]


def test_batch_sizes_that_are_asked_for_are_all_that_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    options = ["--shape", "zoo", "--device", "cpu", "--time-limit", "0", "--batch-sizes", "1,3"]
    assert adaptive_h200.main([*options, "--output", str(output)]) == 1
    assert json.loads(output.read_text())["missed"] == [
        "not measured: batch size 1",
        "not measured: batch size 3",
    ]


def of_phase(static: dict[int, float], rate: float) -> Phase:
    policies = {"cost_model": rate, "conservative": 1.0, "aggressive": 1.0, "newest": 1.0}
    return Phase("phases", 1, 0.5, {**dict.fromkeys(LADDER, 0.0), **static}, policies, {})


def test_the_best_single_draft_length_is_best_over_all_phases_together() -> None:
    phases = [of_phase({1: 100.0, 5: 300.0}, 300.0), of_phase({1: 100.0, 2: 99.0, 0: 250.0}, 250.0)]
    best, shares = over_best_static(phases)
    assert best == 5
    assert shares["cost_model"] == pytest.approx(550 / 300)


def test_every_missed_bar_is_named() -> None:
    rates = {0: 100.0, 1: 120.0}
    met = Found(
        [RoundTimes(1, 4.0, 4.08, {}, {})],
        [Cell(1, 0.5, rates, 117.6, 118.0, 90.0, {1: 9}, {}, ())],
        [of_phase({1: 100.0}, 105.0)],
    )
    assert misses(met) == []
    missed = Found(
        [RoundTimes(1, 4.0, 4.09, {}, {})],
        [Cell(1, 0.5, rates, 117.5, 121.0, 120.0, {1: 9}, {}, ())],
        [of_phase({1: 100.0}, 104.9)],
    )
    assert len(misses(missed)) == 3


def test_blocks_add_up() -> None:
    block = Block(1.0, 10.0, 9, Counter({1: 4}))
    block += Block(1.0, 20.0, 19, Counter({1: 2, 3: 4}))
    assert (block.rate, block.counted, block.round_ms) == (15.0, 28, 200.0)
