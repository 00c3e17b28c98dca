"""The network definitions of draft models and of EAGLE-3 heads give the numbers of torch: in
onnxruntime, through TensorRT's network API, whose layers are interpreted, and operation by
operation."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.draft_network.eager_network import EagerNetwork
from tests.draft_network.head_pairs import HeadSide, head_pair, load_head, load_target, window
from tests.draft_network.step_pairs import NUM_SLOTS, Side, load, network_side, torch_side
from tests.executor.tiny_llama import write_tiny_llama
from tests.models.helpers import save_checkpoint
from tests.models.tiny_eagle3 import FLAGS, write_tiny_eagle3
from tllm_spec.draft_network.network import Network, NetworkModel, OnnxRuntimeNetwork
from tllm_spec.models.eagle3 import Eagle3Head
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


MakeNetwork = Callable[[NetworkModel], Network]


def in_onnxruntime(model: NetworkModel) -> Network:
    return OnnxRuntimeNetwork(model, num_threads=1)


NETWORKS = {"onnx": in_onnxruntime, "torch": EagerNetwork}


@pytest.fixture(params=NETWORKS.values(), ids=NETWORKS)
def make_network(request: pytest.FixtureRequest) -> MakeNetwork:
    made: MakeNetwork = request.param
    return made


@pytest.fixture
def zoo(make_network: MakeNetwork) -> tuple[Side, Side]:
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


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", FAMILY)
def test_every_architecture_of_the_family_has_the_numbers_of_torch(
    name: str, make_network: MakeNetwork, tmp_path: Path
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


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "the target's vocabulary": {"draft_vocab_size": None},
    "qwen3": {"model_type": "qwen3", "speculators": True},
    "two layers": {"num_layers": 2},
    "two layers, norm_output": {"num_layers": 2, "norm_output": True},
    **{flag: {flag: True} for flag in FLAGS},
}


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


@pytest.mark.thinned(4)
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
