"""The network of a draft model, defined once for all backends: one step of a dense decoder of the
Llama family over pages of KV. `head_decoder.py` has the step of a head, of the same layers.

The KV pool is an input that the network only reads. The keys and values of the step's tokens are
outputs, which the caller writes into the pool. So pages, prefix reuse and rewinds are as for a
draft model in torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import torch

from tllm_spec.draft_network.emitter import Emitter, Value
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.layers import RMSNorm
from tllm_spec.models.linear import Linear
from tllm_spec.models.llama import MLP, Attention, CausalLM, DecoderLayer

BATCH, WINDOW, CACHED, KV_ROWS = "batch", "window", "cached", "kv_rows"
TOKEN_IDS, POSITIONS, OWN_KEYS = "token_ids", "positions", "own_keys"
CACHED_ROWS, LOGITS = "cached_rows", "logits"
NEVER = 1 << 40  # a position that no token has


def pool_inputs(layer: int) -> tuple[str, str]:
    """Names of a layer's keys and values in the pool."""
    return f"keys.{layer}", f"values.{layer}"


def new_outputs(layer: int) -> tuple[str, str]:
    """Names of the keys and values that a layer has computed."""
    return f"new_keys.{layer}", f"new_values.{layer}"


@dataclass(frozen=True)
class Step(Generic[Value]):
    """What all layers share. `cached_rows` `[B, L]` with 0 for rows that do not count, `is_cached`
    `[B, L, 1, 1]`, `visible` `[B, 1, 1, W, L + W]`; `cos` and `sin` `[B, W, 1, D]`, float32."""

    cached_rows: Value
    is_cached: Value
    visible: Value
    cos: Value
    sin: Value


