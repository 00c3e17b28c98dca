"""The network definition of an EAGLE-3 head gives the numbers of the head in torch: in onnxruntime,
through TensorRT's network API, whose layers are interpreted, and operation by operation."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.draft_network.eager_network import EagerNetwork
from tests.draft_network.head_pairs import HeadSide, head_pair, load_head, load_target, window
from tests.draft_network.test_numbers import assert_close
from tests.executor.tiny_llama import write_tiny_llama
from tests.models.tiny_eagle3 import FLAGS, write_tiny_eagle3
from tllm_spec.draft_network.network import Network, NetworkModel, OnnxRuntimeNetwork
from tllm_spec.models.eagle3 import Eagle3Head
from tllm_spec.zoo.registry import resolve_model

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "the target's vocabulary": {"draft_vocab_size": None},
    "qwen3": {"model_type": "qwen3", "speculators": True},
    "two layers": {"num_layers": 2},
    "two layers, norm_output": {"num_layers": 2, "norm_output": True},
    **{flag: {flag: True} for flag in FLAGS},
}
MakeNetwork = Callable[[NetworkModel], Network]


def in_onnxruntime(model: NetworkModel) -> Network:
    return OnnxRuntimeNetwork(model, num_threads=1)


NETWORKS = {"onnx": in_onnxruntime, "torch": EagerNetwork}


@pytest.fixture(params=NETWORKS.values(), ids=NETWORKS)
def make_network(request: pytest.FixtureRequest) -> MakeNetwork:
    made: MakeNetwork = request.param
    return made


def tiny_head(folder: Path, **options: Any) -> Eagle3Head:
    target = load_target(write_tiny_llama(folder / "target"))
    return load_head(write_tiny_eagle3(folder / "head", num_captured=2, **options), target, 2)


def zoo_head() -> Eagle3Head:
    return load_head(resolve_model("zoo:llama-eagle3"), load_target(resolve_model("zoo:llama")), 3)


def assert_close_states(sides: tuple[HeadSide, HeadSide]) -> None:
    """Within 1e-4 of the largest element: a head's own states grow from step to step."""
    ours, theirs = (side.states() for side in sides)
    scale = theirs.abs().max().clamp_min(1.0)
    assert_close(ours / scale, theirs / scale)


def assert_equal_rounds(sides: tuple[HeadSide, HeadSide], vocab_size: int) -> None:
    """Chunks of prompts, some ended, alone and before windows; windows of which the last rows were
    rejected; drafts after them; rows that rounds without drafts have left."""
    random = Random(1)

    def some(number: int) -> list[int]:
        return [random.randrange(vocab_size) for _ in range(number)]

    def equal(results: list[torch.Tensor], num_rows: int) -> None:
        assert_close(*results)
        assert_close_states(sides)
        assert len(results[0]) == num_rows

    chunks = [(0, 0, some(20)), (2, 0, some(9))]
    for side in sides:
        assert not len(side.read(chunks))
    chunks = [(0, 20, some(17)), (2, 9, some(3)), (1, 0, some(5))]
    equal([side.read(chunks, ended=[0, 2]) for side in sides], 2)
    for step in range(2):
        tokens = torch.tensor(some(2))
        equal([side.step([0, 1], [37 + step, 5 + step], tokens) for side in sides], 2)
    chunks, tokens = [(2, 12, some(4))], torch.tensor([some(4), some(4)])
    windows = window([1, 0], [5, 37], tokens)
    equal([side.read(chunks, windows, ended=[0], new_lens=[3, 1]) for side in sides], 3)
    windows = window([0, 2, 1], [38, 16, 8], torch.tensor([some(4) for _ in range(3)]))
    equal([side.read(windows=windows, new_lens=[2, 4, 3]) for side in sides], 3)
    tokens = torch.tensor(some(3))
    equal([side.step([0, 2, 1], [40, 20, 11], tokens) for side in sides], 3)
    tokens = torch.tensor([some(16) for _ in range(4)])
    for side in sides:  # the last one is the dummy slot; slot 1's window begins before position 0
        side.catch_up([0, 2, 1, 4], [47, 20, 15, 0], [7, 0, 4, 0], tokens)
    for slot, length in enumerate([47, 15, 20]):
        assert_close(*(side.entries(slot, length) for side in sides))
    windows = window([1], [15], torch.tensor([some(2)]))
    equal([side.read(windows=windows, new_lens=[2]) for side in sides], 1)


@pytest.mark.thinned
@pytest.mark.parametrize("name", HEADS)
def test_every_kind_of_head_has_the_numbers_of_torch(
    name: str, make_network: MakeNetwork, tmp_path: Path
) -> None:
    head = tiny_head(tmp_path, **HEADS[name])
    assert_equal_rounds(head_pair(head, make_network(head)), 64)


def test_the_zoos_head_has_the_numbers_of_torch(make_network: MakeNetwork) -> None:
    head = zoo_head()
    assert_equal_rounds(head_pair(head, make_network(head)), 2048)


@pytest.mark.thinned
def test_200_greedy_steps_give_equal_drafts_logits_states_and_kv(make_network: MakeNetwork) -> None:
    """Each step reads the state of the one before."""
    head = zoo_head()
    assert head.draft_to_target is not None
    sides, random = head_pair(head, make_network(head)), Random(2)
    prompt = [random.randrange(2048) for _ in range(30)]
    ours, theirs = (side.read([(0, 0, prompt)], ended=[0]) for side in sides)
    for position in range(len(prompt), len(prompt) + 200):
        tokens, expected = ours.argmax(-1), theirs.argmax(-1)
        assert tokens.equal(expected)
        drafts = head.draft_to_target[tokens]
        ours, theirs = (side.step([0], [position], drafts) for side in sides)
        assert_close(ours, theirs)
        assert_close_states(sides)
    assert_close(*(side.entries(0, len(prompt) + 200) for side in sides))
