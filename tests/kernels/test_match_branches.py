"""A match as one more branch of a draft tree: small examples, random trees against a slow reference
in plain Python, and the kernel against the reference."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device, only_outside_the_interpreter
from tests.kernels.tree_growth import grow_tree, random_draft
from tllm_spec.executor.speculative.drafting.suffix_match import new_sources
from tllm_spec.kernels.drafts.draft_sources import MATCH, NETWORK, PRIOR, DraftSources
from tllm_spec.kernels.drafts.match_branches import add_match
from tllm_spec.kernels.slots.accept import DraftTree

Path = tuple[int, ...]
TABLES = ("tokens", "parents", "depths", "bits")
MAX_DRAFT_LEN = 6


def paths_of(tree: DraftTree, row: int) -> list[Path]:
    """The path to each node after the root. Checks that the tree's tables agree."""
    tokens, parents, depths, bits = (getattr(tree, name)[row].tolist() for name in TABLES)
    paths, seen = [()], [1]
    for node, (token, parent) in enumerate(zip(tokens, parents[1:], strict=True), 1):
        assert parent < node
        paths.append((*paths[parent], token))
        seen.append(seen[parent] | 1 << node)
    assert parents[0] == -1 and depths == sorted(depths) == list(map(len, paths))
    assert [value % 2**64 for value in bits] == seen
    assert len(set(paths)) == len(paths)
    return paths[1:]


def worked_example(path: Path) -> list[tuple[float, int]]:
    return {
        (): [(0.6, 10), (0.3, 11)],
        (10,): [(0.5, 20), (0.35, 21)],
        (11,): [(0.9, 22), (0.05, 23)],
        (10, 20): [(0.8, 30), (0.1, 31)],
        (11, 22): [(0.7, 32), (0.2, 33)],
    }[path]


def example_with(match: list[int], length: int, threshold: int | None) -> tuple[DraftTree, Any]:
    """Paths of 0.6, 0.3, 0.3 (10 20), 0.27 (11 22), 0.24 (10 20 30), and the match's."""
    sources = new_sources(3, MAX_DRAFT_LEN, threshold, torch.device("cpu"))
    tree = grow_tree([worked_example], 2, 3, 5)
    parts = torch.tensor([match]), torch.tensor([3]), torch.tensor([length])
    return add_match(sources, torch.tensor([1]), tree, *parts, threshold is None), sources


def test_a_match_of_the_threshold_takes_the_place_of_the_least_likely_drafts() -> None:
    tree, sources = example_with([7, 8, 9], 4, threshold=4)
    assert paths_of(tree, 0) == [(10,), (11,), (7,), (7, 8), (7, 8, 9)]
    assert sources.choices[1].tolist() == [4, MATCH]
    assert sources.pending[1, NETWORK].tolist() == [10, 20, 30, -1, -1, -1]
    assert sources.pending[1, MATCH].tolist() == [7, 8, 9, -1, -1, -1]


def test_a_shorter_match_leaves_the_tree_whole() -> None:
    tree, sources = example_with([7, 8, 9], 3, threshold=4)
    assert paths_of(tree, 0) == [(10,), (11,), (10, 20), (11, 22), (10, 20, 30)]
    assert sources.choices[1].tolist() == [3, NETWORK]
    assert sources.pending[1, MATCH].tolist() == [7, 8, 9, -1, -1, -1]


def test_drafts_of_both_are_one_node() -> None:
    tree, sources = example_with([11, 22, 5], 4, threshold=4)
    assert paths_of(tree, 0) == [(10,), (11,), (10, 20), (11, 22), (11, 22, 5)]
    tree, sources = example_with([10, 20, 30], 4, threshold=4)
    assert paths_of(tree, 0) == [(10,), (11,), (10, 20), (11, 22), (10, 20, 30)]
    assert sources.choices[1].tolist() == [4, NETWORK]


def test_without_a_threshold_a_match_has_as_many_nodes_as_it_is_worth() -> None:
    """After a match of two tokens half of the drafts are taken to be right: 0.5, 0.25, 0.125."""
    tree, _ = example_with([7, 8, 9], 2, threshold=None)
    assert paths_of(tree, 0) == [(10,), (11,), (7,), (10, 20), (11, 22)]


def random_sources(seed: int, threshold: int | None, num_slots: int) -> DraftSources:
    generator = torch.Generator().manual_seed(seed)
    sources = new_sources(num_slots, MAX_DRAFT_LEN, threshold, torch.device("cpu"))
    tried = torch.randint(0, 60, sources.counts.shape[:3], generator=generator)
    share = torch.rand(tried.shape, generator=generator) ** 0.3
    sources.counts.copy_(torch.stack((tried, (tried * share).to(torch.int64)), dim=-1))
    return sources


