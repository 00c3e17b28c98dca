"""Layers of experts with quantised weights: rows have the same bits in every batch, ranks have the
numbers of one device, and what ranks cannot share is refused."""

from dataclasses import replace
from typing import cast

import pytest
import torch

from tests.models.helpers import CPU
from tests.models.test_fp8_activations import Gathering
from tllm_spec.distributed.communicator import SINGLE_RANK, Communicator, Mapping
from tllm_spec.kernels.experts.permute import moe_permute
from tllm_spec.models.formats import stacked_weight
from tllm_spec.models.formats.four_bit_packings import FourBitTensor
from tllm_spec.models.formats.fp8 import Fp8Tensor, QuantisedActivations
from tllm_spec.models.formats.quantisation import ActivationScales, FourBitGroups, Quantisation
from tllm_spec.models.formats.stacked_weight import StackedWeight
from tllm_spec.models.layers import Placement
from tllm_spec.models.moe import Experts, SparseMoE
from tllm_spec.models.moe_config import MoEConfig
from tllm_spec.models.weights import weight_table

CONFIG = MoEConfig(hidden_size=160, num_experts=4, top_k=2, intermediate_size=256)
SINGLE = Placement(torch.float32, CPU, SINGLE_RANK)
PLACEMENTS = {
    "token": replace(SINGLE, quantised=Quantisation(activations=ActivationScales())),
    "block": replace(SINGLE, quantised=Quantisation(activations=ActivationScales("block"))),
    "static": replace(SINGLE, quantised=Quantisation(activations=ActivationScales("tensor"))),
    "weights only": replace(SINGLE, quantised=Quantisation("block")),
    "int4": replace(SINGLE, quantised=Quantisation(four_bit=FourBitGroups(32))),
    "mxfp4": replace(SINGLE, quantised=Quantisation(four_bit=FourBitGroups(32, is_float=True))),
}
on_each_form = pytest.mark.parametrize("form", PLACEMENTS)


