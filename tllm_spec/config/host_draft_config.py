"""The options of NGram and of the user's own drafter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from tllm_spec.config.config_base import check
from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape, DraftShapes
from tllm_spec.config.draft_tree_config import MAX_NODES, TreeDecodingConfig
from tllm_spec.config.option_checks import find_class, make_object
from tllm_spec.config.speculative_base import DecodingBaseConfig
from tllm_spec.config.text_search import SHARED_WIDTH, CorpusConfig, TextSearch


class NGramDecodingConfig(CorpusConfig, TreeDecodingConfig):
    """Drafts looked up in the tokens seen so far (prompt lookup)."""

    decoding_type: Literal["NGram"] = "NGram"
    """Prompt lookup: copies what followed the same tokens before."""
    max_matching_ngram_size: PositiveInt = 2
    """Longest run of last tokens that is looked up; shorter runs are tried after it."""
    is_keep_all: bool = True
    """Remember every continuation of a run, not only the oldest one."""
    is_use_oldest: bool = True
    """Propose the oldest continuation of a run, not the newest. The request's own text comes
    first."""
    is_public_pool: bool = False
    """Also look in texts of other requests with the same `cache_salt`. A public pool proposes one
    user's text to another, who can tell from timing that it was there. True is TensorRT-LLM's
    default."""
    max_pool_entries: PositiveInt = 1_000_000
    """Tokens of finished texts in a public pool, rounded up to 4,096; the oldest ones go first. In
    TensorRT-LLM it grows without a limit."""
    drafts_have_probabilities: ClassVar[bool] = False
    counts_on_device: ClassVar[bool] = True

    @classmethod
    def with_our_names(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        renamed = super().with_our_names(options)
        if renamed.get("use_dynamic_tree") is True:
            renamed.setdefault("is_use_oldest", False)
        return renamed

    @cached_property
    def shapes(self) -> DraftShapes:
        topk, nodes = self.dynamic_tree_max_topK, self.max_total_draft_tokens
        if not self.drafts_trees or topk is None or nodes is None:
            return super().shapes
        depths = range(1, self.max_draft_len + 1)
        trees = [DraftShape(depth, min(nodes, _most_nodes(topk, depth)), topk) for depth in depths]
        return DraftShapes([NO_DRAFTS, *trees])

    def text_search(self, max_batch_size: int) -> TextSearch:
        num_shared = -(-self.max_pool_entries // SHARED_WIDTH) if self.is_public_pool else 0
        oldest = self.is_use_oldest or not self.is_keep_all
        return TextSearch(self.max_matching_ngram_size, oldest, num_shared, self.corpus)

    @check
    def _check_pool(self) -> Iterator[str]:
        if "max_pool_entries" in self.model_fields_set and not self.is_public_pool:
            yield (
                f"max_pool_entries = {self.max_pool_entries} needs is_public_pool: true; a private "
                "pool is the request's own text"
            )

    def _tree_mistakes(self, topk: int, nodes: int) -> Iterator[str]:
        most = min(MAX_NODES, _most_nodes(topk, self.max_draft_len))
        if not self.max_draft_len <= nodes <= most:
            yield (
                f"max_total_draft_tokens = {nodes} is not in {self.max_draft_len}..{most}, what a "
                f"tree of depth {self.max_draft_len} with {topk} children of a node may have"
            )
        for name, needed in (("is_keep_all", True), ("is_use_oldest", False)):
            if (value := getattr(self, name)) is not needed:
                yield (
                    f"{name} = {value} is refused: a tree has the newest continuations; accepted: "
                    f"{needed}"
                )


def _most_nodes(topk: int, depth: int) -> int:
    """Nodes that a tree has at most, without the root."""
    return sum(topk**level for level in range(1, depth + 1))


class UserProvidedDecodingConfig(DecodingBaseConfig):
    """Drafts from the user's own object, or from a class that is named by its import path."""

    decoding_type: Literal["User_Provided"] = "User_Provided"
    """Your own `Drafter`."""
    drafter: Any
    """A `Drafter` object, or the import path of its class as `package.module:ClassName`."""
    drafter_args: dict[str, Any] | None = None
    """Keyword arguments for a `drafter` named by its import path."""
    resource_manager: Any = None
    """A `ResourceManager` that the drafter is called with, or its import path."""
    resource_manager_args: dict[str, Any] | None = None
    """Keyword arguments for a `resource_manager` named by its import path."""

    runs_users_code: ClassVar[bool] = True
    why_no_overlap: ClassVar[str | None] = (
        "the user's drafter sees every round end before the next one begins"
    )
    drafts_have_probabilities: ClassVar[bool] = False

    @property
    def drafts_trees(self) -> bool:
        return (self.max_total_draft_tokens or 0) > self.max_draft_len

    @cached_property
    def shapes(self) -> DraftShapes:
        nodes, lengths = self.max_total_draft_tokens or 0, range(1, self.max_draft_len + 1)
        if not self.drafts_trees:
            return super().shapes
        trees = [DraftShape(depth, nodes, nodes) for depth in lengths]
        return DraftShapes([NO_DRAFTS, *trees], narrows=True)

    @check
    def _check_tree(self) -> Iterator[str]:
        if self.drafts_trees and (self.max_total_draft_tokens or 0) > MAX_NODES:
            yield f"max_total_draft_tokens = {self.max_total_draft_tokens} is more than {MAX_NODES}"

    @check
    def _check_objects(self) -> Iterator[str]:
        if self.drafter is None:
            yield 'drafter = None: an object or "package.module:ClassName" is needed'
        for name in ("drafter", "resource_manager"):
            given, arguments = getattr(self, name), getattr(self, f"{name}_args")
            if isinstance(given, str) and not all(given.partition(":")):
                yield f'{name} = {given!r} is not an import path; write "package.module:ClassName"'
            if arguments and not isinstance(given, str):
                yield f"{name}_args = {arguments} needs {name} to be an import path"

    def check_code(self) -> None:
        for name in ("drafter", "resource_manager"):
            if isinstance(given := getattr(self, name), str):
                find_class(name, given, getattr(self, f"{name}_args"))

    def make_drafter(self) -> Any:
        """The drafter object. Raises ValueError when its import path or arguments are wrong."""
        return make_object("drafter", self.drafter, self.drafter_args)

    def make_resource_manager(self) -> Any:
        """The resource manager object or None. Raises ValueError as `make_drafter` does."""
        return make_object("resource_manager", self.resource_manager, self.resource_manager_args)
