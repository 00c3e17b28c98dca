"""Matches of suffixes, and drafts of several sources."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device, only_outside_the_interpreter
from tllm_spec.config.text_search import SHARED_WIDTH
from tllm_spec.executor.speculative.drafting.suffix_match import new_sources
from tllm_spec.kernels.drafts.draft_sources import (
    MATCH,
    MAX_COUNT,
    NETWORK,
    DraftSources,
    choose_drafts,
    observe_drafts,
)
from tllm_spec.kernels.drafts.suffix_match import (
    EVERYONE,
    NO_TOKEN,
    TextTable,
    append_tokens,
    match_suffixes,
)

NUM_SLOTS, MAX_LEN = 5, 40


def drafts_of(text: list[int], draft_len: int, max_match: int) -> tuple[list[int], int]:
    """Those after the last of the longest matches, and its length."""
    drafts, length = paths_of(text, draft_len, max_match)
    return drafts[0], length


def paths_of(
    text: list[int],
    draft_len: int,
    max_match: int,
    number: int = 1,
    oldest: bool = False,
    others: Sequence[tuple[int, list[int]]] = (),
) -> tuple[list[list[int]], int]:
    """What follows the best matches, and the length of the first. others: texts that are shared,
    and which of them come last."""
    found = []
    for is_own, place, other in [(True, 0, text), *((False, *each) for each in others)]:
        for end in range(len(other) - 1):
            most = min(max_match, end + 1, len(text))
            length = next((n for n in range(most) if other[end - n] != text[-1 - n]), most)
            order = -place - end if oldest else place + end
            found.append((length, is_own, order, end + 1, other))
    best = sorted((each for each in found if each[0]), reverse=True, key=lambda each: each[:3])
    paths = []
    for _, is_own, _, first, other in best[:number]:
        copied = list(other)
        for i in range(draft_len * is_own):
            copied.append(copied[first + i])
        paths.append(copied[first : first + draft_len])
    paths += [[]] * (number - len(paths))
    return paths, best[0][0] if best else 0


def table_of(
    texts: list[list[int]],
    width: int = MAX_LEN,
    salts: list[int] | None = None,
    num_shared: int = 0,
) -> TextTable:
    """The last texts are those of shared rows."""
    num_slots = len(texts) - num_shared
    memory = torch.full(
        (num_slots * width + num_shared * SHARED_WIDTH,), NO_TOKEN, dtype=torch.int32
    )
    lens = torch.tensor([len(text) - 1 for text in texts[:num_slots]])
    own = None if salts is None else torch.tensor(salts, dtype=torch.int32)
    table = TextTable(memory, width, lens, own)
    table.texts.fill_(99)
    for row, text in zip([*table.texts, *table.shared], texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int32)
    return table


def on(device: str, table: TextTable) -> TextTable:
    salts = None if table.salts is None else table.salts.to(device)
    lens = table.kv_lens.to(device)
    return replace(table, memory=table.memory.to(device), kv_lens=lens, salts=salts)


def padded(paths: list[list[int]], last: int, length: int) -> list[list[int]]:
    return [path + [last] * (length - len(path)) for path in paths]


@pytest.mark.parametrize(
    ("text", "max_match", "oldest", "drafts", "length"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3], 64, False, [5, 9, 1, 2], 4),
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 7, 1, 2, 3], 64, False, [5, 7, 1, 2], 3),  # the last of two
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 7, 1, 2, 3], 64, True, [4, 9, 1, 2], 3),  # the first
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 3], 64, False, [5, 8, 3, 5], 1),
        ([9, 1, 2, 3, 4, 5, 1, 7, 3, 9, 1, 2, 3], 2, False, [4, 5, 1, 7], 2),  # no longer match
        ([7, 8, 7, 8, 7, 8], 64, False, [7, 8, 7, 8], 4),  # goes on as a copy of the drafts
        ([6, 6, 6], 64, False, [6, 6, 6, 6], 2),
        ([1, 2, 3], 64, False, [3, 3, 3, 3], 0),
        ([5], 64, False, [5, 5, 5, 5], 0),
    ],
)
def test_drafts_follow_the_last_or_first_of_the_longest_matches(
    text: list[int], max_match: int, oldest: bool, drafts: list[int], length: int
) -> None:
    table = table_of([[1, 1, 1], text])
    found = match_suffixes(table, torch.tensor([1]), 4, max_match, 1, oldest)
    assert [each.tolist() for each in found] == [[[drafts]], [[4 if length else 0]], [length]]
    paths, own_length = paths_of(text, 4, max_match, 1, oldest)
    assert (padded(paths, text[-1], 4), own_length) == ([drafts], length)


def random_texts(seed: int, longest: int, number: int = NUM_SLOTS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, longest, (number,), generator=generator).tolist()
    return [
        torch.randint(0, 2 + seed, (n,), generator=generator).tolist() for n in [*lens, longest]
    ]


def check(
    table: TextTable, arguments: tuple[Any, ...], expected: list[tuple[list[list[int]], int]]
) -> None:
    """Against a slow loop's paths and length for each of the slots."""
    found = match_suffixes(table, *arguments)
    for each, other in zip(found, match_suffixes.reference(table, *arguments), strict=True):
        assert torch.equal(each, other)
    slots, draft_len = arguments[:2]
    lasts = table.texts[slots, table.kv_lens[slots]].tolist()
    drafts = [
        padded(paths, last, draft_len) for (paths, _), last in zip(expected, lasts, strict=True)
    ]
    assert found.drafts.tolist() == drafts
    assert found.num_drafts.tolist() == [list(map(len, paths)) for paths, _ in expected]
    assert found.lengths.tolist() == [length for _, length in expected]