def filled(placement: Placement, config: MoEConfig = CONFIG) -> SparseMoE:
    """With the same weights on any rank."""
    layer = SparseMoE(config, placement)
    for index, (name, slot) in enumerate(weight_table(layer).items()):
        generator = torch.Generator().manual_seed(index)

        def rand(*size: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.rand(size, generator=generator)

        if not name.endswith("_proj.weight"):
            slot.load(rand(*slot.shape) - 0.5)
            continue
        rows, inputs = slot.shape
        if placement.quantised.four_bit is None:
            weight = torch.randn(slot.shape, generator=generator).to(torch.float8_e4m3fn)
            scales = (rand(rows, -(-inputs // 128)) + 0.5) * inputs**-0.5
            slot.load(Fp8Tensor(weight, scales, torch.tensor(0.004 + 0.001 * index)))
            continue
        codes = torch.randint(0, 16, (rows, inputs), generator=generator).byte()
        words = torch.full((rows, inputs // 32), 2.0**-5)
        if not placement.quantised.four_bit.is_float:
            words = (
                words.view(torch.int32)
                | torch.randint(0, 16, words.shape, generator=generator).int()
            )
        slot.load(FourBitTensor(codes, words, 32))
    return layer


def tokens(number: int) -> torch.Tensor:
    return torch.randn(number, CONFIG.hidden_size, generator=torch.Generator().manual_seed(3))


def outputs(layer: Experts, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return layer.forward(x, layer.sorted(x, experts))


@on_each_form
@torch.inference_mode()
def test_a_row_has_the_same_codes_and_bits_in_every_batch(form: str) -> None:
    layer, x = filled(PLACEMENTS[form]), tokens(1024)
    is_exact = form in ("token", "block", "static")
    expected = outputs(layer.experts, x, layer.router.route(x)[0]).view(1024, 2, -1)
    for number in (1, 8, 9, 256):
        chosen = layer.router.route(x)[0][:number]
        found = outputs(layer.experts, x[:number], chosen).view(number, 2, -1)
        torch.testing.assert_close(found, expected[:number], rtol=0, atol=0 if is_exact else 1e-4)


def on_rank(placement: Placement, rank: int, size: int, ep_size: int = 1) -> Placement:
    return replace(placement, mapping=Mapping(rank, size, size, ep_size))


@on_each_form
@torch.inference_mode()
def test_slices_of_experts_add_up_to_the_layer(form: str) -> None:
    placement, x = PLACEMENTS[form], tokens(9)
    whole = filled(placement)
    chosen = whole.router.route(x)[0]
    expected = outputs(whole.experts, x, chosen)
    rows = moe_permute(chosen, CONFIG.num_experts, len(x) * CONFIG.top_k)
    inner = whole.experts.gate_up_weights.gated(x, rows)
    magnitudes = torch.stack([half.abs().amax(1) for half in inner.chunk(2, 1)], 1)
    total = torch.zeros_like(expected)
    for rank in range(2):
        gathering = cast(Communicator, Gathering(rank, magnitudes))
        own = replace(on_rank(placement, rank, 2), communicator=gathering)
        total += outputs(filled(own).experts, x, chosen)
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-4)


@on_each_form
@torch.inference_mode()
def test_ranks_with_some_of_the_experts_have_the_outputs_of_one_device(form: str) -> None:
    placement, x = PLACEMENTS[form], tokens(9)
    whole = filled(placement)
    chosen = whole.router.route(x)[0]
    expected = outputs(whole.experts, x, chosen)
    for rank in range(2):
        part = filled(on_rank(placement, rank, 2, ep_size=2)).experts
        own = part.own(chosen)
        assert own is not None
        mine = (chosen // own.number == rank).flatten()
        assert 0 < mine.sum() < len(mine)
        assert torch.equal(outputs(part, x, chosen)[mine], expected[mine])


@torch.inference_mode()
def test_gates_and_ups_share_the_largest_static_scale_and_downs_have_their_own() -> None:
    """Also with the scales of experts that another rank has, and of the shared expert."""
    config = replace(CONFIG, shared_intermediate_size=256)
    layer = filled(PLACEMENTS["static"], config)
    names = [name for name in weight_table(layer) if name.endswith("_proj.weight")]
    names.sort(key=lambda name: "shared" in name)
    own = {name: 0.004 + 0.001 * index for index, name in enumerate(weight_table(layer))}
    assert isinstance(layer.experts.gate_up_weights.form, QuantisedActivations)
    largest = max(own[name] for name in names if "down" not in name)
    assert layer.experts.gate_up_input_scale.item() == pytest.approx(largest)
    downs = [own[name] for name in names if "down" in name]
    assert layer.experts.down_input_scale.tolist() == pytest.approx(downs) and len(downs) == 5
    scales = [
        filled(on_rank(PLACEMENTS["static"], rank, 2, ep_size=2)).experts.gate_up_input_scale
        for rank in range(2)
    ]
    assert torch.equal(*scales)


def test_exact_weights_of_4_bits_are_dequantised_for_many_rows_if_they_take_no_more_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = (4, 64, 160)
    placement = replace(
        SINGLE,
        dtype=torch.bfloat16,
        quantised=Quantisation(four_bit=FourBitGroups(32, is_float=True)),
    )
    weights = StackedWeight(shape, placement, None, gated=False)
    assert weights.operands.scales is not None
    weights.operands.weight.random_(0, 256)
    weights.operands.scales.random_(118, 125)
    x, experts = torch.randn(16, 160).bfloat16(), torch.rand(16, 4).argsort(1)[:, :1].int()
    rows, few = (moe_permute(each, 4, 16) for each in (experts, experts[1:]))
    expected = weights.multiply(x, rows)
    monkeypatch.setattr(stacked_weight, "WIDE_ROWS", 4)
    assert weights.operands_for(x, rows).weight.shape == shape
    torch.testing.assert_close(weights.multiply(x, rows), expected, rtol=2.0**-7, atol=1e-3)
    assert weights.operands_for(x[1:], few) is weights.operands
    assert weights.operands_for(x.half(), rows) is weights.operands
    monkeypatch.setattr(stacked_weight, "WIDE_BYTES", 2 * 4 * 64 * 160 - 1)
    assert weights.operands_for(x, rows) is weights.operands


REFUSED = {
    "sliced and spread": (
        on_rank(PLACEMENTS["token"], 0, 4, ep_size=2),
        "moe_expert_parallel_size is 2 with tensor_parallel_size 4; experts whose activations "
        "have one scale a token .* moe_expert_parallel_size 1 or 4 is served",
    ),
    "slices that cut a block": (
        on_rank(PLACEMENTS["block"], 0, 4),
        "moe_tensor_parallel_size is 4; a layer has 256 inputs, of which 128 share a scale .*: "
        "with 1, 2 devices it has",
    ),
    "slices that cut a group": (
        on_rank(replace(SINGLE, quantised=Quantisation(four_bit=FourBitGroups(128))), 0, 4),
        "tensor_parallel_size is 4; a layer has 256 inputs in groups of 128, .* with 1, 2 devices",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_share_is_refused_with_what_works(name: str) -> None:
    placement, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        Experts(CONFIG, placement)
