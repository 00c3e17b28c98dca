"""Conservation of pages: each is free, private to one sequence, or in the prefix tree."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tllm_spec.executor.resources.pages import CachedSequence, PageGroup
from tllm_spec.executor.resources.radix import NO_PAGE, Node, RadixTree


def check_pages(
    groups: Sequence[PageGroup],
    free_pages: Sequence[Sequence[int]],
    tree: RadixTree,
    sequences: Mapping[int, CachedSequence],
) -> None:
    """free_pages: of each group. Raises AssertionError with a sentence about a page that is lost,
    listed twice or miscounted."""
    tree.check_integrity()
    holders: Counter[Node] = Counter()
    for seq_id, sequence in sequences.items():
        holders.update(sequence.nodes)
        parent = sequence.root
        for node in sequence.nodes:
            assert node.parent is parent, (
                f"sequence {seq_id} holds the node of {node.key} but not its parent"
            )
            parent = node
    cached = list(tree.nodes())
    assert not set(holders) - set(cached), "a sequence holds a node that has left the tree"
    for node in cached:
        assert node.num_holders == holders[node], (
            f"the node of {node.key} counts {node.num_holders} holders and has {holders[node]}"
        )
    for group, own in enumerate(groups):
        private = _check_sequences(group, cached, sequences)
        in_tree = [node.pages[group] for node in cached if node.pages[group] != NO_PAGE]
        free, last = list(free_pages[group]), own.num_pages - 1
        assert sorted(free + private + in_tree) == list(range(1, last + 1)), (
            f"{len(free)} free + {len(in_tree)} cached + {len(private)} private pages are not the "
            f"{last} pages 1..{last}, each once"
        )


def _check_sequences(
    group: int, cached: Sequence[Node], sequences: Mapping[int, CachedSequence]
) -> list[int]:
    """The private pages of the sequences in one group."""
    private: list[int] = []
    users: Counter[Node] = Counter()
    for seq_id, sequence in sequences.items():
        own = sequence.groups[group]
        assert len(own.pages) == sequence.num_pages, f"groups of {seq_id} differ in length"
        assert not any(own.pages[: own.first]), f"{seq_id} has pages that it let go"
        private += sequence.private_pages(group)
        users.update(sequence.nodes[own.first :])
        for index, node in enumerate(sequence.nodes[own.first :], own.first):
            assert own.pages[index] == node.pages[group], (
                f"page {index} of sequence {seq_id} is not the tree's"
            )
    for node in cached:
        assert node.num_users[group] == users[node], (
            f"page {node.pages[group]} counts {node.num_users[group]} references and has "
            f"{users[node]} holders"
        )
    return private
