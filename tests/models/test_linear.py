"""Linear layers and embeddings."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.thread_ranks import ThreadGroup
from tests.models.helpers import CPU, VOCAB_SIZE, load, save_checkpoint
from tllm_spec.distributed.communicator import SINGLE_RANK, Communicator
from tllm_spec.models import layers
from tllm_spec.models.draft_head import target_modules
from tllm_spec.models.formats import weight_format as plain
from tllm_spec.models.layers import Embedding, Placement, RMSNorm
from tllm_spec.models.linear import ColumnLinear

PLACEMENT = Placement(torch.float32, CPU, SINGLE_RANK)


@pytest.mark.covering
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 70])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(192, 512), (512, 192), (16, 24), (512, 1024), (1024, 512)]
)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_specialized_linear_equals_the_plain_gemm(
    rows: int, in_features: int, out_features: int, bias: bool
) -> None:
    layer = ColumnLinear(in_features, {"part": out_features}, bias=bias, placement=PLACEMENT)
    for parameter in layer.parameters():
        parameter.normal_()
    layer.specialize_for_cpu()
    is_large = in_features * out_features >= plain.MIN_PACKED_ELEMENTS
    assert (layer.weight_format.packed is not None) == (
        is_large and platform.machine() in ("x86_64", "AMD64")
    )
    strided = torch.randn(rows, 2 * in_features)[:, :in_features]
    expected = F.linear(strided, layer.weight, layer.bias)
    torch.testing.assert_close(layer.forward(strided), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("in_features", "out_features", "column_major"),
    [(192, 512, True), (512, 192, True), (512, 1024, True), (1024, 512, False)],
)
def test_wide_and_small_weights_are_column_major(
    in_features: int, out_features: int, column_major: bool
) -> None:
    layer = ColumnLinear(in_features, {"part": out_features}, bias=False, placement=PLACEMENT)
    assert layer.weight_format.matrix.is_contiguous() == column_major


@torch.inference_mode()
def test_a_shared_weight_is_used_for_any_number_of_rows() -> None:
    shared = torch.nn.Parameter(torch.randn(2048, 64), requires_grad=False)
    layer = ColumnLinear(64, {"lm_head": 2048}, bias=False, placement=PLACEMENT, weight=shared)
    for specialize in (lambda: None, layer.specialize_for_cpu):
        specialize()
        for rows in (1, 3):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(layer.forward(x), x @ shared.t(), rtol=1e-4, atol=1e-4)
    assert layer.weight_format.matrix.is_contiguous() and shared.is_contiguous(), (
        "column-major for the GEMM, row-major for the embedding"
    )


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3])
@torch.inference_mode()
def test_a_specialized_norm_equals_torchs_for_small_and_large_inputs(scale: float) -> None:
    norm = RMSNorm(96, 1e-6, PLACEMENT)
    norm.weight.normal_()
    x = torch.randn(4, 96) * scale
    expected = F.rms_norm(x, (96,), norm.weight, 1e-6)
    norm.specialize_for_cpu()
    torch.testing.assert_close(norm.forward(x), expected, rtol=1e-5, atol=1e-7)


def test_only_a_float32_model_on_a_cpu_is_specialized(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Llama")
    fast, plain = load(tmp_path), load(tmp_path, dtype=torch.bfloat16)
    norms = [[m for m in model.modules() if isinstance(m, RMSNorm)] for model in (fast, plain)]
    assert all(norm.scaled_weight is not None for norm in norms[0])
    assert all(norm.scaled_weight is None for norm in norms[1])


@pytest.mark.parametrize("batch_invariant", [False, True])
@torch.inference_mode()
def test_only_a_batch_invariant_layer_calls_the_batch_invariant_gemm(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    def spy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert weight.is_contiguous()
        called.append(len(x))
        return F.linear(x, weight, bias)

    monkeypatch.setattr(plain, "batch_invariant_linear", spy)
    placement = Placement(torch.float32, CPU, SINGLE_RANK, batch_invariant)
    layer = ColumnLinear(192, {"part": 512}, bias=True, placement=placement)
    for parameter in layer.parameters():
        parameter.normal_()
    layer.specialize_for_cpu()
    for rows in (1, 9):
        x = torch.randn(rows, 192)
        expected = F.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(layer.forward(x), expected, rtol=1e-4, atol=1e-4)
    assert called == ([1, 9] if batch_invariant else [])


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
