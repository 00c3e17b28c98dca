"""The two readings of `draft_len_schedule`, a mapping of batch sizes to draft lengths.

The engine's form has lower bounds: the entry of the largest key not above the batch size holds. In
TensorRT-LLM the two-model path reads it so. Its one-model path reads the keys as upper bounds: the
entry of the smallest key not below the batch size holds, and above the largest key there are no
drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCHEDULE, KEYS = "draft_len_schedule", "draft_len_schedule_keys"


def from_upper_bounds(schedule: Mapping[int, int]) -> dict[int, int]:
    """The same schedule with lower bounds: `{4: 4, 8: 2}` becomes `{1: 4, 5: 2, 9: 0}`."""
    keys = sorted(schedule)
    starts = [1, *(key + 1 for key in keys)]
    draft_lens = [*(schedule[key] for key in keys), 0]
    return dict(zip(starts, draft_lens, strict=True))


def with_lower_bounds(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a decoding type, its schedule converted if its keys are upper bounds. What is
    not a schedule stays as it is, to be refused later."""
    schedule = options.get(SCHEDULE)
    if options.get(KEYS) != "upper_bound" or not isinstance(schedule, Mapping) or not schedule:
        return dict(options)
    if not all(type(key) is int and key > 0 for key in schedule):
        return dict(options)
    return {**options, SCHEDULE: from_upper_bounds(schedule), KEYS: "lower_bound"}


def checked(schedule: Mapping[int, int], max_draft_len: int, keys: str | None) -> dict[int, int]:
    """The schedule, sorted. keys: None if the user did not say what the keys are.

    Raises ValueError for what is not a schedule, or has two readings."""
    if not schedule:
        raise ValueError("it has no entry; null means no schedule")
    if min(schedule) < 1 or min(schedule.values()) < 0:
        raise ValueError("batch sizes start at 1 and draft lengths at 0")
    if max(schedule.values()) > max_draft_len:
        raise ValueError(f"a draft length exceeds max_draft_len = {max_draft_len}")
    in_order = dict(sorted(schedule.items()))
    if keys is None and min(schedule) > 1:
        raise ValueError(_both_readings(in_order, max_draft_len))
    return in_order


def _both_readings(schedule: Mapping[int, int], max_draft_len: int) -> str:
    lower, upper = {1: max_draft_len, **schedule}, from_upper_bounds(schedule)
    return (
        "the smallest key is above 1, so it has two readings; "
        f"with {KEYS}: lower_bound it means {_ranges(lower)}; "
        f"with {KEYS}: upper_bound, as TensorRT-LLM's one-model path reads it, {_ranges(upper)}"
    )


def _ranges(lower: Mapping[int, int]) -> str:
    """`{1: 4, 5: 0}` as "4 drafts for 1-4 requests, 0 for 5 and more"."""
    starts = sorted(lower)
    lasts = [after - 1 for after in starts[1:]]
    batch_sizes = [
        str(start) if start == last else f"{start}-{last}"
        for start, last in zip(starts, lasts, strict=False)
    ]
    first, *others = [*batch_sizes, f"{starts[-1]} and more"]
    texts = [f"{lower[start]} for {sizes}" for start, sizes in zip(starts[1:], others, strict=True)]
    return ", ".join([f"{lower[starts[0]]} drafts for {first} requests", *texts])


def draft_len_table(
    draft_len: int | None, schedule: Mapping[int, int] | None, max_concurrency: int | None
) -> dict[int, int]:
    """The longest draft length by batch size: the entry of the largest key not above it holds.
    draft_len: of all rounds that neither option limits; None: an adaptive policy chooses. Of the
    two options only one is set."""
    limits = schedule or ({max_concurrency + 1: 0} if max_concurrency else {})
    return {**({} if draft_len is None else {0: draft_len}), **limits}
