"""Options of several ranks: what is refused before a rank is started, and what a rank takes from
the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.decoding_options import FixedDrafter
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.distributed.communicator import Collectives, Communicator
from tllm_spec.distributed.peer_sums import SIZES, ChosenSums, PeerSum, choose_sums
from tllm_spec.executor.build import build_executor
from tllm_spec.executor.engine.memory_plan import DUMMY_PAGES
from tllm_spec.intake import Intake
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import load_tokenizer

FEW_PAGES, MANY_BYTES = 5, 1 << 20
USERS = {"decoding_type": "User_Provided", "max_draft_len": 2, "drafter": FixedDrafter()}


class Poor(Communicator):
    """Another rank has room for fewer pages, in as many free bytes."""

    def minimum(self, number: int) -> int:
        assert number > FEW_PAGES
        return FEW_PAGES if number < MANY_BYTES else number


def test_all_ranks_have_as_many_pages_as_the_one_with_the_fewest() -> None:
    args = LlmArgs.from_kwargs("zoo:llama", device="cpu")
    built = build_executor(args, None, lambda responses: None, Poor())
    assert built.executor.state()["kv_cache"]["num_pages"] == FEW_PAGES - DUMMY_PAGES


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "cuda:1"}, "device = 'cuda:1' is one device and tensor_parallel_size = 4"),
        (
            {"moe_expert_parallel_size": 2, "moe_tensor_parallel_size": 4},
            "moe_expert_parallel_size = 2 times moe_tensor_parallel_size = 4 must be "
            "tensor_parallel_size = 4",
        ),
        ({"moe_expert_parallel_size": 3}, "must be tensor_parallel_size = 4"),
        ({"speculative_config": USERS}, "is not served with User_Provided"),
    ],
)
def test_options_that_ranks_cannot_share_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LlmArgs.from_kwargs("zoo:llama", tensor_parallel_size=4, **options)


def test_a_tokenizer_object_is_refused() -> None:
    with pytest.raises(ValueError, match="the other processes cannot get a tokenizer object"):
        LlmArgs.from_kwargs(
            "zoo:llama", tokenizer=load_tokenizer("zoo:llama"), tensor_parallel_size=2
        )


def test_a_logits_processor_is_refused() -> None:
    args = LlmArgs.from_kwargs("zoo:llama", device="cpu", tensor_parallel_size=2)
    limits = build_executor(args, None, lambda responses: None).limits  # of one rank
    intake = Intake(args, load_tokenizer("zoo:llama"), limits)
    params = SamplingParams(logits_processor=lambda *arguments: None)
    with pytest.raises(ValueError, match=r"function of this process, and tensor_parallel_size = 2"):
        intake.submission("a", params)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, 1),
        ({"moe_expert_parallel_size": 2}, 2),
        ({"moe_tensor_parallel_size": 2}, 2),
        ({"moe_tensor_parallel_size": 1}, 4),
        ({"moe_expert_parallel_size": -1, "moe_tensor_parallel_size": -1}, 1),
    ],
)
def test_either_size_says_into_how_many_parts_the_experts_are_divided(
    options: dict[str, int], parts: int
) -> None:
    assert LlmArgs.from_kwargs("m", tensor_parallel_size=4, **options).ep_size == parts


# The fastest way of summing is chosen for each size by rank 0; stand-ins take the place of
# devices.


NAMES = ["one-shot", "nccl"]


class Recorded(PeerSum):
    """A stand-in for one-shot sums of up to 64 KiB in float32."""

    max_bytes = 1 << 16

    def __init__(self, used: list[str]) -> None:
        self.used = used

    def serves(self, values: torch.Tensor) -> bool:
        return values.dtype == torch.float32 and values.numel() * 4 <= self.max_bytes

    def __call__(self, values: torch.Tensor, add_to: torch.Tensor | None = None) -> None:
        self.used.append("one-shot")
        if add_to is not None:
            add_to.add_(values)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that sums went."""
    found: list[str] = []
    monkeypatch.setattr(Collectives, "all_reduce", lambda self, values: found.append("nccl"))
    return found


def times(limit: int, one_shot: Recorded) -> Callable[[Any, int], float]:
    """One-shot is faster up to `limit` bytes."""
    return lambda way, size: 2.0 if way is not one_shot else (1.0 if size <= limit else 3.0)


def ways_of(sums: ChosenSums, used: list[str], *shapes: int, dtype: torch.dtype) -> list[str]:
    used.clear()
    for size in shapes:
        sums.all_reduce(torch.zeros(size, dtype=dtype))
    return list(used)


def test_small_sums_go_the_way_that_was_faster_and_large_ones_go_to_nccl(used: list[str]) -> None:
    one_shot = Recorded(used)
    sums = choose_sums({"one-shot": one_shot}, times(1 << 14, one_shot), lambda value: value)
    sizes = [1, 1 << 10, 1 << 12, (1 << 12) + 1, 1 << 20]
    expected = ["one-shot"] * 3 + ["nccl"] * 2
    assert ways_of(sums, used, *sizes, dtype=torch.float32) == expected


def test_what_a_way_does_not_serve_goes_to_nccl(used: list[str]) -> None:
    one_shot = Recorded(used)
    sums = choose_sums({"one-shot": one_shot}, times(max(SIZES), one_shot), lambda value: value)
    assert ways_of(sums, used, 1 << 14, (1 << 14) + 4, dtype=torch.float32) == NAMES
    assert ways_of(sums, used, 8, dtype=torch.float16) == ["nccl"]


def test_a_sum_is_added_to_the_total_whichever_way_it_goes(used: list[str]) -> None:
    """The recorded sums are those of one rank."""
    one_shot = Recorded(used)
    sums = choose_sums({"one-shot": one_shot}, times(1 << 14, one_shot), lambda value: value)
    used.clear()
    for size in (1 << 10, 1 << 14):
        total = torch.full((size,), 2.0)
        sums.all_reduce_into(total, torch.ones(size))
        assert (total == 3).all()
    assert used == NAMES


def test_rank_0_decides_for_ranks_that_measured_otherwise(used: list[str]) -> None:
    one_shot = Recorded(used)
    said: list[list[str]] = []

    def first(value: list[str]) -> list[str]:
        said.append(value)
        return value

    choose_sums({"one-shot": one_shot}, times(1 << 14, one_shot), first)
    slow_here = choose_sums({"one-shot": one_shot}, times(0, one_shot), lambda value: said[0])
    assert ways_of(slow_here, used, 1 << 10, 1 << 14, dtype=torch.float32) == NAMES
    assert said[0].count("one-shot") == 3


def test_every_rank_measures_all_ways_that_can_serve_a_size_in_the_same_order(
    used: list[str],
) -> None:
    one_shot, measured = Recorded(used), list[tuple[bool, int]]()

    def seconds(way: object, size: int) -> float:
        measured.append((way is one_shot, size))
        return 2.0 - (way is one_shot)

    sums = choose_sums({"one-shot": one_shot}, seconds, lambda value: value)
    sizes = [(is_other, size) for size in SIZES for is_other in (False, True)]
    assert measured == [each for each in sizes if not each[0] or each[1] <= one_shot.max_bytes]
    assert ways_of(sums, used, 1 << 14, 1 << 15, dtype=torch.float32) == NAMES
