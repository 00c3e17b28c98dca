"""Accepting and writing drafts in slots: small examples, and the kernels against their references
with every table compared."""

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tllm_spec.kernels.slots.accept import Accepted, Drafts, SlotTables, SyntheticRates
from tllm_spec.kernels.slots.slot_windows import accept_windows, write_drafts

NUM_SLOTS, MAX_DRAFT_LEN = 23, 6
NAMES = ("kv_lens", "window", "num_drafts", "previous_token")


def random_tables(
    seed: int,
    num_slots: int = NUM_SLOTS,
    width: int = 1 + MAX_DRAFT_LEN,
    drafts: int = MAX_DRAFT_LEN,
) -> SlotTables:
    """width: of the widest window that slots may have. drafts: the most in one."""
    generator = torch.Generator().manual_seed(seed)

    def integers(upper: int, *size: int) -> torch.Tensor:
        return torch.randint(0, upper, size, generator=generator)

    return SlotTables(
        integers(5000, num_slots),
        integers(3, num_slots, width),
        integers(drafts + 1, num_slots),
        integers(3, num_slots),
    )


def moved(tables: SlotTables, device: str) -> SlotTables:
    """A copy on the device, without trees."""
    return SlotTables(*(getattr(tables, name).clone().to(device) for name in NAMES))


def assert_equal(found: SlotTables, expected: SlotTables) -> None:
    for name in NAMES:
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


def emitted(accepted: Accepted) -> list[list[int]]:
    """The tokens that count."""
    rows = zip(accepted.tokens.tolist(), accepted.lens.tolist(), strict=True)
    return [tokens[:number] for tokens, number in rows]


def one_slot(window: list[int], num_drafts: int) -> SlotTables:
    return SlotTables(
        torch.tensor([10]), torch.tensor([window]), torch.tensor([num_drafts]), torch.tensor([99])
    )


@pytest.mark.parametrize(
    ("num_drafts", "targets", "num_new", "window", "previous"),
    [
        (3, [1, 2, 3, 4], 4, 4, 3),
        (3, [1, 2, 9, 4], 3, 9, 2),
        (3, [7, 2, 3, 4], 1, 7, 5),  # 5 is the bonus token
        (1, [1, 2, 3, 4], 2, 2, 1),
        (0, [1, 2, 3, 4], 1, 1, 5),
        (3, [-1, 2, 3, 4], 1, 0, 5),  # no valid token: 0, which the embedding has
        (3, [1, 2], 2, 2, 1),  # fewer drafts are verified than the slot has
    ],
)
def test_a_slot_advances_by_the_accepted_tokens(
    num_drafts: int, targets: list[int], num_new: int, window: int, previous: int
) -> None:
    tables = one_slot([5, 1, 2, 3], num_drafts)
    slots = torch.tensor([0])
    found = accept_windows(tables, slots, tables.kv_lens.clone(), torch.tensor([targets]))
    assert emitted(found) == [targets[:num_new]] and found.rows is None
    assert tables.kv_lens.tolist() == [10 + num_new] and tables.num_drafts.tolist() == [0]
    assert tables.window.tolist() == [[window, 1, 2, 3]] and tables.previous_token.tolist() == [
        previous
    ]


def test_drafts_beyond_a_requests_limit_do_not_count() -> None:
    tables = one_slot([5, 0, 0, 0], 0)
    write_drafts(tables, torch.tensor([0]), Drafts(torch.tensor([[7, 8]])), torch.tensor([1]))
    assert tables.window.tolist() == [[5, 7, 8, 0]] and tables.num_drafts.tolist() == [1]
    fewer = Drafts(torch.tensor([[7, 8]]), torch.tensor([0]))  # than the request's limit
    write_drafts(tables, torch.tensor([0]), fewer, torch.tensor([1]))
    assert tables.num_drafts.tolist() == [0]


@on_each_kernel_device
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("synthetic", [False, True])
def test_the_kernel_accepts_and_advances_like_the_reference(
    device: str, width: int, synthetic: bool
) -> None:
    for seed in range(4):
        tables, generator = random_tables(seed), torch.Generator().manual_seed(100 + seed)
        slots = torch.randperm(NUM_SLOTS, generator=generator)[: 5 + 5 * seed]
        targets = torch.randint(-1, 3, (len(slots), width), generator=generator)
        agree = torch.rand(len(slots), width - 1, generator=generator) < 0.7
        targets[:, : width - 1] = torch.where(
            agree, tables.window[slots, 1:width], targets[:, : width - 1]
        )
        seeds = torch.randint(-(2**63), 2**63 - 1, (NUM_SLOTS, 2), generator=generator)
        rates = torch.tensor([0.9, 0.9, 0.6, 1.0, 0.4, 0.5], dtype=torch.float64)[:, None]
        there = moved(tables, device)
        chance = SyntheticRates(rates, seeds[:, 0]) if synthetic else None
        chance_there = (
            SyntheticRates(rates.to(device), seeds.to(device)[:, 0]) if synthetic else None
        )
        kv_lens = tables.kv_lens[slots]
        expected = accept_windows.reference(tables, slots, kv_lens, targets, None, chance)
        found = accept_windows(
            there, slots.to(device), kv_lens.to(device), targets.to(device), None, chance_there
        )
        assert len(set(expected.lens.tolist())) >= min(width, 2)
        assert emitted(found) == emitted(expected) and found.rows is None
        assert_equal(there, tables)


@on_each_kernel_device
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_the_kernel_writes_drafts_like_the_reference(
    device: str, length: int, counted: bool
) -> None:
    tables, generator = random_tables(1), torch.Generator().manual_seed(2)
    there = moved(tables, device)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:9]
    drafts = torch.randint(0, 1000, (length, 9), generator=generator).T  # strided
    limits = torch.randint(0, 7, (NUM_SLOTS,), generator=generator)
    numbers = torch.randint(0, length + 1, (9,), generator=generator) if counted else None
    write_drafts.reference(tables, slots, Drafts(drafts, numbers), limits)
    own = Drafts(drafts.to(device), None if numbers is None else numbers.to(device))
    write_drafts(there, slots.to(device), own, limits.to(device))
    assert_equal(there, tables)


@on_each_kernel_device
def test_duplicate_padding_slots_do_not_change_other_slots(device: str) -> None:
    tables = random_tables(5)
    there = moved(tables, device)
    slots = torch.tensor([3, 22, 22, 22, 8])
    targets = torch.randint(0, 3, (5, 4), generator=torch.Generator().manual_seed(6))
    kv_lens = tables.kv_lens[slots]
    accept_windows.reference(tables, slots, kv_lens, targets)
    accept_windows(there, slots.to(device), kv_lens.to(device), targets.to(device))
    for name in NAMES:
        found, expected = getattr(there, name).cpu(), getattr(tables, name)
        assert torch.equal(found[:22], expected[:22]), name
    assert int(kv_lens[1]) < there.kv_lens[22] <= int(kv_lens[1]) + 4
