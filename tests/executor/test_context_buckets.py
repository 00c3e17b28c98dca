"""Draft lengths that depend on the context: rounds of short and of long texts learn apart."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.executor.harness import Harness, output_of
from tests.executor.simulated_rounds import (
    GRAPH_BATCH_SIZES,
    MAX_STEPS,
    TIMES,
    TRUE_TIMES,
    Simulator,
    static_rates,
)
from tests.lossless.engines import tiny_engine
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound

BATCH_SIZE, SHORT, LONG, BOUND = 64, 500, 20_000, 4096
ACCEPTANCE = {SHORT: 0.8, LONG: 0.05}  # of a head that was trained on short texts
TURN = 0.5  # seconds that texts of one kind run, in which an estimate cannot follow for long


def context_at(now: float) -> int:
    return LONG if int(now / TURN) % 2 else SHORT


def traffic(now: float) -> np.ndarray:
    return np.full(BATCH_SIZE, ACCEPTANCE[context_at(now)])


def controller(*buckets: int, **more: Any) -> AdaptiveController:
    config = {"candidate_steps": list(range(MAX_STEPS + 1)), "context_buckets": buckets, **more}
    return AdaptiveController.from_config(
        config, graph_batch_sizes=GRAPH_BATCH_SIZES, round_times=TIMES
    )


def test_short_and_long_contexts_by_turns_are_served_better_apart() -> None:
    rates = {
        buckets: Simulator(controller(*buckets), TRUE_TIMES, 7, context_at=context_at)
        .run(traffic, 20.0)
        .rate
        for buckets in ((), (BOUND,))
    }
    best = np.mean([max(static_rates(BATCH_SIZE, each)) for each in ACCEPTANCE.values()])
    assert rates[(BOUND,)] > 1.15 * rates[()], rates
    assert rates[(BOUND,)] > 0.98 * best, (rates, best)


def test_what_is_known_of_a_bucket_comes_from_its_rounds() -> None:
    controls = controller(BOUND)
    Simulator(controls, TRUE_TIMES, 7, context_at=context_at).run(traffic, 10.0)
    state = controls.state()
    slots = state["slots"]
    assert slots["1"]["acceptance"][0] == pytest.approx(ACCEPTANCE[SHORT], abs=0.08)
    assert slots[f"1@{BOUND}"]["acceptance"][0] == pytest.approx(ACCEPTANCE[LONG], abs=0.08)
    lengths = [slots[slot]["steps"][str(BATCH_SIZE)] for slot in ("1", f"1@{BOUND}")]
    assert lengths[0] > lengths[1]
    assert state["round_ms"].keys() == {str(BATCH_SIZE), f"{BATCH_SIZE}@{BOUND}"}
    reasons = [switch["reason"] for switch in state["decisions"]["last"]]
    assert any(reason.startswith(f"contexts of {BOUND} tokens or more; ") for reason in reasons)


@pytest.mark.parametrize("strategy", ["cost_model", "ema"])
def test_without_a_bound_between_them_contexts_change_nothing(strategy: str) -> None:
    outcomes = []
    for buckets, contexts in (((), lambda now: 0), ((), context_at), ((LONG + 1,), context_at)):
        controls = controller(*buckets, strategy=strategy)
        simulator = Simulator(controls, TRUE_TIMES, 7, context_at=contexts)
        outcomes.append((simulator.run(traffic, 5.0), controls.state()["slots"]["1"]))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_contexts_that_waver_around_a_bound_stay_in_their_bucket() -> None:
    controls = controller(BOUND)
    found = []
    for context_len in (BOUND + 50, BOUND - 50, BOUND + 300, BOUND - 300, BOUND // 2, BOUND):
        controls.note_context(context_len)
        found.append(controls.context_len >= BOUND)
    assert found == [True, True, True, True, False, True]


def test_every_bucket_may_choose_the_same_lengths() -> None:
    one, two = controller(), controller(BOUND)
    assert one.tiers_at(8) == two.tiers_at(8)
    assert one.tiers == two.tiers


def test_rounds_are_told_of_with_the_context_that_they_were_chosen_for(
    tiny: Path, drafts: tuple[Path, Path]
) -> None:
    bound = 20
    adaptive = {"candidate_steps": [1, 3], "context_buckets": [bound]}
    harness = Harness(tiny, **tiny_engine("draft_target", drafts, 3, adaptive=adaptive))
    controls, told = harness.parts.controller, list[int]()
    observe = controls.observe

    def listen(observed: ObservedRound) -> bool:
        told.append(observed.context_len)
        return observe(observed)

    controls.observe = listen  # type: ignore[method-assign] # the test listens
    request = harness.submit([1, 2, 3], max_tokens=40)
    harness.run()
    assert len(output_of(request)) == 40
    assert told == sorted(told) and told[0] <= 8 and told[-1] > bound
    assert controls.state()["slots"].keys() == {"1", f"1@{bound}"}