@on_each_kernel_device
@pytest.mark.parametrize("max_match", [1, 3, 64])
@pytest.mark.parametrize(
    ("draft_len", "number", "oldest"), [(1, 1, False), (4, 1, True), (3, 5, False), (7, 8, True)]
)
def test_the_drafts_are_those_of_a_slow_loop(
    device: str, max_match: int, draft_len: int, number: int, oldest: bool
) -> None:
    for seed in range(4):
        texts = random_texts(seed, MAX_LEN)
        slots = torch.tensor([3, 0, 5, 3]).to(device)
        how = (draft_len, max_match, number, oldest)
        expected = [paths_of(texts[slot], *how) for slot in slots.tolist()]
        check(on(device, table_of(texts)), (slots, *how), expected)


@on_each_kernel_device
@pytest.mark.parametrize(("number", "oldest"), [(1, False), (1, True), (8, False)])
def test_matches_are_found_in_texts_of_the_same_salt_only(
    device: str, number: int, oldest: bool
) -> None:
    salts, slots = [1, 2, 1, -1, 2, 1, 1, 2, -1], [0, 4, 3, 5]
    for seed in range(4):
        texts = random_texts(seed, MAX_LEN, 8)
        table, expected = table_of(texts, salts=salts, num_shared=3), []
        how = (4, 64, number, oldest)
        for slot in slots:
            others = [
                ((1 + place) * SHARED_WIDTH, other)
                for place, (salt, other) in enumerate(zip(salts, texts, strict=True))
                if place != slot and salt == salts[slot] >= 0
            ]
            expected.append(paths_of(texts[slot], *how, others))
        check(on(device, table), (torch.tensor(slots).to(device), *how), expected)


@on_each_kernel_device
@pytest.mark.parametrize("own_salt", [-1, 3])
def test_everyone_shares_the_rows_of_a_corpus(device: str, own_salt: int) -> None:
    row = [4, 1, 2, 3, 5, NO_TOKEN, 2, 3, 6]
    texts, salts = [[1, 2, 3], [2, 3, 7], [1, 2, 3, 8], row], [own_salt, -1, -1, EVERYONE]
    table = replace(table_of(texts, salts=salts, num_shared=2), has_corpus=True)
    check(on(device, table), (torch.tensor([0]).to(device), 4, 64), [([[5]], 3)])


@on_each_kernel_device
def test_pieces_in_a_shared_row_are_texts_of_their_own(device: str) -> None:
    """The text ends as the second piece begins, over its border to the first."""
    row = [4, 1, 2, NO_TOKEN, 3, 5, NO_TOKEN, 2, 3]
    table = on(device, table_of([[1, 2, 3], row], salts=[0, 0], num_shared=1))
    check(table, (torch.tensor([0]).to(device), 4, 64), [([[5]], 1)])


@on_each_kernel_device
def test_a_long_text_is_searched_to_its_beginning(device: str) -> None:
    """It has several blocks of the kernel, and the longest match is in the first."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 50, (10_000,), generator=generator)
    text[-6:] = text[20:26] = torch.arange(50, 56)
    table = on(device, table_of([text.tolist()], 10_000))
    found = match_suffixes(table, torch.tensor([0]).to(device), 3, 64)
    assert [each.tolist() for each in found] == [[[text[26:29].tolist()]], [[3]], [6]]


@on_each_kernel_device
def test_emitted_tokens_are_appended_to_the_texts(device: str) -> None:
    texts = table_of([[1, 2, 3], [4, 5], [6], [7, 8]], 6).texts
    kv_lens, slots = torch.tensor([4, 1, 1, 6]), torch.tensor([0, 2, 3])
    tokens, lens = torch.tensor([[31, 32, 33], [-1, 62, 63], [81, 82, 83]]), torch.tensor([2, 1, 3])
    tables = texts.to(device)
    append_tokens(tables, *(each.to(device) for each in (slots, kv_lens, tokens, lens)))
    assert tables.tolist() == [
        [1, 2, 3, 31, 32, 99],
        [4, 5, 99, 99, 99, 99],
        [6, 0, 99, 99, 99, 99],
        [7, 8, 99, 99, 81, 82],  # the row ends
    ]


SOURCES_NUM_SLOTS, MAX_DRAFT_LEN = 6, 4
CPU = torch.device("cpu")


def sources_of(threshold: int | None, device: str | torch.device = CPU) -> DraftSources:
    return new_sources(SOURCES_NUM_SLOTS, MAX_DRAFT_LEN, threshold, torch.device(device))


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
            slots = torch.randperm(SOURCES_NUM_SLOTS, generator=generator)[: 1 + number % 5].to(
                device
            )
            draft_len, batch = 1 + number % MAX_DRAFT_LEN, len(slots)
            lengths = draw(batch, below=8)
            drafts = draw(batch, draft_len, below=3), draw(batch, draft_len, below=3)
            found.append(choose_by(sources, slots, *drafts, lengths))
            width = 1 if number % 7 == 0 else 1 + draft_len - number % 3 // 2
            lens = draw(batch, below=width) + 1
            tokens = draw(batch, width, below=3)
            observe_by(sources, slots, tokens, lens, threshold is None)
        is_dummy = torch.arange(SOURCES_NUM_SLOTS) == SOURCES_NUM_SLOTS - 1
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
