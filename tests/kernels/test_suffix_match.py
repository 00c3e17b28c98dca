"""Drafts from an earlier occurrence of the end of a text: small examples, and the kernels against a
slow loop."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tllm_spec.config.text_search import SHARED_WIDTH
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
