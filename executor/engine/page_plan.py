"""Which KV pools a model and its drafter need, and how many pages each gets of the memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from tllm_spec.attention.geometry import Geometry, LayerGroup
from tllm_spec.attention.kv_format import KVFormat
from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.kernels.key_spans import KeySpan


@dataclass(frozen=True)
class PoolPlan:
    """The pool of one layer group."""

    geometry: Geometry
    kv_format: KVFormat


@dataclass(frozen=True)
class GroupPlan:
    """Pools whose pages have the same numbers. span: the keys that a query sees, where requests let
    go of the pages before them; None: they keep all."""

    pools: tuple[PoolPlan, ...]
    span: KeySpan | None

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page in all pools."""
        return sum(
            KVPool.page_bytes(pool.geometry, page_size, pool.kv_format) for pool in self.pools
        )


def own_groups(layers: Sequence[LayerGroup], kv_format: KVFormat) -> list[GroupPlan]:
    """The groups of a target: one for each layer group."""
    return [GroupPlan((_pool_plan(own, kv_format),), own.geometry.span) for own in layers]


def draft_group(layers: Sequence[LayerGroup], kv_format: KVFormat) -> GroupPlan:
    """The group of a draft network: all layers have the same pages and keep them, since the network
    may have read much less than the target."""
    return GroupPlan(tuple(_pool_plan(own, kv_format) for own in layers), None)


def _pool_plan(own: LayerGroup, kv_format: KVFormat) -> PoolPlan:
    """kv_format: of all layers of the model."""
    return PoolPlan(own.geometry, kv_format.of_layers(own.layers))


def with_draft(groups: list[GroupPlan], draft: GroupPlan) -> list[GroupPlan]:
    """The target's groups with a draft network on the same pages. Its pools are the last ones of
    the first group that keeps all pages, which is another one at the end if there was none."""
    for number, own in enumerate(groups):
        if own.span is None:
            joined = GroupPlan(own.pools + draft.pools, None)
            return [*groups[:number], joined, *groups[number + 1 :]]
    return [*groups, draft]


def divide(
    budget: int,
    page_bytes: Sequence[int],
    needed: Sequence[int],
    in_context: Sequence[int],
    wanted: int,
) -> list[int]:
    """Pages of each group from `budget` bytes, at most `wanted`: all if they fit, otherwise for as
    many requests of the greatest length as possible. One needs `needed` pages, and, all prompts
    together, `in_context` more."""
    if wanted * sum(page_bytes) <= budget:
        return [wanted] * len(page_bytes)

    def total(pages: Sequence[int]) -> int:
        return sum(size * number for size, number in zip(page_bytes, pages, strict=True))

    rest = budget - total(in_context)
    if rest < total(needed):  # not even one: the pools have the same share of what it needs
        needed = [sum(own) for own in zip(needed, in_context, strict=True)]
        in_context, rest = [0] * len(needed), budget
    shares = [rest * pages // total(needed) for pages in needed]
    return [min(wanted, sum(own)) for own in zip(shares, in_context, strict=True)]
