"""The options of draft trees, with TensorRT-LLM's names and SGLang's as their aliases."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import PositiveInt, model_validator

from tllm_spec.config_base import ConfigError
from tllm_spec.draft_shape import NO_DRAFTS, DraftShape, DraftShapes
from tllm_spec.option_checks import shown
from tllm_spec.speculative_base import DraftModelDecodingConfig

MAX_TOPK = 16
MAX_NODES = 63  # without the root: a row's ancestors are bits of an int64
MAX_BEAM_KEYS = 64  # of the draft network's forwards of one round, for the same reason

# SGLang's names; its number of draft tokens counts the root.
SGLANG_TOPK, SGLANG_NODES = "speculative_eagle_topk", "speculative_num_draft_tokens"
TREE_NAMES: Mapping[str, str] = {
    **DraftModelDecodingConfig.old_names,
    SGLANG_TOPK: "dynamic_tree_max_topK",
    "speculative_num_steps": "max_draft_len",
    SGLANG_NODES: "max_total_draft_tokens",
}


class DraftTreeDecodingConfig(DraftModelDecodingConfig):
    """The options of the decoding types whose draft weights may draft trees."""

    use_dynamic_tree: bool = False
    """True drafts a tree instead of a chain: the `dynamic_tree_max_topK` best paths grow for
    `max_draft_len` steps, and the `max_total_draft_tokens` likeliest of all their candidates are
    verified (EAGLE-2)."""
    dynamic_tree_max_topK: PositiveInt | None = None
    """Children of a node of a dynamic tree, and paths that grow, at most. SGLang's name is
    `speculative_eagle_topk`."""

    @classmethod
    def _with_new_names(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        renamed, nodes = dict(options), options.get(SGLANG_NODES)
        if type(nodes) is int:
            renamed[SGLANG_NODES] = nodes - 1
        renamed = super()._with_new_names(renamed)
        topk = renamed.get("dynamic_tree_max_topK")
        if SGLANG_TOPK in options and type(topk) is int:
            renamed.setdefault("use_dynamic_tree", topk > 1)
            if topk == 1:  # a chain: SGLang then ignores the number of draft tokens, too
                renamed.pop("dynamic_tree_max_topK")
        return renamed

    @classmethod
    def _default_num_nodes(cls, options: Mapping[str, Any]) -> Any:
        length, topk = super()._default_num_nodes(options), options.get("dynamic_tree_max_topK")
        if not options.get("use_dynamic_tree") or length is None or type(topk) is not int:
            return length
        return length * topk

    @property
    def drafts_trees(self) -> bool:
        return self.use_dynamic_tree and self.dynamic_tree_max_topK != 1

    @model_validator(mode="after")
    def _check_tree(self) -> DraftTreeDecodingConfig:
        if mistakes := self._mistakes():
            raise ConfigError(mistakes)
        return self

    def _mistakes(self) -> list[str]:
        topk, steps, nodes = (
            self.dynamic_tree_max_topK,
            self.max_draft_len,
            self.max_total_draft_tokens or 0,
        )
        if not self.use_dynamic_tree:
            return (
                []
                if topk is None
                else [f"dynamic_tree_max_topK = {topk} needs use_dynamic_tree: true"]
            )
        if topk is None:
            return ["use_dynamic_tree = True needs dynamic_tree_max_topK, the children of a node"]
        if topk == 1:
            return []
        found, named = [], f"max_total_draft_tokens = {nodes}"
        candidates, keys = topk + (steps - 1) * topk**2, (steps - 1) * topk
        if topk > MAX_TOPK:
            found.append(f"dynamic_tree_max_topK = {topk} is more than {MAX_TOPK}")
        if nodes > min(candidates, MAX_NODES):
            found.append(
                f"{named} is more than {min(candidates, MAX_NODES)}: {topk} paths of {steps} steps "
                f"have {topk} + {steps - 1} * {topk}**2 = {candidates} candidates, and a tree has "
                f"{MAX_NODES} drafts at most"
            )
        if nodes < steps:
            found.append(f"{named} is fewer than max_draft_len = {steps}, the depth of the tree")
        if keys > MAX_BEAM_KEYS:
            found.append(
                f"max_draft_len = {steps} with dynamic_tree_max_topK = {topk} is too much: "
                f"({steps} - 1) * {topk} = {keys} drafts are read by the draft network in a round, "
                f"and {MAX_BEAM_KEYS} is the most"
            )
        if self.use_rejection_sampling:
            found.append("use_rejection_sampling = True is not served with a draft tree")
        if self.synthetic_acceptance_rates is not None:
            rates = shown(self.synthetic_acceptance_rates)
            found.append(f"synthetic_acceptance_rates = {rates} is not served with a draft tree")
        return found

    @cached_property
    def shapes(self) -> DraftShapes:
        topk, nodes = self.dynamic_tree_max_topK, self.max_total_draft_tokens
        if not self.drafts_trees or topk is None or nodes is None:
            return DraftShapes.chains(self.max_draft_len)
        trees = [
            DraftShape(steps, min(nodes, topk + (steps - 1) * topk**2), topk)
            for steps in range(1, self.max_draft_len + 1)
        ]
        return DraftShapes([NO_DRAFTS, *trees])
