"""Sets of characters as ranges of code points."""

from __future__ import annotations

from collections.abc import Iterable

# Sorted, with both ends; the ranges neither overlap nor touch.
Ranges = tuple[tuple[int, int], ...]
# Halves of surrogate pairs are no characters.
ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


def united(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The union of any ranges."""
    made: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if made and low <= made[-1][1] + 1:
            made[-1] = made[-1][0], max(made[-1][1], high)
        else:
            made.append((low, high))
    return tuple(made)


def common(left: Ranges, right: Ranges) -> Ranges:
    """The characters that are in both."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if low <= high:
            found.append((low, high))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def other(ranges: Ranges) -> Ranges:
    """All characters but these."""
    left, start = [], 0
    for low, high in ranges:
        left.append((start, low - 1))
        start = high + 1
    left.append((start, ALL[-1][1]))
    return common(tuple(each for each in left if each[0] <= each[1]), ALL)


def of_text(text: str) -> Ranges:
    """The characters of a text."""
    return united((ord(each), ord(each)) for each in text)
