"""The options of draft trees, with TensorRT-LLM's names and SGLang's as their aliases, and those of
NGram and of the user's own drafter."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from tllm_spec.config.config_base import check
from tllm_spec.config.draft_shape import DraftShape, DraftShapes, chain_of
from tllm_spec.config.neighbours import NUM_CHILDREN
from tllm_spec.config.option_checks import find_class, make_object
from tllm_spec.config.speculative_base import DecodingBaseConfig
from tllm_spec.config.text_search import (
    MAX_MATCH,
    SHARED_WIDTH,
    CorpusConfig,
    GlobalPoolConfig,
    TextSearch,
)

# The option by which drafts of a network and drafts that continue an earlier occurrence of the
# text's end are combined.


class SAEnhancerConfig(GlobalPoolConfig):
    """How drafts of a network and drafts that continue an earlier occurrence of the text's end are
    combined. With chains each request has those of one source in a round; a tree has the likeliest
    of both."""

    threshold: Annotated[int, Field(ge=1, le=MAX_MATCH)] | None = None
    """Tokens of the text's end that must occur earlier for the text's drafts to be taken instead of
    the network's. null: learned as it runs, from how many drafts of both were right after matches
    of each length. TensorRT-LLM's default is 4."""

    def text_search(self, max_batch_size: int) -> TextSearch:
        return TextSearch(MAX_MATCH, num_shared=self.num_shared(max_batch_size), corpus=self.corpus)


MAX_TOPK = 16
MAX_NODES = 63  # without the root: a row's ancestors are bits of an int64
MAX_BEAM_KEYS = 64  # of the draft network's forwards of one round, for the same reason

NODES = "max_total_draft_tokens"
Choices = tuple[tuple[int, ...], ...]


def _choices_of(given: object) -> Choices:
    """Paths in the order of the nodes, by length and then by rank, each once. Raises ValueError for
    anything that is no list of paths; a text is read as a Python literal."""
    try:
        choices: Any = literal_eval(given) if isinstance(given, str) else given
        paths = {tuple(path) for path in choices}
        ranks = [rank for path in paths for rank in path]
        is_list = bool(paths) and all(paths)
    except (SyntaxError, TypeError, ValueError):  # the last: code instead of a literal
        is_list = False
    if not is_list or any(type(rank) is not int or rank < 0 for rank in ranks):
        raise ValueError("a list of paths of ranks from 0 on is needed, e.g. [[0], [1], [0, 0]]")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def _measures(choices: object) -> tuple[Any, Any]:
    """The depth of a static tree and its number of drafts; None where it is no tree."""
    try:
        paths = _choices_of(choices)
    except ValueError:
        return None, None
    return len(paths[-1]), len(paths)


def _shown(tree: DraftShape) -> str:
    return (
        f"{{max_draft_len: {tree.depth}, dynamic_tree_max_topK: {tree.topk}, "
        f"max_total_draft_tokens: {tree.num_nodes}}}"
    )


def default_trees(largest: DraftShape) -> list[DraftShape]:
    """What `candidate_trees` is where it is not given: half of the drafts in one step less, with
    half of the children, and the same once more."""
    trees = [largest]
    for smaller in (1, 2):
        depth, topk = largest.depth - smaller, max(2, largest.topk >> smaller)
        num_nodes = largest.num_nodes >> smaller
        if depth > 0 and depth < num_nodes <= TreeDecodingConfig.most_nodes(topk, depth):
            trees.append(DraftShape(depth, num_nodes, topk))
    return trees


