"""The target's first layers in a graph of their own: what runs in it, and that the model is whole
again behind it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.harness import Harness
from tllm_spec.executor.building import layer_stack
from tllm_spec.executor.building.layer_stack import LayerStack
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.graphs.slot_graphs import GraphKey
from tllm_spec.models.causal_lm import layers_of

CPU, DUMMY = torch.device("cpu"), 8


@pytest.fixture
def harness(tiny: Path, eager_graphs: None) -> Harness:
    return Harness(tiny)


@pytest.fixture
def engine(harness: Harness) -> ModelEngine:
    return harness.parts.runner.engine


@torch.inference_mode()
def test_a_round_of_so_many_rows_runs_through_the_first_layers_for_nobody(
    harness: Harness, engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_layers = list(layers_of(engine.model))
    replayed, ran = [], []
    monkeypatch.setattr(layer_stack, "NUM_LAYERS", len(all_layers) - 1)
    monkeypatch.setattr(
        layer_stack,
        "replay_seconds",
        lambda graph, in_a_row: replayed.append(graph.run()) or [3.0, 2.0][len(replayed) % 2],
    )
    forward, windows = engine.forward, []

    def watched(contexts: Any, given: Any, *wanted: Any) -> torch.Tensor:
        ran.append(len(layers_of(engine.model)))
        windows.append(given)
        return forward(contexts, given, *wanted)

    monkeypatch.setattr(engine, "forward", watched)
    keys = [GraphKey(3, 3, False), GraphKey(2, 0, False), GraphKey(3, 3, True)]
    stack = LayerStack(engine, keys, DUMMY, CPU)
    assert stack.row_counts == [12, 2] and stack.model is engine.model
    assert stack.seconds(12) == 2.0 and len(replayed) == 2
    assert ran[0] == len(all_layers) - 1, "it was captured with all layers"
    assert windows[0].slots.tolist() == [DUMMY] * 3 and windows[0].token_ids.shape == (3, 4)
    assert list(layers_of(engine.model)) == all_layers
    assert not harness.parts.slots.kv_lens.any()


def test_the_model_is_whole_again_where_the_capture_fails(
    engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(layers_of(engine.model))

    def fails(*given: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(engine, "forward", fails)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        LayerStack(engine, [GraphKey(3, 3, False)], DUMMY, CPU).seconds(12)
    assert list(layers_of(engine.model)) == before
