"""top_k, top_p and min_p as one number per row: the smallest value of logits / temperature that
they keep.

The filters apply in this order. min_p keeps values of at least the greatest + log(min_p). top_k
keeps values of at least the k-th greatest (ties count individually). top_p keeps, of the rest,
values whose strictly greater ones weigh less than top_p of the total. So tokens with equal values
are kept or dropped together, and one number describes the result.

Weights are integers, floor(exp(value - greatest) * 2**40), so their sums are exact in any order.
exp is the sequence of float32 operations in `token_weights`, so all devices compute the same cut.
Tokens less likely than e**-27.7 of the most likely one weigh nothing, and a weight is accurate to
about 1e-7.

On CUDA two Triton kernels count the values of 16-bit logits and walk the counts. The plain-torch
reference sorts; it also serves float32 logits on any device."""

import numpy as np
import torch

from tllm_spec.kernels.dispatch import with_kernel

WEIGHT_BITS = 40


@with_kernel("filter_cut_triton.filter_cut_triton")
def filter_cut(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """logits `[R, V]` float32, bfloat16 or float16; temperature, top_p, min_p `[R]` float32; top_k
    `[R]` int64. A filter is off if top_k >= V, top_p >= 1, min_p = 0. Returns `[R]` float32.

    The greatest value is always kept. -inf where nothing is filtered or the temperature is 0. The
    cut of a row with a NaN is arbitrary; the NaN itself is always kept."""
    temperature, top_k, top_p, min_p = (x.unsqueeze(1) for x in (temperature, top_k, top_p, min_p))
    values = logits.to(torch.float32) / torch.where(temperature > 0, temperature, 1.0)
    values = _descending(values)
    best = values[:, :1]
    # The logarithm in float64, rounded once, so that devices agree.
    cut = torch.where(min_p > 0, best + min_p.double().log().float(), -torch.inf)
    last = top_k.clamp_max(logits.shape[1]) - 1
    cut = torch.where(top_k < logits.shape[1], torch.maximum(cut, values.gather(1, last)), cut)
    weights = torch.where(values < cut, 0, token_weights(values, best))
    sums = weights.cumsum(dim=-1)
    target = top_p.double() * sums[:, -1:].double()
    inside = sums.sub_(weights).double() < target
    last = (inside.sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    cut = torch.where(top_p < 1, torch.maximum(cut, values.gather(1, last)), cut)
    return torch.where(temperature > 0, cut, -torch.inf).squeeze(1)


def _descending(values: torch.Tensor) -> torch.Tensor:
    """`[R, V]` float32, sorted, NaN first. On a CPU NumPy takes a quarter of torch's time, which
    sorts the positions, too."""
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)


def token_weights(values: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """floor(exp(values - best) * 2**40), int64. exp as in Cephes' expf, each operation rounded to
    float32."""
    x = torch.where(values == best, 0.0, values - best)
    x = torch.where(x > -30.0, x, -30.0)  # weighs 0
    exponent = (x * 1.44269504088896341 + 0.5).floor()
    x = x - exponent * 0.693359375  # exact: the constant has few bits
    x = x - exponent * -2.12194440e-4
    y = x * 1.9875691500e-4 + 1.3981999507e-3
    y = y * x + 8.3334519073e-3
    y = y * x + 4.1665795894e-2
    y = y * x + 1.6666665459e-1
    y = y * x + 5.0000001201e-1
    y = y * (x * x) + x + 1.0
    scale = ((exponent.to(torch.int32) + (127 + WEIGHT_BITS)) << 23).view(torch.float32)
    return (y * scale).to(torch.int64)
