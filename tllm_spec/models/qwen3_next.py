"""Qwen3-Next and Qwen3.5's text models: layers with a recurrent state (gated delta net, arXiv
2412.06464: linear attention whose inputs go through a short causal convolution) and, every few
layers, attention whose output is multiplied by a gate; an MLP, or experts next to a shared one."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tllm_spec.attention.interface import ForwardContext, HeadsInputs
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.gemm.norms import silu_and_mul
from tllm_spec.kernels.states.gated_delta import DeltaShape, DeltaWeights, gated_norm
from tllm_spec.models.config import FULL, DeltaConfig, ModelConfig, decoder_config
from tllm_spec.models.config_file import required, with_defaults
from tllm_spec.models.formats.weight_format import Part
from tllm_spec.models.layers import Module, Placement, RMSNorm, WeightSlot, in_float32, sibling
from tllm_spec.models.linear import Linear, RowLinear, choose_format
from tllm_spec.models.llama import Attention, CausalLM, DecoderLayer
from tllm_spec.models.moe_config import moe_config, sparse_layers
from tllm_spec.models.rotary import RopeConfig, rope_config

QWEN3_NEXT = "Qwen3NextForCausalLM"
_LINEAR = "linear_attention"
_COMMON: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_EXPERTS = {
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# The defaults of each architecture's configuration class in transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    QWEN3_NEXT: _COMMON
    | _EXPERTS
    | {
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_nextn_predict_layers": 1,
    },
    "Qwen3_5ForCausalLM": _COMMON
    | {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "mtp_num_hidden_layers": 1,
    },
    "Qwen3_5MoeForCausalLM": _COMMON
    | _EXPERTS
    | {
        "vocab_size": 248320,
        "intermediate_size": 0,
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "mtp_num_hidden_layers": 1,
    },
}


def read_qwen3_next(raw: dict[str, Any]) -> ModelConfig:
    """Raises ValueError for what is not served."""
    name = raw["architectures"][0]
    flat = with_defaults(raw, _DEFAULTS[name])
    number, interval = required(flat, "num_hidden_layers"), flat["full_attention_interval"]
    types = flat.get("layer_types") or [
        _LINEAR if (layer + 1) % interval else FULL for layer in range(number)
    ]
    if len(types) != number:
        raise ValueError(f"layer_types has {len(types)} entries for {number} layers.")
    if unknown := set(types) - {_LINEAR, FULL}:
        raise ValueError(f"layer_types has {sorted(unknown)}; served are {_LINEAR!r} and {FULL!r}.")
    if FULL not in types:
        raise ValueError(f"layer_types has no {FULL!r}, which at least one layer must have.")
    key = "num_nextn_predict_layers" if name == QWEN3_NEXT else "mtp_num_hidden_layers"
    if (modules := flat[key] or 0) > 1:
        raise ValueError(f"{key} is {modules}; served are 0 and 1.")
    if flat.get("attn_output_gate") is False:
        raise ValueError("attn_output_gate is false; attention is served with a gate only.")
    linear = tuple(layer for layer, kind in enumerate(types) if kind == _LINEAR)
    flat |= {"sliding_window": None, "layer_types": None}
    config = replace(
        decoder_config(flat, rope=_rope(flat), reads_bias=True),
        qk_norm=True,
        offset_norms=True,
        delta=_delta_config(flat, linear),
        num_nextn_layers=int(modules),
    )
    if not _DEFAULTS[name].keys() >= _EXPERTS.keys():
        return config
    size = int(flat["shared_expert_intermediate_size"])
    moe = replace(moe_config(flat), shared_intermediate_size=size, shared_gate=True)
    return replace(config, moe=moe, sparse_layers=sparse_layers(flat))


def _rope(flat: dict[str, Any]) -> RopeConfig:
    """Raises ValueError unless an even number of a head's elements is rotated."""
    fields = flat.get("rope_scaling") or flat.get("rope_parameters") or {}
    share = fields.get("partial_rotary_factor") or flat["partial_rotary_factor"] or 1.0
    required(flat, "head_dim")
    fields = {"rope_type": "default", **fields, "partial_rotary_factor": share}
    rope = {"rope_parameters": fields, "rope_scaling": None}
    return rope_config(flat | rope, may_be_partial=True)


