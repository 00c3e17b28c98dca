"""Layouts of draft trees from their nodes' parents."""

from collections.abc import Sequence

from tllm_spec.kernels.drafts.draft_layout import DraftLayout


def layout_of(parents: Sequence[int]) -> DraftLayout:
    """parents: each an earlier node, but the root's, which is -1. Siblings are ranked in order."""
    ranks = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    return DraftLayout(tuple(parents), tuple(ranks))
