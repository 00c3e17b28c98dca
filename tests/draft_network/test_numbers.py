"""The network definition gives the numbers of the draft model in torch: in onnxruntime, through
TensorRT's network API, whose layers are interpreted, and operation by operation."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.draft_network.eager_network import EagerNetwork
from tests.draft_network.step_pairs import NUM_SLOTS, Side, load, network_side, torch_side
from tests.models.helpers import save_checkpoint
from tllm_spec.draft_network.network import Network, OnnxRuntimeNetwork
from tllm_spec.models.llama import CausalLM
from tllm_spec.zoo.registry import resolve_model

TOLERANCE = 1e-4
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, all biases, tied": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral, no groups": ("Mistral", {"num_key_value_heads": 4, "head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def in_onnxruntime(model: CausalLM) -> Network:
    return OnnxRuntimeNetwork(model, num_threads=1)


NETWORKS = {"onnx": in_onnxruntime, "torch": EagerNetwork}


@pytest.fixture(params=NETWORKS.values(), ids=NETWORKS)
def make_network(request: pytest.FixtureRequest) -> Callable[[CausalLM], Network]:
    made: Callable[[CausalLM], Network] = request.param
    return made


@pytest.fixture
def zoo(make_network: Callable[[CausalLM], Network]) -> tuple[Side, Side]:
    model = load(resolve_model("zoo:llama-draft"))
    return torch_side(model), network_side(model, make_network(model))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and ours.isfinite().all()
    assert (ours - theirs).abs().max() < TOLERANCE


def assert_equal_steps(sides: tuple[Side, Side], vocab_size: int) -> None:
    """Chunks of prompts, then windows of several slots, over one cache each."""
    random, lens = Random(1), [37, 5, 64]
    prompts = [[random.randrange(vocab_size) for _ in range(length)] for length in lens]
    for side in sides:
        for slot, prompt in enumerate(prompts):
            side.read(slot, prompt[:20])
            if prompt[20:]:
                side.read(slot, prompt[20:], 20)
    for width in (1, 2, 2):
        tokens = torch.tensor([[random.randrange(vocab_size) for _ in range(width)] for _ in lens])
        assert_close(*(side.step([2, 0, 1], [lens[2], lens[0], lens[1]], tokens) for side in sides))
        lens = [length + width for length in lens]
    for slot, length in enumerate(lens):
        assert_close(*(side.entries(slot, length) for side in sides))


def test_logits_and_kv_of_chunks_and_windows_are_those_of_torch(zoo: tuple[Side, Side]) -> None:
    assert_equal_steps(zoo, 2048)


@pytest.mark.parametrize("name", FAMILY)
def test_every_architecture_of_the_family_has_the_numbers_of_torch(
    name: str, make_network: Callable[[CausalLM], Network], tmp_path: Path
) -> None:
    architecture, config = FAMILY[name]
    save_checkpoint(tmp_path, architecture, max_position_embeddings=512, **config)
    model = load(tmp_path)
    assert_equal_steps((torch_side(model), network_side(model, make_network(model))), 128)


@pytest.mark.thinned
def test_200_greedy_steps_give_equal_tokens_logits_and_kv(zoo: tuple[Side, Side]) -> None:
    prompt = [Random(2).randrange(2048) for _ in range(30)]
    for side in zoo:
        side.read(0, prompt)
    tokens, length = torch.tensor([[5]]), len(prompt)
    for _ in range(200):
        ours, theirs = (side.step([0], [length], tokens) for side in zoo)
        assert_close(ours, theirs)
        tokens, expected = ours.argmax(-1, keepdim=True), theirs.argmax(-1, keepdim=True)
        assert tokens.equal(expected)
        length += 1
    assert_close(*(side.entries(0, length) for side in zoo))


def test_entries_after_the_window_do_not_matter_even_if_they_are_nan(
    zoo: tuple[Side, Side],
) -> None:
    """The caches are NaN wherever nothing was written."""
    for side in zoo:
        side.read(1, [7, 8, 9])
    first = torch.tensor([[3, 4]])
    assert_close(*(side.step([1], [3], first) for side in zoo))
    # The second token was rejected: its entry is stale, and is overwritten.
    for side in zoo:
        side.pool.data[:, :, side.net.rows.table.host_rows[1][0], 4] = torch.nan
    assert_close(*(side.step([1], [4], torch.tensor([[6]])) for side in zoo))
    assert_close(*(side.entries(1, 5) for side in zoo))


def test_padding_with_the_dummy_slot_changes_no_other_logits(zoo: tuple[Side, Side]) -> None:
    """Its block table is all page 0, and it has no tokens."""
    for side in zoo:
        side.read(0, [7, 8, 9])
    tokens, dummy = torch.tensor([[3, 4]]), torch.zeros((2, 2), dtype=torch.int64)
    expected = zoo[0].step([0], [3], tokens)
    logits = zoo[1].step([0, NUM_SLOTS, NUM_SLOTS], [3, 0, 0], torch.cat((tokens, dummy)))
    assert_close(logits[:1], expected)
    assert logits.isfinite().all()


def test_an_id_beyond_the_draft_vocabulary_is_read_as_its_last_id() -> None:
    model = load(resolve_model("zoo:llama-draft"))
    sides = torch_side(model, 3000), network_side(model, in_onnxruntime(model), 3000)
    for side in sides:
        side.read(0, [2999, 4])
    assert_close(*(side.step([0], [2], torch.tensor([[2500]])) for side in sides))
