"""Log lines of the draft length: one a switch, none for probes."""

import logging
from itertools import pairwise

import pytest

from tllm_spec.executor.speculative.draft_length.adaptive import (
    AdaptiveController,
    DraftLenTable,
)
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound

ROUNDS = 4000


def play(controller: AdaptiveController, rounds: int, num_accepted: int) -> list[int]:
    asked = []
    for _ in range(rounds):
        steps = controller.tier_for(1)
        asked.append(steps)
        controller.observe(ObservedRound(1, [min(steps, num_accepted)] if steps else [], steps))
    return asked


@pytest.mark.parametrize(
    "config",
    [
        {
            "strategy": "cost_model",
            "candidate_steps": [0, 1, 2, 3],
            "window_trials": 32,
            "probe_time_share": 0.2,
        },
        {"strategy": "ema", "1": {"candidate_steps": [1, 3]}},
    ],
)
def test_every_switch_is_one_line_with_its_reason(
    config: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    controller = AdaptiveController.from_config(config)
    with caplog.at_level(logging.INFO):
        for num_accepted in (3, 0, 3, 0):
            play(controller, 300, num_accepted)
    lines = [record.getMessage() for record in caplog.records]
    decisions = controller.state()["decisions"]
    assert len(lines) == decisions["num_switches"] >= 3
    last = decisions["last"][-1]
    assert lines[-1].startswith(
        f"draft length {last['old_steps']} -> {last['new_steps']} at batch size 1"
    )
    assert lines[-1].endswith(last["reason"])


def test_probes_write_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    controller = AdaptiveController.from_config(
        {"strategy": "cost_model", "candidate_steps": [0, 1, 2, 3]}
    )
    play(controller, 1000, 0)
    with caplog.at_level(logging.INFO):
        asked = play(controller, ROUNDS, 0)
    assert sum(steps > 0 for steps in asked) > 10, "there were probes"
    assert not caplog.records


def test_a_limit_that_no_length_of_the_ladder_meets_is_a_switch_there_and_back() -> None:
    limits = DraftLenTable(gate=(1.0, 5))
    controller = AdaptiveController.from_config({"candidate_steps": [1, 3]}, table=limits)
    play(controller, 600, 0)
    switches = controller.state()["decisions"]["last"]
    steps = [(switch["old_steps"], switch["new_steps"]) for switch in switches]
    assert steps == list(pairwise([steps[0][0], *(new for _, new in steps)]))
    assert (1, 0) in steps and (0, 1) in steps
    assert all(
        switch["reason"].startswith("a limit")
        for switch in switches
        if 0 in (switch["old_steps"], switch["new_steps"])
    )
