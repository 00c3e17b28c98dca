"""The choice between a network's drafts and a match's: small examples, and the kernels against the
references."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device, only_outside_the_interpreter
from tllm_spec.executor.speculative.drafting.suffix_match import new_sources
from tllm_spec.kernels.drafts.draft_sources import (
    MATCH,
    MAX_COUNT,
    NETWORK,
    DraftSources,
    choose_drafts,
    observe_drafts,
)

NUM_SLOTS, MAX_DRAFT_LEN = 6, 4
CPU = torch.device("cpu")


def sources_of(threshold: int | None, device: str | torch.device = CPU) -> DraftSources:
    return new_sources(NUM_SLOTS, MAX_DRAFT_LEN, threshold, torch.device(device))


def choose(sources: DraftSources, drafts: list[tuple[list[int], list[int], int]]) -> Any:
    """Drafts of network and match with the match's length, of slots 0, 1, ..."""
    network, match, lengths = (torch.tensor(list(each)) for each in zip(*drafts, strict=True))
    return choose_drafts(sources, torch.arange(len(drafts)), network, match, lengths).tolist()


def observe(sources: DraftSources, tokens: list[int], width: int, slot: int = 0) -> None:
    emitted = torch.tensor([tokens + [-1] * (width - len(tokens))])
    observe_drafts(sources, torch.tensor([slot]), emitted, torch.tensor([len(tokens)]), True)


def test_a_match_of_the_threshold_is_taken() -> None:
    own, match = [1, 2, 3], [7, 8, 9]
    drafts = [(own, match, length) for length in (0, 2, 3, 40)]
    assert choose(sources_of(3), drafts) == [own, own, match, match]
    assert choose(sources_of(1), drafts) == [own, match, match, match]


def test_drafts_that_were_not_verified_are_compared_with_the_text_too() -> None:
    """The network's drafts are verified: its second one is wrong. Of the match's three are right as
    far as the text is known."""
    sources = sources_of(None)
    assert choose(sources, [([5, 9, 9], [5, 6, 7], 2)]) == [[5, 9, 9]]
    observe(sources, [5, 6], width=4)
    counts = sources.counts[2].tolist()
    assert counts[NETWORK] == [[1, 1], [1, 0], [0, 0], [0, 0]]
    assert counts[MATCH] == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert sources.totals[2].tolist() == [[1, 1], [0, 0]]
    observe(sources, [6], width=4)  # without drafts of its own
    assert sources.counts[2].tolist() == counts and sources.totals[2].tolist() == [[1, 1], [0, 0]]


@only_outside_the_interpreter
def test_the_source_is_learned_for_each_length_of_a_match() -> None:
    sources = sources_of(None)
    for _ in range(30):
        choose(sources, [([1, 2, 3], [7, 8, 9], 3), ([1, 2, 3], [7, 8, 9], 5)])
        observe(sources, [7, 8, 9, 4], width=4, slot=0)
        observe(sources, [1, 2, 3, 4], width=4, slot=1)
    own, match = [1, 2, 3], [7, 8, 9]
    drafts = [(own, match, length) for length in (3, 5, 0, 60)]
    assert choose(sources, drafts) == [match, own, own, match]
    assert sources.totals[3, MATCH, 0] > 20 and sources.totals[5, NETWORK, 0] > 20


@only_outside_the_interpreter
def test_the_better_source_may_depend_on_the_draft_length() -> None:
    """The match is right at first and then always wrong, the network half of the time at once."""
    sources = sources_of(None)
    for number in range(30):
        choose(sources, [([1 if number % 2 else 5, 2, 3], [1, 8, 9], 4)])
        observe(sources, [1, 2, 3, 4], width=4)
    assert choose(sources, [([1], [7], 4)]) == [[7]]
    assert choose(sources, [([1, 2, 3], [7, 8, 9], 4)]) == [[1, 2, 3]]


def test_old_rounds_are_forgotten() -> None:
    sources = sources_of(None)
    sources.counts[4] = MAX_COUNT
    choose(sources, [([1], [2], 4)])
    observe(sources, [2], width=2)
    assert sources.counts[4, :, 0].tolist() == [[2048, 2048], [2048, 2048]]


def run_rounds(device: str, threshold: int | None) -> list[list[torch.Tensor]]:
    """Random rounds, twice: with the kernels and with the references."""
    operations = (
        (choose_drafts, observe_drafts),
        (choose_drafts.reference, observe_drafts.reference),
    )
    results = []
    for choose_by, observe_by in operations:
        generator = torch.Generator().manual_seed(1)
        sources = sources_of(threshold, device)
        sources.counts[3] = MAX_COUNT - 3
        found = []

        def draw(*size: int, below: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randint(0, below, size, generator=generator).to(device)

        for number in range(18):
            slots = torch.randperm(NUM_SLOTS, generator=generator)[: 1 + number % 5].to(device)
            draft_len, batch = 1 + number % MAX_DRAFT_LEN, len(slots)
            lengths = draw(batch, below=8)
            drafts = draw(batch, draft_len, below=3), draw(batch, draft_len, below=3)
            found.append(choose_by(sources, slots, *drafts, lengths))
            width = 1 if number % 7 == 0 else 1 + draft_len - number % 3 // 2
            lens = draw(batch, below=width) + 1
            tokens = draw(batch, width, below=3)
            observe_by(sources, slots, tokens, lens, threshold is None)
        is_dummy = torch.arange(NUM_SLOTS) == NUM_SLOTS - 1
        tables = [getattr(sources, field.name).cpu() for field in fields(sources)]
        tables[:2] = [each[~is_dummy] for each in tables[:2]]
        results.append([*(each.cpu() for each in found), *tables])
    return results


@on_each_kernel_device
@pytest.mark.parametrize("threshold", [None, 3], ids=["learned", "threshold"])
def test_the_kernels_choose_and_count_as_the_references_do(
    device: str, threshold: int | None
) -> None:
    ours, expected = run_rounds(device, threshold)
    assert all(map(torch.equal, ours, expected))
    counts, takes_match, totals = expected[-4], expected[-2], expected[-1]
    assert counts[:3].sum() > 30 and totals[:, :, 0].sum() > 30
    assert takes_match.sum() > 0
