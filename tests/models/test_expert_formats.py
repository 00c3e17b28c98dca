"""Layers of experts with quantised weights: rows have the same bits in every batch, ranks have the
numbers of one device, and what ranks cannot share is refused."""

from dataclasses import replace

import pytest
import torch

from tests.models.helpers import CPU
from tllm_spec.distributed.mapping import SINGLE_RANK
from tllm_spec.models.formats.fp8_formats import ActivationScales
from tllm_spec.models.formats.fp8_scaled import Fp8Tensor
from tllm_spec.models.formats.int4 import Int4Tensor
from tllm_spec.models.formats.int4_formats import Int4Groups
from tllm_spec.models.module import Placement
from tllm_spec.models.moe import SparseMoE
from tllm_spec.models.moe_shape import DEEPSEEK_NAMES, QWEN_NAMES, MoEConfig
from tllm_spec.models.weights import weight_table

CONFIG = MoEConfig(hidden_size=160, num_experts=4, top_k=2, intermediate_size=256)
TOKEN, BLOCK, STATIC = (ActivationScales(kind) for kind in ("token", "block", "tensor"))  # type: ignore[arg-type] # names
SINGLE = Placement(torch.float32, CPU, SINGLE_RANK)
PLACEMENTS = {
    "token": replace(SINGLE, activations=TOKEN),
    "block": replace(SINGLE, activations=BLOCK),
    "static": replace(SINGLE, activations=STATIC),
    "weights only": replace(SINGLE, fp8="block"),
    "int4": replace(SINGLE, int4=Int4Groups(32)),
    "mxfp4": replace(SINGLE, int4=Int4Groups(32, is_float=True)),
}
on_each_form = pytest.mark.parametrize("form", PLACEMENTS)


def filled(placement: Placement, config: MoEConfig = CONFIG) -> SparseMoE:
    """With the same weights on any rank."""
    names = DEEPSEEK_NAMES if config.shared_intermediate_size else QWEN_NAMES
    layer = SparseMoE(config, placement, names)
    for index, (name, slot) in enumerate(weight_table(layer).items()):
        generator = torch.Generator().manual_seed(index)

        def rand(*size: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.rand(size, generator=generator)

        if not name.endswith("_proj.weight"):
            slot.load(rand(*slot.shape) - 0.5)
            continue
        rows, inputs = slot.shape
        if placement.int4 is None:
            weight = torch.randn(slot.shape, generator=generator).to(torch.float8_e4m3fn)
            scales = (rand(rows, -(-inputs // 128)) + 0.5) * inputs**-0.5
            slot.load(Fp8Tensor(weight, scales, torch.tensor(0.004 + 0.001 * index)))
            continue
        codes = torch.randint(0, 16, (rows, inputs), generator=generator).byte()
        words = torch.full((rows, inputs // 32), 2.0**-5)
        if not placement.int4.is_float:
            words = words.view(torch.int32) | torch.randint(0, 16, words.shape).int()
        slot.load(Int4Tensor(codes, words, 32))
    return layer


def tokens(number: int) -> torch.Tensor:
    return torch.randn(number, CONFIG.hidden_size, generator=torch.Generator().manual_seed(3))


@on_each_form
@torch.inference_mode()
def test_a_row_has_the_same_codes_and_bits_in_every_batch(form: str) -> None:
    layer, x = filled(PLACEMENTS[form]), tokens(1024)
    is_exact = form in ("token", "block", "static")
    expected = layer.experts.forward(x, layer.router.route(x)[0]).view(1024, 2, -1)
    for number in (1, 8, 9, 256):
        chosen = layer.router.route(x)[0][:number]
        found = layer.experts.forward(x[:number], chosen).view(number, 2, -1)
        torch.testing.assert_close(found, expected[:number], rtol=0, atol=0 if is_exact else 1e-4)
