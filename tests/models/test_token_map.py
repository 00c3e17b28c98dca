"""Token maps: which files are read, what is wrong with the others, and the output layer that has
these rows only."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.executor.tiny_llama import write_tiny_llama
from tests.models.helpers import PagedRunner, load, random_tokens
from tllm_spec.distributed.communicator import SINGLE, Communicator, Mapping
from tllm_spec.models.layers import Placement
from tllm_spec.models.linear import OutputLinear
from tllm_spec.models.token_map import DraftTokens, read_token_map, reduced_output
from tllm_spec.text.vocabulary import SharedTokens

VOCAB_SIZE = 64
IDS = [40, 7, 63, 0, 12]


def write(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    if path.suffix == ".json":
        path.write_text(json.dumps(content))
    elif path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("hot.pt", IDS),
        ("hot.pt", tuple(IDS)),
        ("hot.pt", torch.tensor(IDS)),
        ("hot", torch.tensor(IDS, dtype=torch.int32)),
        ("hot.pt", [torch.tensor(each) for each in IDS]),
        ("hot.json", IDS),
        ("hot.safetensors", {"any_name": torch.tensor(IDS)}),
    ],
)
def test_every_served_file_gives_its_ids_in_its_own_order(
    tmp_path: Path, name: str, content: Any
) -> None:
    ids = read_token_map(write(tmp_path, name, content), VOCAB_SIZE)
    assert ids.tolist() == IDS and ids.dtype == torch.int64


NO_LIST = "must hold one list of token ids, which are integers"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("hot.pt", [1, 64], "has the token id 64; ids are 0 to 63"),
        ("hot.pt", torch.tensor([3, -1]), "has the token id -1; ids are 0 to 63"),
        ("hot.json", [5, 1, 5], "has the token id 5 more than once"),
        ("hot.json", [], "is empty; at least one token id is needed"),
        ("hot.pt", torch.empty(0, dtype=torch.int64), "is empty"),
        ("hot.pt", [1.0, 2.0], NO_LIST),
        ("hot.pt", torch.tensor([1.0]), NO_LIST),
        ("hot.pt", torch.tensor([True, False]), NO_LIST),
        ("hot.pt", torch.tensor([[1, 2]]), NO_LIST),
        ("hot.pt", {"ids": [1, 2]}, NO_LIST),
        ("hot.json", [1, True], NO_LIST),
        ("hot.json", [1, 10**30], NO_LIST),
        ("hot.json", "12", NO_LIST),
        ("hot.json", {"ids": [1]}, NO_LIST),
        ("hot.safetensors", {"a": torch.tensor([1]), "b": torch.tensor([2])}, NO_LIST),
    ],
)
def test_a_file_without_distinct_ids_of_the_vocabulary_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: Any, sentence: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(ValueError) as refusal:
        read_token_map(path, VOCAB_SIZE)
    assert str(refusal.value).startswith(f"{path} ") and sentence in str(refusal.value)


@pytest.mark.parametrize("name", ["hot.pt", "hot.json", "hot.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no map", b"PK\x03\x04", b"\xff\xfe"])
def test_a_file_of_something_else_is_not_readable(
    tmp_path: Path, name: str, content: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a readable token map"):
        read_token_map(path, VOCAB_SIZE)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_damaged_file_is_read_or_refused_in_a_sentence(tmp_path: Path, is_zip: bool) -> None:
    path, random = tmp_path / "hot.pt", Random(0)
    torch.save(torch.tensor(IDS), path, _use_new_zipfile_serialization=is_zip)
    whole, num_refused = path.read_bytes(), 0
    for _ in range(200):
        damaged = bytearray(whole)
        for place in random.choices(range(len(whole)), k=4):
            damaged[place] = random.randrange(256)
        path.write_bytes(damaged)
        try:
            read_token_map(path, VOCAB_SIZE)
        except ValueError:
            num_refused += 1
    assert num_refused > 20


class Harmful:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path: Path) -> None:
    written = tmp_path / "written"
    path = write(tmp_path, "hot.pt", Harmful(written))
    with pytest.raises(ValueError, match="is not a readable token map"):
        read_token_map(path, VOCAB_SIZE)
    assert not written.exists()


@pytest.mark.parametrize("path", [Path("no/such.pt"), Path(".")])
def test_a_path_without_a_file_is_named(path: Path) -> None:
    with pytest.raises(ValueError, match=f"{path} does not exist; .* are not downloaded"):
        read_token_map(path, VOCAB_SIZE)


@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_a_limited_model_has_the_logits_of_these_tokens_and_keeps_its_embedding(
    tmp_path: Path, tied: bool
) -> None:
    folder = write_tiny_llama(tmp_path)
    if tied:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    whole, limited = load(folder), load(folder)
    ids = torch.tensor(IDS)
    limited.keep_tokens(DraftTokens(ids, ids), Placement(limited.dtype, limited.device, Mapping()))
    tokens = [token % VOCAB_SIZE for token in random_tokens(9)]
    logits, expected = (PagedRunner(each).step({0: tokens})[0] for each in (limited, whole))
    torch.testing.assert_close(logits, expected[:, IDS])
    assert limited.num_logits == len(IDS) and whole.num_logits == VOCAB_SIZE


SHARED = SharedTokens({0: 5, 1: 3, 2: 3, 4: 0}, {5: 0, 3: 2, 0: 4}, unknown=7)


def test_tokens_of_another_tokenizer_have_their_rows_and_all_others_are_read_as_unknown() -> None:
    tokens = DraftTokens.of_shared(SHARED, 6, mask_token=9)
    assert tokens.ids.tolist() == [0, 2, 4] and tokens.rows.tolist() == [5, 3, 0]
    assert tokens.read_as is not None and tokens.read_as.tolist() == [5, 3, 3, 7, 0, 7, 9]
    assert tokens.divisible(2).ids.tolist() == [0, 2] and tokens.divisible(2).read_as is not None


def test_a_map_keeps_its_order_and_loses_what_the_other_tokenizer_lacks() -> None:
    tokens = DraftTokens.of_shared(SHARED, 6, torch.tensor([4, 3, 1, 0]))
    assert tokens.ids.tolist() == [4, 0] and tokens.rows.tolist() == [0, 5]
    with pytest.raises(ValueError, match="none of the map's tokens"):
        DraftTokens.of_shared(SHARED, 6, torch.tensor([3, 5]))


class Rank(Communicator):
    """One of two ranks. The sums are kept, and those of both ranks are `sum`."""

    def __init__(self, rank: int) -> None:
        self.mapping = Mapping(rank=rank, world_size=2, tp_size=2)
        self.sum: torch.Tensor | None = None
        self.part = torch.empty(0)

    def all_reduce(self, values: torch.Tensor) -> None:
        self.part = values.clone()
        if self.sum is not None:
            values.copy_(self.sum)


@torch.inference_mode()
def test_two_ranks_have_half_of_the_rows_each() -> None:
    weight = torch.randn(VOCAB_SIZE, 8)
    ids, ranks = torch.tensor([40, 7, 63, 0]), [Rank(0), Rank(1)]
    for _ in ("the parts of the sum", "the sum of both"):
        rows = []
        for number, rank in enumerate(ranks):
            placement = Placement(torch.float32, weight.device, rank.mapping, communicator=rank)
            layer = OutputLinear(8, VOCAB_SIZE, placement=placement)
            layer.weight.copy_(weight.chunk(2)[number])
            rows.append(reduced_output(layer, ids, placement).weight)
        total = ranks[0].part + ranks[1].part
        ranks[0].sum = ranks[1].sum = total
    assert torch.equal(torch.cat(rows), weight[ids])
    placement = Placement(torch.float32, weight.device, ranks[0].mapping, communicator=SINGLE)
    uneven = "speculative_token_map is 3, which tensor_parallel_size 2 does not divide"
    with pytest.raises(ValueError, match=uneven):
        reduced_output(layer, ids[:3], placement)
