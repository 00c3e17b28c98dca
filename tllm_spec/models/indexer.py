"""The indexer of DeepSeek V3.2 and GLM-5 (arXiv 2512.02556, section 2.1): it chooses the keys that
the rows of a layer with latents attend to.

Every rank has all of its heads, so that all ranks choose the same keys."""

from collections.abc import Iterator
from functools import partial

import torch

from tllm_spec.attention.geometry import place_of
from tllm_spec.attention.indexed import IndexBackend, IndexInputs, IndexPlan, chosen_keys
from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.index_write import IndexNorm
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.layers import Module, Placement, RMSNorm, WeightSlot
from tllm_spec.models.linear import ColumnLinear, Linear

_EPS = 1e-6  # of the keys' norm
KEYS = "indexer.wk"  # their projection, below the layer's attention


class KeyNorm(Module):
    """LayerNorm of the keys. order: `[D]` int64, the checkpoint's element for each one."""

    def __init__(self, size: int, order: torch.Tensor, placement: Placement) -> None:
        super().__init__()
        self.weight, self.bias = placement.parameter(size), placement.parameter(size)
        self.order, self.kernel_norm = order, IndexNorm(self.weight, self.bias, _EPS)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        for name, own in (("weight", self.weight), ("bias", self.bias)):
            yield f"{path}.{name}", WeightSlot(own, tuple(own.shape), order=self.order)


class Indexer(Module):
    """Queries, keys and the heads' weights of one layer. `fused`: the parts of a projection of the
    same hidden states that give the keys, unless `wk` does, where quantisation differs; `orders`:
    of their rows."""

    wk: ColumnLinear | None = None

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__()
        index, mla, mapping = config.indexer, config.mla, placement.mapping
        assert index is not None and mla is not None and mla.q_lora_rank is not None
        self.group, self.layer = 1, place_of(layer, config.layer_groups(mapping)[1:])[1]
        self.num_heads, self.head_dim = index.num_heads, index.head_dim
        order = torch.arange(index.head_dim)
        if index.is_interleaved:  # pairs of neighbours become two halves, as in `LatentAttention`
            pairs = order[: mla.rope_dim]
            order = torch.cat((pairs[::2], pairs[1::2], order[mla.rope_dim :]))
        heads = torch.arange(index.num_heads)[:, None] * index.head_dim
        projection = partial(
            ColumnLinear,
            bias=False,
            placement=placement,
            copies=dict.fromkeys(("wq_b", "wk"), mapping.tp_size),
            orders={"wq_b": (heads + order).flatten(), "wk": order},
        )
        self.fused, self.orders = {KEYS: index.head_dim}, {KEYS: order}
        self.wq_b = projection(mla.q_lora_rank, {"wq_b": index.num_heads * index.head_dim})
        path, keeps = f"model.layers.{layer}.self_attn.", config.quantisation.keeps
        if keeps(f"{path}{KEYS}") != keeps(f"{path}kv_a_proj_with_mqa"):
            self.fused, self.wk = {}, projection(config.hidden_size, {"wk": index.head_dim})
        self.k_norm = KeyNorm(index.head_dim, order, placement)
        sizes = config.hidden_size, index.num_heads
        self.weights_proj = Linear(*sizes, bias=False, placement=placement.wide)
        self.scale = (index.head_dim * index.num_heads) ** -0.5

    def forward(
        self,
        hidden: torch.Tensor,
        keys: torch.Tensor,
        q: torch.Tensor,
        norm: RMSNorm,
        rotary: Rotary,
        context: ForwardContext,
    ) -> None:
        """Writes keys and, unless all rows attend to all keys, chooses those of each row. For
        normed states `[T, H]`, fused keys `[T, D]` and the latents of queries `[T, Q]` before their
        norm. Nothing where an earlier step has chosen."""
        backend, plan = context.groups[self.group]
        assert isinstance(backend, IndexBackend)
        if isinstance(plan, IndexPlan) and plan.is_later:
            return
        if chosen_keys(context) is None:
            self.write(hidden, keys, rotary, context)
            return
        queries = self.wq_b.forward(q, norm).view(-1, self.num_heads, self.head_dim)
        weights = self.weights_proj.unrounded(hidden) * self.scale
        keys = keys if self.wk is None else self.wk.forward(hidden)
        own = IndexInputs(keys, self.k_norm.kernel_norm, queries, weights)
        backend.choose(self.layer, own, rotary, plan)

    def write(
        self, hidden: torch.Tensor, keys: torch.Tensor, rotary: Rotary, context: ForwardContext
    ) -> None:
        """The part of `forward` that writes keys."""
        backend, plan = context.groups[self.group]
        keys = keys if self.wk is None else self.wk.forward(hidden)
        backend.write(self.layer, keys, self.k_norm.kernel_norm, rotary, plan)