class TreeDecodingConfig(DecodingBaseConfig):
    """The options of the decoding types whose drafts may be dynamic trees."""

    use_dynamic_tree: bool = False
    """True drafts a tree instead of a chain. With draft weights, the `dynamic_tree_max_topK` best
    paths grow for `max_draft_len` steps, and the `max_total_draft_tokens` likeliest of all their
    candidates are verified (EAGLE-2). `NGram` has several continuations of the last tokens, the
    longest matches first and of equals the newest, up to `max_total_draft_tokens` tokens; it needs
    `is_keep_all: true` and `is_use_oldest: false`, which is then the default."""
    dynamic_tree_max_topK: PositiveInt | None = None
    """Children of a node of a dynamic tree, at most; with draft weights also paths that grow.
    SGLang's name is `speculative_eagle_topk`, of which 1 is a chain."""

    @classmethod
    def with_our_names(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        renamed = super().with_our_names(options)
        topk = renamed.get("dynamic_tree_max_topK")
        if NUM_CHILDREN in options and type(topk) is int:
            renamed.setdefault("use_dynamic_tree", topk > 1)
            if topk == 1:
                renamed.pop("dynamic_tree_max_topK")
        return renamed

    @classmethod
    def _default_num_nodes(cls, options: Mapping[str, Any]) -> Any:
        length, topk = super()._default_num_nodes(options), options.get("dynamic_tree_max_topK")
        if options.get("use_dynamic_tree") is not True or length is None or type(topk) is not int:
            return length
        return min(length * topk, MAX_NODES)

    @property
    def drafts_trees(self) -> bool:
        return self.use_dynamic_tree and self.dynamic_tree_max_topK != 1

    @check
    def _check_tree(self) -> Iterator[str]:
        topk = self.dynamic_tree_max_topK
        if not self.use_dynamic_tree:
            if topk is not None:
                yield f"dynamic_tree_max_topK = {topk} needs use_dynamic_tree: true"
        elif topk is None:
            yield "use_dynamic_tree = True needs dynamic_tree_max_topK, the children of a node"
        else:
            if topk > MAX_TOPK:
                yield f"dynamic_tree_max_topK = {topk} is more than {MAX_TOPK}"
            yield from self._tree_mistakes(topk, self.max_total_draft_tokens or 0)

    def _tree_mistakes(self, topk: int, nodes: int) -> Iterator[str]:
        """What is wrong with a dynamic tree of so many children and drafts."""
        return iter(())

    @staticmethod
    def most_nodes(topk: int, depth: int) -> int:
        """Candidates of a dynamic tree, without the root."""
        return topk + (depth - 1) * topk**2

    def tree_of(self, depth: int) -> DraftShape:
        topk, nodes = self.dynamic_tree_max_topK or 1, self.max_total_draft_tokens or depth
        return DraftShape(depth, min(nodes, self.most_nodes(topk, depth)), topk)


class DraftTreeDecodingConfig(TreeDecodingConfig):
    """The options of the decoding types whose draft weights may draft trees, which may be combined
    with drafts of `SA`."""

    sa_config: SAEnhancerConfig | None = None
    """A mapping, also an empty one, combines the drafts with those of `SA`: a request whose text
    repeats itself has drafts that continue the earlier occurrence."""
    eagle_choices: Annotated[Choices, BeforeValidator(_choices_of)] | None = None
    """A static tree: a list of paths, each the ranks of the children that lead from the root to a
    draft, e.g. `[[0], [1], [0, 0]]`. `max_draft_len` is the length of the longest path, and
    `max_total_draft_tokens` their number."""

    @classmethod
    def with_our_names(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        renamed = super().with_our_names(options)
        if renamed.get("use_sa_spec") is True:  # before TensorRT-LLM had sa_config
            del renamed["use_sa_spec"]
            threshold = renamed.pop("sa_spec_threshold", 4)
            renamed.setdefault("sa_config", {"threshold": threshold})
        if renamed.get("eagle_choices") is not None and renamed.get("max_draft_len") is None:
            # Another check refuses what is no tree; its depth must not be refused first.
            renamed["max_draft_len"] = _measures(renamed["eagle_choices"])[0] or 1
        return renamed

    @classmethod
    def _default_num_nodes(cls, options: Mapping[str, Any]) -> Any:
        if options.get("eagle_choices") is not None:
            return _measures(options["eagle_choices"])[1]
        return super()._default_num_nodes(options)

    @property
    def drafts_trees(self) -> bool:
        return super().drafts_trees or self.eagle_choices is not None

    @check
    def _check_matches(self) -> Iterator[str]:
        if self.sa_config is not None and self.use_rejection_sampling:
            yield (
                "sa_config and use_rejection_sampling = True are exclusive: drafts that are copied "
                "from the text have no probabilities to accept against"
            )

    def text_search(self, max_batch_size: int) -> TextSearch | None:
        return None if self.sa_config is None else self.sa_config.text_search(max_batch_size)

    @check
    def _check_tree(self) -> Iterator[str]:
        return self._static_mistakes() if self.eagle_choices else super()._check_tree()

    def _static_mistakes(self) -> Iterator[str]:
        choices = self.eagle_choices
        assert choices is not None
        for name, expected in zip(("max_draft_len", NODES), _measures(choices), strict=True):
            if (value := getattr(self, name)) != expected:
                yield f"{name} = {value} is not {expected}, which eagle_choices has"
        if self.use_dynamic_tree or self.dynamic_tree_max_topK is not None:
            yield "eagle_choices and use_dynamic_tree are exclusive: a tree is one of them"
        if missing := sorted({path[:-1] for path in choices if len(path) > 1} - set(choices)):
            yield f"eagle_choices continues {list(missing[0])}, which is not listed"
        if len(choices) > MAX_NODES:
            yield f"eagle_choices has {len(choices)} paths; a tree has {MAX_NODES} at most"
        if (rank := max(map(max, choices))) >= MAX_TOPK:
            yield f"eagle_choices has the rank {rank}; {MAX_TOPK - 1} is the most"

    def _tree_mistakes(self, topk: int, nodes: int) -> Iterator[str]:
        if topk == 1:
            return
        steps, most = self.max_draft_len, self.most_nodes(topk, self.max_draft_len)
        if nodes > min(most, MAX_NODES):
            yield (
                f"{NODES} = {nodes} is more than {min(most, MAX_NODES)}: {topk} paths of {steps} "
                f"steps have {topk} + {steps - 1} * {topk}**2 = {most} candidates, and a tree has "
                f"{MAX_NODES} drafts at most"
            )
        if nodes < steps:
            yield f"{NODES} = {nodes} is fewer than max_draft_len = {steps}, the depth of the tree"
        room = DraftShape(steps, nodes, topk)
        for tree in self.adaptive.trees if self.adaptive is not None else ():
            named = f"adaptive.candidate_trees has {_shown(tree)}"
            most = self.most_nodes(tree.topk, tree.depth)
            if tree.depth > steps or tree.topk > topk or tree.num_nodes > nodes:
                yield f"{named}, and {_shown(room)} is the most that there is room for"
            elif not tree.depth <= tree.num_nodes <= most:
                yield f"{named}; {NODES} must be in {tree.depth}..{most}"
        if (keys := (steps - 1) * topk) > MAX_BEAM_KEYS:
            yield (
                f"max_draft_len = {steps} with dynamic_tree_max_topK = {topk} is too much: "
                f"({steps} - 1) * {topk} = {keys} drafts are read by the draft network in a round, "
                f"and {MAX_BEAM_KEYS} is the most"
            )

    @property
    def mixes_trees(self) -> bool:
        is_adaptive = self.adaptive is not None and self.adaptive.is_cost_model
        return is_adaptive and super().drafts_trees

    def tree_of(self, depth: int) -> DraftShape:
        if self.eagle_choices is None:
            return super().tree_of(depth)
        paths = tuple(path for path in self.eagle_choices if len(path) <= depth)
        return DraftShape(depth, len(paths), 1 + max(map(max, paths)), paths)

    @cached_property
    def shapes(self) -> DraftShapes:
        """Where the cost model chooses, matches without the network's drafts are one more tier."""
        adaptive = self.adaptive
        if adaptive is None or not adaptive.is_cost_model or self.eagle_choices is not None:
            return super().shapes
        copies = self.sa_config is not None
        if not self.mixes_trees:
            if not copies or self.enable_adaptive_verification:
                return super().shapes
            return DraftShapes.chains(self.max_draft_len, copies=True)
        tree = self.tree_of(self.max_draft_len)
        chains = [*map(chain_of, range(self.max_draft_len + 1))]
        trees = adaptive.trees or default_trees(tree)
        return DraftShapes(chains, trees, tree, copies=copies)


# The options of NGram and of the user's own drafter.


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

    @staticmethod
    def most_nodes(topk: int, depth: int) -> int:
        return sum(topk**level for level in range(1, depth + 1))

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
        most = min(MAX_NODES, self.most_nodes(topk, self.max_draft_len))
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
