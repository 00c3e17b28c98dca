"""How long a replay takes, with a device whose clock is the test's own."""

import pytest
import torch

from tests.executor.graph_rounds import Event
from tllm_spec.config.draft_shape import chain_of
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs

CPU = torch.device("cpu")
DUMMY = 8


def test_a_replay_is_timed_among_others_when_the_device_has_slowed_down(
    eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that takes 2 ms for a replay after a pause, and 3 ms once it has been busy for 20
    ms."""
    now = 0.0

    def generate(slot_ids: torch.Tensor, draft_len: int, sampled: bool) -> None:
        nonlocal now
        now += 2.0 if now < 20 else 3.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.time = -1.0

        def record(self) -> None:
            self.time = now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return end.time - self.time

    graphs = SlotGraphs(generate, DUMMY, CPU)
    graphs.capture([GraphKey(2, chain_of(1), False)])
    now = 0.0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert graphs.seconds(GraphKey(2, chain_of(1), False)) == pytest.approx(0.003)


def test_a_round_is_renewed_before_every_replay_and_runs_for_the_slots_that_were_given(
    eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[object] = []

    def generate(slot_ids: torch.Tensor, draft_len: int, sampled: bool) -> None:
        happened.append(slot_ids.tolist())

    graphs = SlotGraphs(generate, DUMMY, CPU)
    graphs.capture([GraphKey(3, chain_of(0), False)])
    happened.clear()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert (
        graphs.seconds(
            GraphKey(3, chain_of(0), False), [4, 0, 2], lambda: happened.append("renewed")
        )
        == 0.006 / 5
    )
    assert happened == ["renewed", [4, 0, 2]] * (1 + 5 + 5)
    happened.clear()
    graphs.seconds(GraphKey(3, chain_of(0), False))
    assert happened == [[DUMMY] * 3] * (1 + 5 + 5)
