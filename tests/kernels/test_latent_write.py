"""The norm, rotation and write of MLA's latents, against the reference."""

import pytest
import torch

from tests.kernels.interpreter import (
    check_like_the_reference,
    on_each_kernel_device,
    only_outside_the_interpreter,
)
from tllm_spec.kernels.attention.latent_write import LatentNorm, latent_write
from tllm_spec.kernels.attention.rotary_write import Rotary

SIZE, ROPE, NOPE, ROWS = 48, 16, 20, 7


class Problem:
    """Random rows; `dtype` on `device`."""

    def __init__(self, dtype: torch.dtype, device: str, heads: int = 3) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.latent = random(ROWS, 5 + SIZE + ROPE)[:, 5:]  # rows of a wider projection
        self.q = random(ROWS, heads, NOPE + ROPE)
        angles = torch.rand(32, 1, ROPE // 2, generator=generator) * 6
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        positions = torch.randint(32, (ROWS,), generator=generator).to(device)
        self.rotary = Rotary(table.to(device, dtype).contiguous(), positions)
        self.slots = torch.randperm(40, generator=generator)[:ROWS].to(device)
        self.layer = random(10, 4, SIZE + ROPE)
        self.norm = LatentNorm(random(SIZE) + 1, 1e-6)


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 3, 200])
def test_the_kernel_equals_the_reference(dtype: torch.dtype, heads: int, device: str) -> None:
    one, other = (Problem(dtype, device, heads) for _ in range(2))
    latent_write(one.latent, one.q, one.rotary, one.slots, one.layer, one.norm)
    latent_write.reference(
        other.latent, other.q, other.rotary, other.slots, other.layer, other.norm
    )
    check_like_the_reference(one.layer, other.layer)
    check_like_the_reference(one.q, other.q)
    assert torch.equal(one.latent, other.latent)


@on_each_kernel_device
def test_without_queries_only_the_pool_is_written(device: str) -> None:
    one, other = (Problem(torch.float32, device) for _ in range(2))
    latent_write(one.latent, None, one.rotary, one.slots, one.layer, one.norm)
    latent_write.reference(
        other.latent, other.q, other.rotary, other.slots, other.layer, other.norm
    )
    check_like_the_reference(one.layer, other.layer)


@only_outside_the_interpreter
def test_the_reference_norms_the_latent_rotates_the_key_and_leaves_other_slots_alone() -> None:
    problem = Problem(torch.float32, "cpu")
    before, row = problem.layer.clone(), 2
    latent, key = problem.latent[row].split((SIZE, ROPE))
    latent_write.reference(
        *(problem.latent, None, problem.rotary, problem.slots, problem.layer, problem.norm)
    )
    flat = problem.layer.view(-1, SIZE + ROPE)
    entry = flat[problem.slots[row]]
    normed = latent / (latent.square().mean() + 1e-6).sqrt() * problem.norm.weight
    torch.testing.assert_close(entry[:SIZE], normed)
    cos, sin = problem.rotary.cos_sin[row, :, 0]
    pairs = torch.complex(*key.view(2, -1))
    turned = pairs * torch.complex(cos, sin)[ROPE // 2 :]
    torch.testing.assert_close(entry[SIZE:], torch.cat((turned.real, turned.imag)))
    others = torch.ones(len(flat), dtype=torch.bool)
    others[problem.slots] = False
    assert torch.equal(flat[others], before.view_as(flat)[others])
