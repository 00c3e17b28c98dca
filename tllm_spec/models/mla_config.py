"""The shape of latent attention (MLA), and of an indexer that chooses its keys."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from tllm_spec.attention.geometry import IndexGeometry, LatentGeometry, LayerGroup
from tllm_spec.config.option_checks import shown
from tllm_spec.models.config_file import required

KINDS = {"F": "full", "S": "shared"}
_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.indexer\.")


@dataclass(frozen=True)
class IndexConfig:
    """An indexer, which chooses the keys that a row attends to (DeepSeek V3.2 and GLM-5)."""

    topk: int
    num_heads: int
    head_dim: int
    is_interleaved: bool
    """Whether its rotated elements, a head's first ones, are pairs of neighbours in the checkpoint
    instead of two halves."""
    shared_layers: frozenset[int] = frozenset()
    """Layers without an indexer: they attend to the keys of the newest layer that has one."""
    is_needed: bool = True
    """Whether texts may have more than `topk` tokens; otherwise its tensors are left out."""
    is_shared_by_steps: bool = False
    """Whether only the first step of an MTP module chooses keys. Later ones attend to them and to
    those of the drafts before."""


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int | None
    """None: queries are projected from the hidden state in one step."""
    kv_lora_rank: int
    nope_dim: int
    """Elements of a head's query and key without position."""
    rope_dim: int
    value_dim: int
    is_interleaved: bool
    """Whether the checkpoint's rotated elements are pairs of neighbours instead of two halves."""
    scale: float
    """The factor of the scores. With YaRN it includes the square of `mscale_all_dim`'s factor."""
    indexer: IndexConfig | None = field(default=None, compare=False)
    """None: rows attend to all keys."""
    norm_eps: float = 1e-6
    """The epsilon of both norms of the low-rank projections, whatever the model's other norms
    have."""

    @property
    def used_indexer(self) -> IndexConfig | None:
        """None: there is none, or none is needed."""
        index = self.indexer
        return None if index is None or not index.is_needed else index

    def within(self, max_positions: int) -> "MLAConfig":
        """The same for so many positions."""
        if self.indexer is None:
            return self
        is_needed = self.indexer.topk < max_positions
        return replace(self, indexer=replace(self.indexer, is_needed=is_needed))

    def leaves_out(self, name: str) -> bool:
        """Whether the checkpoint's tensor `name` is an indexer's that no layer uses."""
        found, index = _NAME.match(name), self.indexer
        if found is None or index is None:
            return False
        return not index.is_needed or int(found[1]) in index.shared_layers

    def layer_groups(self, num_layers: int, num_heads: int) -> tuple[LayerGroup, ...]:
        """All layers, with a rank's `num_heads`, and those with an indexer, of which every rank has
        all heads."""
        layers, index = tuple(range(num_layers)), self.used_indexer
        latent = LatentGeometry(
            num_layers=num_layers,
            num_heads=num_heads,
            latent_dim=self.kv_lora_rank,
            rope_dim=self.rope_dim,
            nope_dim=self.nope_dim,
            value_dim=self.value_dim,
            scale=self.scale,
            topk=None if index is None else index.topk,
        )
        if index is None:
            return (LayerGroup(layers, latent),)
        own = tuple(layer for layer in layers if layer not in index.shared_layers)
        keys = IndexGeometry(len(own), index.num_heads, index.head_dim, index.topk)
        return LayerGroup(layers, latent), LayerGroup(own, keys)


def read_indexer(flat: dict[str, Any]) -> IndexConfig:
    """`flat` has the defaults filled in. Raises ValueError for kinds of layers that are not
    served."""
    number = int(required(flat, "num_hidden_layers"))
    kinds = flat.get("indexer_types") or flat.get("index_topk_pattern")
    if kinds is None:  # GLM-5.2 names a schedule
        every, offset = flat.get("index_topk_freq") or 1, flat.get("index_skip_topk_offset")
        first = (2 if offset is None else offset) - 1
        kinds = ["shared" if max(i - first, 0) % every else "full" for i in range(number)]
    kinds = [KINDS.get(kind, kind) for kind in kinds]
    if len(kinds) != number or set(kinds) - {*KINDS.values()} or kinds[0] != "full":
        raise ValueError(
            f"indexer_types or index_topk_pattern is {shown(kinds)}; accepted is 'full' or "
            f"'shared' for each of {number} layers, and 'full' for the first."
        )
    if flat["q_lora_rank"] is None or flat["index_head_dim"] < flat["qk_rope_head_dim"]:
        raise ValueError(
            f"q_lora_rank is {flat['q_lora_rank']} and index_head_dim is {flat['index_head_dim']}; "
            "an indexer needs the former, and the latter to be at least qk_rope_head_dim, which is "
            f"{flat['qk_rope_head_dim']}."
        )
    return IndexConfig(
        topk=int(flat["index_topk"]),
        num_heads=int(flat["index_n_heads"]),
        head_dim=int(flat["index_head_dim"]),
        is_interleaved=bool(flat.get("indexer_rope_interleave")),
        shared_layers=frozenset(i for i, kind in enumerate(kinds) if kind == "shared"),
        is_shared_by_steps=bool(flat.get("index_share_for_mtp_iteration")),
    )
