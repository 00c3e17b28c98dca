"""Copies of recurrent states: which ones there are, and that requests go on from them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.harness import Harness
from tests.models.helpers import random_tokens
from tests.models.qwen3_next import save_qwen3_next
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.resources.interface import Snapshots
from tllm_spec.executor.resources.radix import Node
from tllm_spec.llm import LLM

PROMPT = random_tokens(43, seed=1)
SMALL = {"tokens_per_block": 4, "state_snapshot_tokens": 8}


def node(*key: int) -> Node:
    return Node(key, (1,), None)


def test_the_least_recently_used_copy_gives_way() -> None:
    snapshots, nodes = Snapshots(2, 8), [node(number) for number in range(3)]
    assert {snapshots.take(each) for each in nodes[:2]} == {0, 1}
    assert snapshots.take(nodes[0]) is None, "it has one already"
    first = snapshots.use(nodes[1])
    snapshots.use(nodes[0])
    assert snapshots.take(nodes[2]) == first
    assert nodes[0] in snapshots and nodes[1] not in snapshots
    snapshots.check_integrity(nodes)


def test_a_copy_of_a_prefix_that_left_the_tree_is_free() -> None:
    snapshots, nodes = Snapshots(2, 8), [node(number) for number in range(2)]
    for each in nodes:
        snapshots.take(each)
    snapshots.drop(nodes[1])
    snapshots.check_integrity(nodes[:1])
    with pytest.raises(AssertionError, match="of a prefix that is not cached"):
        snapshots.check_integrity([])
    snapshots._free.clear()
    with pytest.raises(AssertionError, match="0 free \\+ 1 used snapshots are not 2"):
        snapshots.check_integrity(nodes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_next")
    save_qwen3_next(path)
    return path


def states_after(harness: Harness, request: LlmRequest) -> tuple[torch.Tensor, list[int]]:
    """The states of the only slot when the request has ended, and the request's tokens."""
    harness.run()
    memory = harness.parts.runner.engine.attention.memory
    assert memory is not None and int(memory.lens[0]) == request.num_tokens - 2
    return memory.states[:, 0].clone(), request.tokens


@pytest.mark.parametrize("disturbed", ["hit", "preemption", "chunks"])
def test_a_disturbed_request_has_the_states_of_plain_decoding(disturbed: str, folder: Path) -> None:
    """Up to the order of a GEMM's sums, whose rows are others."""
    options: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": 64}
    options["disable_overlap_scheduler"] = True
    off = {"kv_cache_config": {"enable_block_reuse": False}}
    plain = Harness(folder, **options | off)
    expected, tokens = states_after(plain, plain.submit(PROMPT, 9))
    chunks = {"max_num_tokens": 10, "enable_chunked_prefill": True}
    more: dict[str, Any] = off | chunks if disturbed == "chunks" else {"kv_cache_config": SMALL}
    harness = Harness(folder, **options | more)
    if disturbed == "hit":
        harness.submit(PROMPT, 2)
        harness.run()
    request = harness.submit(PROMPT, 9)
    if disturbed == "preemption":
        while request.num_output_tokens < 5:
            harness.round()
        harness.parts.scheduler.preempt(request)
    found, own_tokens = states_after(harness, request)
    assert own_tokens == tokens
    assert request.cached_tokens == (40 if disturbed == "hit" else 0)
    difference = (found - expected).abs().max().item()
    print(f"{disturbed}: the states differ by {difference:.1e} at most")
    assert difference < 1e-5 < 0.1 < expected.abs().max()


def test_copies_are_taken_at_whole_pages_only(folder: Path) -> None:
    with pytest.raises(ValueError, match="state_snapshot_tokens = 24 must be a multiple of"):
        LLM(str(folder), kv_cache_config={"tokens_per_block": 16, "state_snapshot_tokens": 24})


def test_a_round_cuts_no_block_of_a_prompt(folder: Path) -> None:
    """There are 8 tokens in a block, at most a quarter of 35 rows. After the last whole block, and
    among generated tokens, there are none."""
    options: dict[str, Any] = {"max_num_tokens": 35, "enable_chunked_prefill": True}
    off = {"enable_block_reuse": False}
    harness = Harness(folder, max_batch_size=1, max_seq_len=64, kv_cache_config=off, **options)
    request, ends = harness.submit(PROMPT, 9), list[int]()
    while request.state is not RequestState.GENERATION:
        harness.round()
        ends.append(request.kv_len)
    assert ends == [32, 43]
    memory = harness.parts.runner.engine.attention.memory
    assert memory is not None
    found = [memory.geometry.num_blocks(first, 52, len(PROMPT)) for first in (0, 32, 40, 43)]
    assert found == [5, 1, 0, 0]
    assert memory.geometry.chunk_end(47, len(PROMPT)) == 47
    without = replace(memory.geometry, block=0)
    assert (without.num_blocks(3, 40, 43), without.chunk_end(21, 43)) == (0, 21)
    assert without.prompt_bytes(64) == 0 < memory.geometry.prompt_bytes(64)
    harness.run()
