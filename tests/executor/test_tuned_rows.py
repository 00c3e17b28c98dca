"""For which numbers of rows a build has linear layers tuned."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.executor.harness import user_provided
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.build import prepare_rounds
from tllm_spec.executor.building import plan, rounds


class FakeRunner:
    """Stands in for a round runner on a CUDA device."""

    engine = SimpleNamespace(attention=SimpleNamespace(supports_graphs=True))

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def capture_contexts(self, sizes: tuple[int, ...], *others: Any) -> None:
        self._events += ["contexts"] if sizes else []

    def capture_graphs(self, *graphs: Any, **options: Any) -> None:
        self._events.append("captured")

    def launch(self, batch: ScheduledBatch) -> Any:
        self._events += ["warmed up"] if self._events[-1:] != ["warmed up"] else []
        return SimpleNamespace(wait=lambda: None)

    def discard_dummy_round(self) -> None:
        return


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_gemms_are_tuned_for_all_row_counts_before_graphs_are_captured(
    has_graphs: bool, deterministic: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []

    def tune(models: Any, rows: Any, device: torch.device, communicator: Any) -> None:
        events.append(set(rows))

    monkeypatch.setattr(rounds, "tune_linears", tune)
    monkeypatch.setattr(plan, "has_kernels", lambda device: True)
    options: dict[str, Any] = {
        "max_batch_size": 8,
        "max_num_tokens": 300,
        "deterministic": deterministic,
    }
    if not has_graphs:
        options["cuda_graph_config"] = None
    options |= user_provided(lambda _: [], 2)
    building = plan.BuildPlan(LlmArgs.from_kwargs(tiny, max_seq_len=128, **options))
    building.device = torch.device("cuda")
    runner: Any = FakeRunner(events)
    prepare_rounds(building, runner, [])
    windows = {size * window for size in (1, 2, 4, 8) for window in (1, 2, 3)}
    rows = {300, 37} | (windows if has_graphs else set())
    assert events == ([] if deterministic else [rows]) + (
        ["contexts", "captured"] if has_graphs else []
    ) + ["warmed up"]
