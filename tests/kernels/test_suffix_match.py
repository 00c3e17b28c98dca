"""Drafts from an earlier occurrence of the end of a text: small examples, and the kernels against a
slow loop."""

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tllm_spec.kernels.suffix_match import append_tokens, match_suffixes

NUM_SLOTS, MAX_LEN = 5, 40


def longest(text: list[int], max_match: int) -> tuple[int, int]:
    """The length of the longest match, and the position after its last occurrence."""
    found = 0, len(text) - 1
    for end in range(len(text) - 1):
        length = 0
        while length <= end and length < max_match and text[end - length] == text[-1 - length]:
            length += 1
        found = max(found, (length, end + 1)) if length else found
    return found


def drafts_of(text: list[int], draft_len: int, max_match: int) -> tuple[list[int], int]:
    length, first = longest(text, max_match)
    copied = list(text)
    for i in range(draft_len):
        copied.append(copied[first + i])
    return copied[len(text) :], length


def tables_of(texts: list[list[int]], width: int = MAX_LEN) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.full((len(texts), width), 99, dtype=torch.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int32)
    return rows, torch.tensor([len(text) - 1 for text in texts])


@pytest.mark.parametrize(
    ("text", "max_match", "drafts", "length"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3], 64, [5, 9, 1, 2], 4),
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 7, 1, 2, 3], 64, [5, 7, 1, 2], 3),  # the last of two
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 3], 64, [5, 8, 3, 5], 1),
        ([9, 1, 2, 3, 4, 5, 1, 7, 3, 9, 1, 2, 3], 2, [4, 5, 1, 7], 2),  # no longer match counts
        ([7, 8, 7, 8, 7, 8], 64, [7, 8, 7, 8], 4),  # goes on as a copy of the drafts
        ([6, 6, 6], 64, [6, 6, 6, 6], 2),
        ([1, 2, 3], 64, [3, 3, 3, 3], 0),
        ([5], 64, [5, 5, 5, 5], 0),
    ],
)
def test_drafts_follow_the_last_of_the_longest_matches(
    text: list[int], max_match: int, drafts: list[int], length: int
) -> None:
    texts, kv_lens = tables_of([[1, 1, 1], text])
    slots = torch.tensor([1])
    found = match_suffixes(texts, slots, kv_lens, 4, max_match)
    assert [each.tolist() for each in found] == [[drafts], [4 if length else 0], [length]]
    assert drafts_of(text, 4, max_match) == (drafts, length)


def random_texts(seed: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, longest, (NUM_SLOTS,), generator=generator).tolist()
    return [
        torch.randint(0, 2 + seed, (n,), generator=generator).tolist() for n in [*lens, longest]
    ]


@on_each_kernel_device
@pytest.mark.parametrize("max_match", [1, 3, 64])
@pytest.mark.parametrize("draft_len", [1, 4, 7])
def test_the_drafts_are_those_of_a_slow_loop(device: str, max_match: int, draft_len: int) -> None:
    for seed in range(4):
        texts = random_texts(seed, MAX_LEN)
        tables, kv_lens = (each.to(device) for each in tables_of(texts))
        slots = torch.tensor([3, 0, 5, 3])
        arguments = tables, slots.to(device), kv_lens, draft_len, max_match
        found = match_suffixes(*arguments)
        for each, other in zip(found, match_suffixes.reference(*arguments), strict=True):
            assert torch.equal(each, other)
        expected = [drafts_of(texts[slot], draft_len, max_match) for slot in slots.tolist()]
        assert found.drafts.tolist() == [drafts for drafts, _ in expected]
        assert found.num_drafts.tolist() == [draft_len * (length > 0) for _, length in expected]
        assert found.lengths.tolist() == [length for _, length in expected]


@on_each_kernel_device
def test_a_long_text_is_searched_to_its_beginning(device: str) -> None:
    """It has several blocks of the kernel, and the longest match is in the first."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 50, (10_000,), generator=generator)
    text[-6:] = text[20:26] = torch.arange(50, 56)
    texts, kv_lens = text.to(torch.int32).unsqueeze(0).to(device), torch.tensor([9_999])
    slots = torch.tensor([0]).to(device)
    found = match_suffixes(texts, slots, kv_lens.to(device), 3, 64)
    assert [each.tolist() for each in found] == [[text[26:29].tolist()], [3], [6]]


@on_each_kernel_device
def test_emitted_tokens_are_appended_to_the_texts(device: str) -> None:
    texts, _ = tables_of([[1, 2, 3], [4, 5], [6], [7, 8]], 6)
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
