"""top_k, top_p and min_p as one number a row: the smallest logits / temperature that they keep.

What is kept, in this order: min_p keeps what is at least the greatest value + log(min_p); top_k
what is at least the k-th greatest value, equal ones counted singly; top_p, of what these two keep,
every value whose strictly greater ones weigh less than top_p of all of them. So tokens with equal
values stay or go together, whatever order they are in, and a cut on values says it all.

Weights are integers, exp(value - greatest) * 2**40 cut off, so that their sums are exact in any
order, and exp is the sequence of single float32 operations below: every device cuts at the same
number. What is lost: tokens below e**-27.7 of the most likely one weigh nothing, and a weight is
right to about 1e-7 of itself.

On CUDA a pair of kernels counts the values of 16-bit logits and walks the counts; the plain-torch
reference sorts, and does it for float32 logits on any device. This file knows nothing of requests
or of choosing."""

import torch

from tllm_spec.kernels.triton_support import has_kernels

WEIGHT_BITS = 40


def filter_cut(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """logits `[R, V]` in float32, bfloat16 or float16; temperature, top_p, min_p `[R]` float32 and
    top_k `[R]` int64, with at least V, 1 and 0 meaning off. Returns `[R]` float32.

    The greatest value is always kept. -inf where nothing is filtered, and where the temperature is
    0. A row that holds
    a NaN has any cut: what is not below it includes the NaN.
    """
    if logits.element_size() != 2 or not has_kernels(logits.device):
        return filter_cut_reference(logits, temperature, top_k, top_p, min_p)
    from tllm_spec.kernels.filter_cut_triton import filter_cut_triton

    return filter_cut_triton(logits, temperature, top_k, top_p, min_p)


def filter_cut_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Arguments and result of `filter_cut`."""
    temperature, top_k, top_p, min_p = (x.unsqueeze(1) for x in (temperature, top_k, top_p, min_p))
    values = logits.to(torch.float32) / torch.where(temperature > 0, temperature, 1.0)
    values = values.sort(dim=-1, descending=True).values
    best = values[:, :1]
    # The logarithm in float64, rounded once, as the noise's: devices agree on it.
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


def token_weights(values: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """floor(exp(values - best) * 2**40), int64. exp as in Cephes' expf, every operation rounded to
    float32."""
    x = torch.where(values == best, 0.0, values - best)
    x = torch.where(x > -30.0, x, -30.0)  # weighs nothing any more
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
