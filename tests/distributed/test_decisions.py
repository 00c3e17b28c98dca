"""Options of several ranks: what is refused before a rank is started, and what a rank takes from
the others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.decoding_options import FixedDrafter
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.distributed.communicator import Communicator
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