class Layers(Generic[Value]):
    """Emits decoder layers in `dtype`, whose norms, rotation and softmax are computed in float32.

    Inputs, with B sequences, W tokens of each, and L entries before them: `positions` `[B, W]`
    int64; `own_keys` `[B, W]` int64: the same, but `NEVER` for padding, which no row sees;
    `cached_rows` `[B, L]` int64: rows of the pool with the keys and values before the window, in
    any order, -1 for none; `keys.i` and `values.i` `[kv_rows, Hkv, D]`: the pool's layer i.
    Outputs: `new_keys.i` and `new_values.i` `[B, W, Hkv, D]`.

    cos_sin: the rotary table of all positions."""

    def __init__(
        self,
        emitter: Emitter[Value],
        config: ModelConfig,
        dtype: torch.dtype,
        cos_sin: torch.Tensor,
    ) -> None:
        self._emit = emitter
        self._dtype, self._cos_sin = dtype, cos_sin
        self._num_kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._hidden_size, self._mlp_size = config.hidden_size, config.intermediate_size
        self._group = config.num_heads // config.num_kv_heads
        halves = torch.tensor([1, 0], dtype=torch.int64)
        self._swapped = emitter.constant(halves)
        self._scale = self._number(config.head_dim**-0.5, 4)
        self._no_score, self._no_value = self._number(-torch.inf, 5), self._number(0.0, 4)

    def _tokens(self, weight: torch.Tensor) -> Value:
        """`[B, W, H]`: the rows of the input `token_ids` in an embedding."""
        token_ids = self._emit.input(TOKEN_IDS, torch.int64, (BATCH, WINDOW))
        return self._emit.gather(self._emit.constant(weight), token_ids, 0)

    def _step(self) -> Step[Value]:
        emit, head_dim = self._emit, self._head_dim
        positions = emit.input(POSITIONS, torch.int64, (BATCH, WINDOW))
        own_keys = emit.input(OWN_KEYS, torch.int64, (BATCH, WINDOW))
        rows = emit.input(CACHED_ROWS, torch.int64, (BATCH, CACHED))
        zero = emit.constant(torch.zeros(1, 1, dtype=torch.int64))
        never = emit.constant(torch.full((1, 1), NEVER))
        is_cached = emit.at_least(rows, zero)
        # Entries of the cache come before the whole window.
        keys = emit.concat((emit.select(is_cached, zero, never), own_keys), 1)
        visible = emit.at_least(
            emit.reshape(positions, (0, 1, 1, -1, 1)), emit.reshape(keys, (0, 1, 1, 1, -1))
        )
        cos, sin = (
            self._float(
                emit.reshape(
                    emit.gather(emit.constant(table.contiguous()), positions, 0),
                    (0, 0, 1, head_dim),
                )
            )
            for table in self._cos_sin.squeeze(2).unbind(1)
        )
        return Step(
            emit.select(is_cached, rows, zero),
            emit.reshape(is_cached, (0, 0, 1, 1)),
            visible,
            cos,
            sin,
        )

    def _layer(
        self,
        index: int,
        layer: DecoderLayer,
        hidden: Value,
        step: Step[Value],
        take: Callable[[Value, int], Value] | None,
    ) -> Value:
        """The residual stream after the layer. take: as in `_block`."""
        assert isinstance(layer.self_attn, Attention) and isinstance(layer.mlp, MLP)
        assert layer.input_layernorm is not None
        normed = self._norm(hidden, layer.input_layernorm)
        modules = layer.self_attn, layer.post_attention_layernorm, layer.mlp
        return self._block(index, modules, normed, hidden, step, take)

    def _block(
        self,
        index: int,
        modules: tuple[Attention, RMSNorm, MLP],
        normed: Value,
        hidden: Value,
        step: Step[Value],
        take: Callable[[Value, int], Value] | None,
    ) -> Value:
        """The residual stream hidden `[B, W, H]` after attention, which reads `normed`, and MLP.
        take: leaves one row of each window of a value with so many columns; None: all rows."""
        emit, (attention, norm, mlp) = self._emit, modules
        attended = self._attend(index, attention, normed, step)
        if take is not None:
            hidden = take(hidden, self._hidden_size)
            attended = take(attended, attention.o_proj.weight.shape[1])
        hidden = emit.add(hidden, self._linear(attended, attention.o_proj))
        sizes = [self._mlp_size, self._mlp_size]
        gate, up = self._parts(self._norm(hidden, norm), mlp.gate_up_proj, sizes)
        activated = emit.mul(emit.mul(gate, emit.sigmoid(gate)), up)
        return emit.add(hidden, self._linear(activated, mlp.down_proj))

    def _attend(self, index: int, layer: Attention, hidden: Value, step: Step[Value]) -> Value:
        """`[B, W, Hq * D]`: attention of the window's rows to the cache and to the window."""
        emit, heads, head_dim = self._emit, self._num_kv_heads, self._head_dim
        num_q, num_kv = heads * self._group * head_dim, heads * head_dim
        q, k, v = (
            emit.reshape(part, (0, 0, -1, head_dim))
            for part in self._parts(hidden, layer.qkv_proj, [num_q, num_kv, num_kv])
        )
        norm = layer.qk_norm
        q_weight, k_weight = (None, None) if norm is None else norm.weight[[0, norm.num_heads]]
        eps = 0.0 if norm is None else norm.head_weights.eps
        q = self._rotated(q, step, q_weight, eps, scaled=True)
        k = self._rotated(k, step, k_weight, eps)
        for name, value in zip(new_outputs(index), (k, v), strict=True):
            emit.output(name, value, self._dtype)
        keys, values = (
            emit.concat((self._cached(name, step), new), 1)
            for name, new in zip(pool_inputs(index), (k, v), strict=True)
        )
        # [B, Hkv, G, W, D] and [B, Hkv, 1, L + W, D]: a group of query heads shares its KV head.
        q = emit.transpose(emit.reshape(q, (0, 0, heads, self._group, head_dim)), (0, 2, 3, 1, 4))
        keys = emit.reshape(emit.transpose(keys, (0, 2, 3, 1)), (0, 0, 1, head_dim, -1))
        values = emit.reshape(emit.transpose(values, (0, 2, 1, 3)), (0, 0, 1, -1, head_dim))
        scores = self._float(emit.matmul(q, keys))
        weights = emit.softmax(emit.select(step.visible, scores, self._no_score))
        attended = emit.matmul(self._own(weights), values)
        return emit.reshape(emit.transpose(attended, (0, 3, 1, 2, 4)), (0, 0, num_q))

    def _cached(self, name: str, step: Step[Value]) -> Value:
        """`[B, L, Hkv, D]`. Rows that do not count become zeros: they may be another request's, and
        a weight of zero times NaN is NaN."""
        emit, shape = self._emit, (self._num_kv_heads, self._head_dim)
        pool = emit.input(name, self._dtype, (KV_ROWS, *shape))
        nothing = self._own(self._no_value)
        return emit.select(step.is_cached, emit.gather(pool, step.cached_rows, 0), nothing)

    def _rotated(
        self,
        heads: Value,
        step: Step[Value],
        weight: torch.Tensor | None,
        eps: float,
        *,
        scaled: bool = False,
    ) -> Value:
        """`[B, W, H, D]` with the rotary embedding. weight `[D]`: of a norm before it. scaled:
        times the scale of attention."""
        emit, head_dim = self._emit, self._head_dim
        heads = self._float(heads)
        if weight is not None:
            heads = self._normed(heads, weight, eps)
        halves = emit.reshape(heads, (0, 0, -1, 2, head_dim // 2))
        swapped = emit.reshape(emit.gather(halves, self._swapped, 3), (0, 0, -1, head_dim))
        rotated = emit.add(emit.mul(heads, step.cos), emit.mul(swapped, step.sin))
        return self._own(emit.mul(rotated, self._scale) if scaled else rotated)

    def _norm(self, x: Value, norm: RMSNorm) -> Value:
        return self._own(self._normed(self._float(x), norm.weight, norm.eps, rank=3))

    def _normed(self, x: Value, weight: torch.Tensor, eps: float, rank: int = 4) -> Value:
        """RMSNorm of float32 x over its last dimension."""
        emit = self._emit
        root = emit.rsqrt(emit.add(emit.mean(emit.mul(x, x)), self._number(eps, rank)))
        scale = emit.constant(weight.float().view(*([1] * (rank - 1)), -1))
        return emit.mul(emit.mul(x, root), scale)

    def _linear(self, x: Value, layer: Linear) -> Value:
        (output,) = self._parts(x, layer, [layer.weight.shape[0]])
        return output

    def _parts(self, x: Value, layer: Linear, sizes: list[int]) -> list[Value]:
        """The outputs of a layer, cut into parts of these sizes."""
        weights = torch.split(layer.full_weight(), sizes)
        outputs = [self._emit.linear(x, weight) for weight in weights]
        if layer.bias is None:
            return outputs
        biases = map(self._emit.constant, torch.split(layer.bias.view(1, 1, -1), sizes, -1))
        return [self._emit.add(output, bias) for output, bias in zip(outputs, biases, strict=True)]

    def _number(self, number: float, rank: int) -> Value:
        return self._emit.constant(torch.full([1] * rank, number))

    def _float(self, x: Value) -> Value:
        return x if self._dtype == torch.float32 else self._emit.cast(x, torch.float32)

    def _own(self, x: Value) -> Value:
        return x if self._dtype == torch.float32 else self._emit.cast(x, self._dtype)


class Decoder(Layers[Value]):
    """Emits the network of `model`: `Layers` with the input `token_ids` `[B, W]` int64, and the
    output `logits` `[B, V]` after the last token of each window."""

    def __init__(self, emitter: Emitter[Value], model: CausalLM) -> None:
        super().__init__(emitter, model.config, model.dtype, model.model.cos_sin)
        self._model = model

    def emit(self) -> None:
        emit, model = self._emit, self._model.model
        hidden = self._tokens(model.embed_tokens.weight)
        step, last = self._step(), len(model.layers) - 1

        def take(x: Value, num_columns: int) -> Value:
            return emit.last_row(x)

        for index, layer in enumerate(model.layers):
            assert isinstance(layer, DecoderLayer)
            hidden = self._layer(index, layer, hidden, step, take if index == last else None)
        logits = emit.linear(self._norm(hidden, model.norm), self._model.lm_head.weight)
        emit.output(LOGITS, emit.reshape(logits, (0, -1)), self._dtype)
