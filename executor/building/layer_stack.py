"""The target's first layers as a CUDA graph of their own, to see how long they take with other
products.

It knows the engine and the sizes of rounds; neither products nor who compares them.
"""

from collections.abc import Iterable
from functools import partial

import torch

from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.rows import Windows
from tllm_spec.executor.graphs.graph_pool import Captured, GraphPool, replay_seconds
from tllm_spec.executor.graphs.slot_graphs import GraphKey
from tllm_spec.models.causal_lm import CausalLM, first_layers

# Enough that the device's cache does not hold their weights from one replay to the next.
NUM_LAYERS = 4
TIMED_SECONDS = 0.004  # of replays in a row
TIMED_ROWS = 2


class LayerStack:
    """Rounds of generation windows with the dummy slot in the place of everybody."""

    def __init__(
        self, engine: ModelEngine, keys: Iterable[GraphKey], dummy_slot: int, device: torch.device
    ) -> None:
        self._engine, self._dummy_slot, self._device = engine, dummy_slot, device
        self._keys = {key.num_tokens: key for key in keys}
        self._pool = GraphPool(device)
        self._first: Captured[torch.Tensor] | None = (
            None  # a pool is gone when all of its graphs are
        )

    @property
    def model(self) -> CausalLM:
        return self._engine.model

    @property
    def row_counts(self) -> list[int]:
        return list(self._keys)

    def seconds(self, rows: int) -> float:
        """Of a forward of a round with so many rows. Captures it anew."""
        windows = self._windows(self._keys[rows])
        with first_layers(self.model, NUM_LAYERS):
            captured = self._pool.capture(partial(self._engine.forward, [], windows))
        self._first = self._first or captured
        return min(replay_seconds(captured.graph, TIMED_SECONDS) for _ in range(TIMED_ROWS))

    def _windows(self, key: GraphKey) -> Windows:
        slots = torch.full((key.batch_size,), self._dummy_slot, device=self._device)
        token_ids = slots.new_zeros(key.batch_size, 1 + key.draft_len)
        # The longest requests that there can be, so that attention's launch is that of the rounds'
        # graphs.
        return Windows(slots, torch.zeros_like(slots), token_ids, self._engine.rows.max_len)