def random_case(
    seed: int, size: tuple[int, int, int], *, tied: bool, threshold: int | None
) -> tuple[DraftSources, DraftTree, list[torch.Tensor]]:
    """Every second match begins with a path of its tree."""
    topk, steps, num_nodes = size
    nan_depth = 2 if seed % 3 == 2 else None
    drafts = [random_draft(seed * 7 + n, topk, tied=tied, nan_depth=nan_depth) for n in range(4)]
    tree = grow_tree(drafts, topk, steps, num_nodes)
    generator = torch.Generator().manual_seed(seed)
    match = torch.randint(1000, 1004, (4, steps), generator=generator)
    for row in range(seed % 2, 4, 2):
        path = paths_of(tree, row)[-1 - seed % num_nodes]
        shared = 1 + int(torch.randint(0, len(path), (1,), generator=generator))
        match[row, :shared] = torch.tensor(path[:shared])
    lengths = torch.randint(0, 8, (4,), generator=generator)
    lens = torch.randint(0, steps + 1, (4,), generator=generator) * (lengths > 0)
    slots = torch.randperm(5, generator=generator)[:4]
    return random_sources(seed, threshold, 6), tree, [slots, match, lens, lengths]


def slow_nodes(
    tree: DraftTree, row: int, match: list[int], chances: list[np.float32]
) -> list[Path]:
    assert tree.scores is not None
    paths = paths_of(tree, row)
    scores = dict(zip(paths, tree.scores[row].nan_to_num(nan=-1.0).tolist(), strict=True))
    for end, chance in enumerate(chances, 1):
        path = tuple(match[:end])
        scores[path] = max(scores.get(path, -1.0), float(chance))
    best = sorted(scores, key=scores.__getitem__, reverse=True)[: len(paths)]
    order = {path: number for number, path in enumerate(scores)}
    return sorted(best, key=lambda path: (len(path), order[path]))


SIZES = [(1, 1, 1), (1, 4, 4), (2, 3, 5), (4, 4, 16), (8, 6, 31), (8, 6, 63)]


@pytest.mark.covering
@only_outside_the_interpreter
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [None, 3])
def test_the_likeliest_of_both_are_the_tree(
    size: tuple[int, int, int], threshold: int | None
) -> None:
    for seed in range(6):
        sources, tree, (slots, match, lens, lengths) = random_case(
            seed, size, tied=seed % 2 == 1, threshold=threshold
        )
        own = slots, tree, match, lens, lengths
        found = add_match(sources, *own, threshold is None)
        for row, length in enumerate(lengths.tolist()):
            taken = int(lens[row])
            if threshold is None:
                counts = sources.counts[min(length, 16), MATCH, :taken].to(torch.float32)
                rates = (counts[:, 1] + sources.priors[min(length, 16), MATCH]) / (
                    counts[:, 0] + PRIOR
                )
                chances = list(rates.cumprod(0).numpy())
            else:
                chances = [np.float32(2)] * (taken if length >= threshold else 0)
            expected = slow_nodes(tree, row, match[row].tolist(), chances)
            assert paths_of(found, row) == expected
            is_branch = bool(set(expected) - set(paths_of(tree, row)))
            assert sources.choices[slots[row], 1] == is_branch


def moved(tables: Any, device: str) -> Any:
    """A dataclass of tensors on another device."""
    found = {field.name: getattr(tables, field.name) for field in fields(tables)}
    own = {name: each.to(device) for name, each in found.items() if each is not None}
    return replace(tables, **own)


@on_each_kernel_device
@pytest.mark.parametrize("size", [(2, 3, 5), (4, 4, 16), (8, 6, 63)])
@pytest.mark.parametrize("threshold", [None, 3])
def test_the_kernel_makes_the_references_trees(
    device: str, size: tuple[int, int, int], threshold: int | None
) -> None:
    for seed in range(3):
        results = []
        for run, place in ((add_match, device), (add_match.reference, "cpu")):
            case = random_case(seed, size, tied=seed == 1, threshold=threshold)
            sources, tree = (moved(each, place) for each in case[:2])
            slots, *match = (each.to(place) for each in case[2])
            found = run(sources, slots, tree, *match, threshold is None)
            tables = [getattr(found, name) for name in TABLES]
            results.append([each.cpu() for each in (*tables, sources.pending, sources.choices)])
        assert all(map(torch.equal, *results))
