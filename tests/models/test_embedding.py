"""Two ranks, each with half of the embedding, look up the rows of one rank that has all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.thread_ranks import ThreadGroup
from tests.models.helpers import CPU, VOCAB_SIZE, load, save_checkpoint
from tllm_spec.distributed.communicator import Communicator
from tllm_spec.models import layers
from tllm_spec.models.draft_head import target_modules
from tllm_spec.models.layers import Embedding, Placement

HALF = VOCAB_SIZE // 2
# The first and last token of each half, and repeated ones; the last rank has no token of the first.
IDS = [[0, HALF - 1, HALF, VOCAB_SIZE - 1, 5, 5], [3, 1], []]


def placement_of(rank: Communicator, dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(dtype, CPU, rank.mapping, communicator=rank)


@pytest.mark.parametrize("ids", IDS, ids=len)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_ranks_look_up_the_rows_of_one(dtype: torch.dtype, ids: list[int]) -> None:
    weight = torch.randn(VOCAB_SIZE, 8, dtype=dtype)
    tokens = torch.tensor(ids, dtype=torch.int64)

    def look_up(rank: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = Embedding(VOCAB_SIZE, 8, placement_of(rank, dtype))
        slots = dict(embedding.slots("model.embed_tokens"))
        slots["model.embed_tokens.weight"].load(weight)
        assert embedding.weight.shape == (HALF, 8)
        no_ids, rows = embedding.lookup(tokens)
        assert no_ids is None
        return embedding.forward(tokens), rows

    for found in ThreadGroup().run(look_up):
        assert all(torch.equal(rows, weight[tokens]) for rows in found)


def test_a_single_rank_gathers_rows_without_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Communicator, "all_reduce")
    monkeypatch.delattr(layers, "gather_slice_rows")
    embedding = Embedding(VOCAB_SIZE, 8, placement_of(Communicator()))
    embedding.weight.normal_()
    tokens = torch.tensor([3, 100])
    assert torch.equal(embedding.forward(tokens), embedding.weight[tokens])
    ids, table = embedding.lookup(tokens)
    assert ids is tokens and table is embedding.weight


@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_holds_one_half_that_output_layers_and_heads_share(
    tied: bool, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, "Llama", tie_word_embeddings=tied)
    whole = load(tmp_path).state_dict()["model.embed_tokens.weight"]
    for number in range(2):
        rank = ThreadGroup().rank(number)
        model = load(tmp_path, communicator=rank)
        embedding = model.get_submodule("model.embed_tokens")
        assert isinstance(embedding, Embedding)
        assert torch.equal(embedding.weight, whole.chunk(2)[number])
        assert (model.lm_head.weight is embedding.weight) == tied
        assert len(model.lm_head.weight) == HALF
        tokens, output = target_modules(model, tied_on=placement_of(rank))
        assert tokens is embedding
        assert output.weight is embedding.weight
        shard = output.shard
        assert shard is not None and (shard.first, shard.size) == (HALF * number, HALF)
