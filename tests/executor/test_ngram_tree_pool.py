"""NGramTreePool against a naive reading of its documented semantics."""

import random
from typing import Any

import pytest

from tllm_spec.executor.resources.ngram_pool import NGramPool
from tllm_spec.executor.resources.ngram_tree_pool import MAX_OCCURRENCES, NGramTreePool
from tllm_spec.executor.speculative.drafting.host_tree import HostTree, Room

ROOM = Room(topk=3, max_nodes=12)
OPTIONS: dict[str, Any] = {
    "max_draft_len": 4,
    "max_matching_ngram_size": 3,
    "is_public_pool": False,
    "max_pool_entries": 1000,
}


def paths_of(paths: list[list[int]]) -> set[tuple[int, ...]]:
    """The paths of all nodes of the tree that the given paths become."""
    tree = HostTree.of_paths(paths, ROOM)
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


def naive(tokens: list[int], depth: int) -> set[tuple[int, ...]]:
    """The newest continuations after the longest matches, as paths; every match is looked for."""
    found: list[int] = []
    for size in range(OPTIONS["max_matching_ngram_size"], 0, -1):
        ends = [
            end
            for end in range(size, len(tokens))
            if tokens[end - size : end] == tokens[-size:] and size < len(tokens)
        ]
        found += [end for end in reversed(ends[-MAX_OCCURRENCES:]) if end not in found]
    paths: set[tuple[int, ...]] = set()
    for end in found[:MAX_OCCURRENCES]:
        for length in range(1, len(tokens[end : end + depth]) + 1):
            path = tuple(tokens[end : end + length])
            siblings = [each for each in paths if each[:-1] == path[:-1] and len(each) == length]
            if path in paths:
                continue
            if len(paths) == ROOM.max_nodes or len(siblings) == ROOM.topk:
                break
            paths.add(path)
    return paths


def test_every_tree_has_the_newest_continuations_of_the_longest_matches() -> None:
    rng, num_branches = random.Random(3), 0
    for _ in range(20):
        pool, tokens = NGramTreePool(**OPTIONS), [0]
        vocab_size = rng.choice((1, 2, 4, 9))
        for _ in range(40):
            tokens += rng.choices(range(vocab_size), k=rng.choice((0, 1, 1, 2, 5)))
            depth = rng.randint(1, 4)
            found = pool.propose_paths(0, tokens, depth)
            assert paths_of(found) == naive(tokens, depth), tokens
            num_branches += not HostTree.of_paths(found, ROOM).is_chain
    assert num_branches > 200


@pytest.mark.parametrize("max_pool_entries", [1000, 40])
def test_a_tree_has_the_chain_of_the_newest_continuation(max_pool_entries: int) -> None:
    rng, shared = random.Random(4), {"max_draft_len": 4, "max_matching_ngram_size": 3}
    shared |= {"is_public_pool": False, "max_pool_entries": max_pool_entries}
    trees = NGramTreePool(**shared)
    chains = NGramPool(is_keep_all=True, is_use_oldest=False, **shared)
    tokens, num_chains = [0], 0
    for _ in range(300):
        tokens += rng.choices(range(6), k=rng.choice((1, 2, 5)))
        chain = chains.propose(0, tokens, 4)
        found = paths_of(trees.propose_paths(0, tokens, 4))
        assert not chain or tuple(chain) in found
        num_chains += bool(chain)
        assert trees.num_entries <= max_pool_entries
    assert num_chains > 200


def test_a_public_pool_proposes_continuations_of_several_requests() -> None:
    pool = NGramTreePool(**OPTIONS | {"is_public_pool": True})
    for request_id, token in enumerate((7, 8)):
        pool.propose_paths(request_id, [1, 2, token, 5], 2)
        pool.free(request_id)
    assert paths_of(pool.propose_paths(2, [1, 2], 1)) == {(8,), (7,)}
    private = NGramTreePool(**OPTIONS)
    private.propose_paths(0, [1, 2, 7, 5], 2)
    assert private.propose_paths(1, [1, 2], 2) == []


def test_the_last_occurrences_of_an_ngram_are_proposed() -> None:
    pool = NGramTreePool(**OPTIONS | {"max_matching_ngram_size": 1})
    tokens = [token for number in range(10, 50) for token in (1, number)] + [1]
    for stop in range(1, len(tokens) + 1):
        found = pool.propose_paths(0, tokens[:stop], 1)
    assert found == [[number] for number in range(49, 49 - MAX_OCCURRENCES, -1)]
