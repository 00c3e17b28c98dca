"""The network of an EAGLE-3 head, defined once for all backends: one step of its layers, which read
a token and a hidden state, and its output layer. `fc`, which makes such a state of the target's, is
not part of it, since steps after the first read the head's own state."""

from collections.abc import Callable

import torch

from tllm_spec.draft_network.decoder import BATCH, LOGITS, WINDOW, Layers, Step
from tllm_spec.draft_network.emitter import Emitter, Value
from tllm_spec.models.eagle3 import Eagle3Head, Eagle3Layer
from tllm_spec.models.llama import Attention, DecoderLayer

STATES, WANTED, NEXT_STATES = "states", "wanted", "next_states"


class HeadDecoder(Layers[Value]):
    """Emits the network of `head`: `Layers` with the inputs `token_ids` `[B, W]` int64, `states`
    `[B, W, H]`, and `wanted` `[B]` int64: one row of each window, counted through all windows.

    Outputs, of the wanted rows: `next_states` `[B, H]`, and `logits` `[B, V_draft]`."""

    def __init__(self, emitter: Emitter[Value], head: Eagle3Head) -> None:
        super().__init__(emitter, head.config, head.dtype, head.cos_sin)
        self._head = head

    def emit(self) -> None:
        emit, head, size = self._emit, self._head, self._hidden_size
        embedded = self._tokens(head.embedding.weight)
        states = emit.input(STATES, self._dtype, (BATCH, WINDOW, size))
        wanted, step = emit.input(WANTED, torch.int64, (BATCH,)), self._step()

        def take(x: Value, num_columns: int) -> Value:
            rows = emit.gather(emit.reshape(x, (-1, num_columns)), wanted, 0)
            return emit.reshape(rows, (0, 1, -1))

        first, *later = head.layers
        assert isinstance(first, Eagle3Layer)
        hidden = self._first_layer(first, embedded, states, step, None if later else take)
        for index, layer in enumerate(later, 1):
            assert isinstance(layer, DecoderLayer)
            hidden = self._layer(index, layer, hidden, step, take if layer is later[-1] else None)
        normed = self._norm(hidden, head.norm)
        state = normed if head.config.norm_output else hidden
        emit.output(NEXT_STATES, emit.reshape(state, (0, -1)), self._dtype)
        logits = emit.linear(normed, head.output.weight)
        emit.output(LOGITS, emit.reshape(logits, (0, -1)), self._dtype)

    def _first_layer(
        self,
        layer: Eagle3Layer,
        embedded: Value,
        states: Value,
        step: Step[Value],
        take: Callable[[Value, int], Value] | None,
    ) -> Value:
        """As `_layer`; attention reads the normed embedding and the normed state side by side."""
        normed = self._norm(states, layer.hidden_norm)
        both = self._emit.concat((self._norm(embedded, layer.input_layernorm), normed), 2)
        residual = normed if layer.norm_before_residual else states
        assert isinstance(layer.self_attn, Attention)
        modules = layer.self_attn, layer.post_attention_layernorm, layer.mlp
        return self._block(0, modules, both, residual, step, take)
