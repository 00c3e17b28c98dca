"""`benchmarks/adaptive.py`: acceptance and draft length really change in a running engine, and what
is counted."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import adaptive
from benchmarks.adaptive import LADDER, TREE, ZOO, Measurement, misses, over_best_static
from benchmarks.harness import engine as driven_rounds
from benchmarks.harness.forced_rounds import (
    Block,
    ForcedRounds,
    Profile,
    by_rank,
    scripted_candidates,
)
from benchmarks.harness.models import Models
from benchmarks.harness.report import Options, Row
from tllm_spec.config.draft_shape import chain_of
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController

SETUP = Models("zoo", "cpu", Path())


@pytest.fixture(scope="module")
def engine() -> Iterator[ForcedRounds]:
    rounds = ForcedRounds(
        SETUP.target,
        max_batch_size=2,
        max_seq_len=160,
        **SETUP.options,
        speculative_config=SETUP.eagle3(5, adaptive={"candidate_steps": list(LADDER)}),
    )
    yield rounds
    rounds.stop()
    rounds.executor.check_integrity()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("draft_len", [0, 2, 5])
def test_a_forced_draft_length_is_that_of_every_counted_round(
    engine: ForcedRounds, draft_len: int
) -> None:
    engine.start(2, 8)
    engine.set_profile(Profile(0.5))
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
    engine.set_profile(Profile(1 - acceptance))
    engine.play(three, rounds=2)
    engine.set_profile(Profile(acceptance))
    block = engine.play(three, rounds=4)
    assert block.counted == block.tokens == 2 * 4 * tokens_a_round


def test_requests_that_run_out_of_room_are_replaced_and_their_prompts_cost_no_time(
    engine: ForcedRounds,
) -> None:
    engine.start(1, 8)
    engine.set_profile(Profile(1.0))
    first = engine.requests[0]
    # 240 tokens, and there is room for 160.
    block = engine.play(AdaptiveController.fixed(5), rounds=40)
    assert engine.requests[0] is not first
    assert block.rounds_by_draft_len == Counter({5: 40})
    assert block.counted == 240


def test_rounds_of_plain_decoding_are_counted_too() -> None:
    rounds = ForcedRounds(SETUP.target, max_batch_size=2, max_seq_len=64, **SETUP.options)
    rounds.start(2, 8)
    block = rounds.play(AdaptiveController.fixed(0), rounds=5)
    assert (block.rounds, block.tokens) == (5, 10)


def test_blocks_add_up() -> None:
    block = Block(1.0, 10.0, 9, Counter({1: 4}))
    block += Block(1.0, 20.0, 19, Counter({1: 2, 3: 4}))
    assert (block.rate, block.counted, block.round_ms) == (15.0, 28, 200.0)


def test_profiles_say_what_each_depth_and_rank_is_worth() -> None:
    assert Profile(0.8, 0.5).expected(chain_of(2)) == pytest.approx(1 + 0.8 + 0.8 * 0.4)
    first, second = Profile(0.8, 0.5).rates(2, 3)
    assert first == pytest.approx((0.8, 0.2 * 0.35, 0.2 * 0.65 * 0.25))
    assert second[0] == pytest.approx(0.4)


@pytest.mark.slow
@pytest.mark.parametrize("profile", [Profile(0.6), Profile(0.8, 0.8)], ids=lambda each: each.name)
@pytest.mark.parametrize("shape", [5, "5x8/31"])
def test_as_many_drafts_are_accepted_as_the_script_promises(
    profile: Profile, shape: int | str
) -> None:
    script = torch.zeros(5, 8)
    rates = {"synthetic_acceptance_rates": [by_rank(0.5, 8)] * 5}
    sizes = replace(ZOO, batch_sizes=(8,), room=1500)
    with scripted_candidates(script):
        measurement = Measurement(SETUP, sizes, script, **TREE, **rates)
        rounds = measurement.rounds
        [tier] = [tier for tier in measurement.static if measurement.shapes.name(tier) == shape]
        rounds.start(8, 8)
        rounds.set_profile(profile)
        block = rounds.play(AdaptiveController.fixed(tier), rounds=50)
        assert set(block.rounds_by_draft_len) == {tier}
        assert block.counted == pytest.approx(block.tokens, rel=0.06)
        rounds.stop()
        rounds.executor.check_integrity()


@pytest.mark.parametrize(
    ("subject", "num_rows", "shapes"),
    [
        ("lengths", 1, ["0", "2", "5"]),
        pytest.param("traffic", 10, [], marks=pytest.mark.slow),
        pytest.param(
            *("trees", 1, ["0", "2", "5", "3x2/7", "4x4/15", "5x8/31"]), marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_has_a_row_for_each_cell_and_phase(
    subject: str, num_rows: int, shapes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = (Profile(0.6),)
    sizes = replace(ZOO, batch_sizes=(1,), acceptances=(0.6,), profiles=one, phase_seconds=0.01)
    monkeypatch.setattr(adaptive, "ZOO", sizes)
    monkeypatch.setattr(adaptive, "LADDER", (0, 2, 5))
    monkeypatch.setattr(driven_rounds, "WARM_UP_ROUNDS", 1)
    [found] = [each for each in adaptive.SUBJECTS if each.name == subject]
    rows = list(found.run(Options(True, "cpu", "zoo")))
    assert len(rows) == num_rows and len(found.table(rows)) > 2
    if shapes:
        assert list(rows[0]["static"]) == list(rows[0]["static_ms"]) == shapes
        assert sum(rows[0]["played"].values()) == sizes.adaptive_rounds
        assert rows[0]["expected_ms"].keys() == set(shapes)


def of_phase(static: dict[int, float], rate: float) -> Row:
    policies = {"cost_model": rate, "conservative": 1.0, "aggressive": 1.0, "newest": 1.0}
    rates = {str(length): static.get(length, 0.0) for length in LADDER}
    return {"traffic": "phases", **rates, **policies}


def test_the_best_single_draft_length_is_best_over_all_phases_together() -> None:
    phases = [of_phase({1: 100.0, 5: 300.0}, 300.0), of_phase({1: 100.0, 2: 99.0, 0: 250.0}, 250.0)]
    best, shares = over_best_static(phases)
    assert best == 5
    assert shares["cost_model"] == pytest.approx(550 / 300)


def test_a_missed_bar_is_named() -> None:
    met = {"over_best": 0.99, "best_over_chain": 1.1, "over_chain": 1.09}
    assert not misses(met) and misses(met | {"over_best": 0.97})
    assert misses(met | {"over_chain": 1.0})
