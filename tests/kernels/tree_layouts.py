"""Draft trees from their nodes' parents."""

from collections.abc import Sequence

from tllm_spec.kernels.drafts.draft_layout import HostTree


def layout_of(parents: Sequence[int]) -> HostTree:
    """parents: each an earlier node, but the root's, which is -1. Siblings are ranked in order."""
    ranks = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    return HostTree.of_parents(ranks[1:], parents[1:])


def chain_layout(num_drafts: int) -> HostTree:
    return layout_of(range(-1, num_drafts))