def _delta_config(flat: dict[str, Any], layers: tuple[int, ...]) -> DeltaConfig | None:
    """layers: those with a state. None: all have keys and values. Raises ValueError for heads that
    do not belong to each other."""
    heads = DeltaShape(
        flat["linear_num_key_heads"],
        flat["linear_num_value_heads"],
        flat["linear_key_head_dim"],
        flat["linear_value_head_dim"],
        flat["linear_conv_kernel_dim"],
    )
    if heads.num_value_heads % heads.num_key_heads:
        raise ValueError(
            f"linear_num_key_heads is {heads.num_key_heads}; it must divide "
            f"linear_num_value_heads, which is {heads.num_value_heads}."
        )
    is_split = flat["architectures"] != [QWEN3_NEXT]
    return DeltaConfig(layers, heads, is_split) if layers else None


class _Heads:
    """Which of the checkpoint's rows this rank has: those of neighbouring key heads, and of the
    value heads that belong to them. `shape`: of the rank; `full`: of all ranks."""

    def __init__(self, delta: DeltaConfig, placement: Placement) -> None:
        self.full, self.shape = delta.heads, delta.shape(placement.mapping)
        self.rank, self.is_split = placement.mapping.tp_rank, delta.is_split

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """The rank's part of the rows `[N, ...]` of all heads."""
        return rows.chunk(self.full.num_key_heads // self.shape.num_key_heads)[self.rank]

    def grouped(self, sizes: tuple[int, ...]) -> torch.Tensor:
        """Rows of a tensor that has, for each key head, parts of these sizes one after another: the
        rank's, with the first part of all heads first."""
        rows = torch.arange(self.full.num_key_heads * sum(sizes)).view(-1, sum(sizes))
        return torch.cat([part.flatten() for part in self.own(rows).split_with_sizes(sizes, 1)])

    def parts(self) -> dict[str, tuple[int, torch.Tensor]]:
        """The checkpoint's projections, b and a first: their rows on all ranks, and the rank's in
        order."""
        full, number = self.full, self.full.num_value_heads
        values = number * full.value_dim
        if self.is_split:
            of_heads = number, self.own(torch.arange(number))
            return {
                "in_proj_b": of_heads,
                "in_proj_a": of_heads,
                "in_proj_qkv": (full.num_channels, self.segments()),
                "in_proj_z": (values, self.own(torch.arange(values))),
            }
        each = number // full.num_key_heads
        wide = each * full.value_dim
        return {
            "in_proj_ba": (2 * number, self.grouped((each, each))),
            "in_proj_qkvz": (
                full.num_channels + values,
                self.grouped((full.key_dim, full.key_dim, wide, wide)),
            ),
        }

    def segments(self) -> torch.Tensor:
        """Rows of a tensor that has q of all heads, then k and v: the rank's."""
        keys = self.full.num_key_heads * self.full.key_dim
        sizes = keys, keys, self.full.num_value_heads * self.full.value_dim
        parts = torch.arange(self.full.num_channels).split_with_sizes(sizes)
        return torch.cat([self.own(part) for part in parts])


class UnnamedLinear(Linear):
    """Its slots are those of the module above."""

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        return iter(())


class DeltaProjection(Linear):
    """The checkpoint's projections in one GEMM, with outputs as `gated_delta` reads them. Where
    those of q, k, v and z are quantised, b and a have a GEMM of their own: no checkpoint quantises
    them."""

    gates: UnnamedLinear | None
    """The GEMM of b and a, where they have one; None: that of all."""

    def __init__(self, hidden_size: int, heads: _Heads, placement: Placement) -> None:
        total, num_gates = heads.shape.num_projected, 2 * heads.shape.num_value_heads
        is_plain = placement.quantised.is_plain
        own = total if is_plain else total - num_gates
        super().__init__(hidden_size, own, bias=False, placement=placement)
        self.parts, self.full_shape, self.gates = heads.parts(), (total, hidden_size), None
        if not is_plain:
            sizes = hidden_size, num_gates
            self.gates = UnnamedLinear(*sizes, bias=False, placement=placement.wide)

    def widen(self, placement: Placement) -> None:
        self.gates = None
        self.use(choose_format(self.full_shape, placement.wide, None))

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        if self.gates is None:
            return super().forward(x, norm)
        output = x.new_empty(len(x), self.full_shape[0])
        first = self.gates.weight_format.shape[0]
        self.gates.write_to(output[:, :first], x, norm)
        self.write_to(output[:, first:], x, norm)
        return output

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        forms = [self.weight_format]
        if self.gates is not None:
            forms.insert(0, self.gates.weight_format)
        first = 0
        for name, (size, order) in self.parts.items():
            if first == forms[0].shape[0]:
                first = 0
                del forms[0]
            own, part = (
                slice(first, first + len(order)),
                Part((size, self.full_shape[1]), order=order),
            )
            module = sibling(path, name)
            yield f"{module}.weight", forms[0].slot(module, own, part)
            first += len(order)


class DeltaConv(Module):
    """The weight of the causal convolution, `[C, K]`."""

    def __init__(self, heads: _Heads, placement: Placement) -> None:
        super().__init__()
        self.heads = heads
        self.weight = placement.parameter(heads.shape.num_channels, heads.shape.kernel_size)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        full = self.heads.full
        shape = full.num_channels, 1, full.kernel_size
        order = self.heads.segments()
        yield f"{path}.weight", WeightSlot(self.weight.unsqueeze(1), shape, order=order)


class GatedDeltaNet(Module):
    """A layer's projections, convolution, recurrence and norm. The layer applies the output
    projection, `o_proj`, since it adds to the residual stream."""

    o_proj: RowLinear

    def __init__(
        self, config: ModelConfig, delta: DeltaConfig, layer: int, placement: Placement
    ) -> None:
        super().__init__()
        self.layer, self.heads = delta.layers.index(layer), _Heads(delta, placement)
        self.shape, wide = self.heads.shape, in_float32(placement)
        self.in_proj = DeltaProjection(config.hidden_size, self.heads, placement)
        self.conv1d = DeltaConv(self.heads, placement)
        self.A_log = wide.parameter(self.shape.num_value_heads)
        self.dt_bias = wide.parameter(self.shape.num_value_heads)
        self.weights = DeltaWeights(self.conv1d.weight, self.A_log, self.dt_bias)
        self.norm = RMSNorm(self.shape.value_dim, config.rms_norm_eps, placement)
        size = delta.heads.num_value_heads * delta.heads.value_dim
        out_proj = RowLinear(size, config.hidden_size, bias=False, placement=placement)
        self.add_under("out_proj", "o_proj", out_proj)

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        """The input of `o_proj`, `[T, Hv * Dv]`, for hidden `[T, H]`. `norm` is applied to hidden
        first."""
        projected = self.in_proj.forward(hidden, norm)
        assert context.recurrent is not None
        answers = context.recurrent.run(self.layer, projected, self.weights)
        gates = projected[:, self.shape.num_inputs :]
        return gated_norm(answers, gates, self.norm.weight, self.norm.eps)

    def write(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> None:
        """The same, for rows whose outputs are not needed."""
        assert context.recurrent is not None
        context.recurrent.run(self.layer, self.in_proj.forward(hidden, norm), self.weights)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        full = (self.heads.full.num_value_heads,)
        start = self.shape.num_value_heads * self.heads.rank
        for name, values in (("A_log", self.A_log), ("dt_bias", self.dt_bias)):
            yield f"{path}.{name}", WeightSlot(values, full, 0, start)


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate for each element. Each head of
    the checkpoint's `q_proj` has queries, then gates; here all gates come first, then all queries,
    keys and values: those of one row are a contiguous view."""

    query_outputs = 2

    def _row_orders(self, order: torch.Tensor | None) -> dict[str, torch.Tensor]:
        order = torch.arange(self.head_dim) if order is None else order
        rows = torch.arange(2 * self.num_heads * self.head_dim).view(-1, self.head_dim)
        gates_first = torch.cat((rows[1::2], rows[::2, order])).flatten()
        return super()._row_orders(order) | {"q_proj": gates_first}

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        inputs, gates = self._split(hidden, norm)
        backend, plan = context.groups[self.group]
        return silu_and_mul(gates, "sigmoid", backend.run(self.layer, inputs, rotary, plan))

    def _inputs(self, hidden: torch.Tensor, norm: RMSNorm | None) -> HeadsInputs:
        return self._split(hidden, norm)[0]

    def _split(
        self, hidden: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[HeadsInputs, torch.Tensor]:
        """The inputs, and the gates `[T, Hq * D]`."""
        assert self.qk_norm is not None
        projected = self.qkv_proj.forward(hidden, norm)
        gates, heads = projected.tensor_split((self.num_heads * self.head_dim,), 1)
        qkv = heads.reshape(len(heads), -1, self.head_dim).contiguous()
        return HeadsInputs(qkv, self.qk_norm.head_weights), gates


class Qwen3NextLayer(DecoderLayer):
    attention = GatedAttention

    def add_attention(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        if config.delta is not None and layer in config.delta.layers:
            delta_net = GatedDeltaNet(config, config.delta, layer, placement)
            self.add_under("linear_attn", "self_attn", delta_net)
        else:
            super().add_attention(config, layer, placement)


class Qwen3NextForCausalLM(CausalLM):
    layer_type = Qwen3NextLayer
    nextn_names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0")

    @staticmethod
    def nextn_prefix(number: int) -> str:
        return "mtp."
