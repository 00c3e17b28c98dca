"""Rounds played through a controller of the cost model, with simple round times."""

from typing import Any

from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController, DraftLenTable
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes

LADDER = (0, 1, 2, 3)


class LinearTimes(MeasuredRoundTimes):
    """A plain round takes 10 ms, each draft `draft_ms` more."""

    def __init__(self, draft_ms: float, *, has_contexts: bool = False) -> None:
        super().__init__({1: {0: 1.0}}, has_contexts=has_contexts)
        self.draft_ms = draft_ms

    def round_time(self, batch_size: int, tier: int) -> float:
        return (10 + self.draft_ms * tier) / 1e3


def controller(
    draft_ms: float = 1.0,
    table: DraftLenTable | None = None,
    *,
    has_contexts: bool = False,
    **keys: Any,
) -> AdaptiveController:
    config = {"strategy": "cost_model", "candidate_steps": list(LADDER), **keys}
    times = LinearTimes(draft_ms, has_contexts=has_contexts)
    return AdaptiveController.from_config(config, round_times=times, table=table)


def play(
    controls: AdaptiveController, rounds: int, num_accepted: int, batch_size: int = 1
) -> list[int]:
    """Every request's drafts are accepted up to `num_accepted`. Returns the lengths asked for."""
    asked = []
    for _ in range(rounds):
        steps = controls.tier_for(batch_size)
        asked.append(steps)
        accepted = [min(steps, num_accepted)] * batch_size if steps else []
        controls.observe(ObservedRound(batch_size, accepted, steps))
    return asked


def settled(controls: AdaptiveController) -> int:
    return int(controls.state()["slots"]["1"]["steps"]["1"])
