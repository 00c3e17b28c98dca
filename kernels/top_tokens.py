"""The K best tokens of each row of logits and their probabilities: the candidates of a draft tree.
On CUDA two Triton kernels, elsewhere the plain-torch reference.

A row's values are its logits, or where it has a temperature, logits / temperature + the Gumbel
noise that the target will use at the same position (coupled drafts, as `choose_draft`). The
candidates are the K best values, so the first one is what `choose_draft` returns, and a chain is
K = 1. Probabilities are the softmax of the values, noise included: of Gumbel variables, the
probability that the token is still the best one after independent errors of the draft's logits /
temperature (Gumbel, scale 1). The probability without noise would rank a token that the noise has
chosen, which the target will choose as well, below a more common one."""

import torch

from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.gumbel import gumbel_noise

MAX_TOPK = 16
_LAST_COLUMN = 2**31 - 1


@with_kernel("top_tokens_triton.top_tokens_triton")
def top_tokens(
    logits: torch.Tensor,
    topk: int,
    token_map: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cut: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities `[R, K]` float32 and tokens `[R, K]` int64, best first, equal values by column.

    Args:
        logits: `[R, V]` float32, bfloat16 or float16; V at least K. A NaN counts as -inf in the
            order, and makes the row's probabilities NaN, as +inf does.
        topk: K, 1 to 16.
        token_map: `[V]` int64: the target's id of each column, which keys the noise and is
            returned; None: the column itself.
        temperature, seeds, positions: `[B]` float32 and int64: of requests that have R / B rows
            each. Temperature 0: no noise. None: no row has a temperature.
        cut: `[R]` float32: values of logits / temperature below it count as -inf in rows with a
            temperature.
    """
    values = logits.to(torch.float32)
    if temperature is not None:
        assert seeds is not None and positions is not None
        per_request = len(values) // len(temperature)
        temperatures, row_seeds, row_positions = (
            column.repeat_interleave(per_request) for column in (temperature, seeds, positions)
        )
        noise = _noise(row_seeds, row_positions, values.shape[1], token_map)
        scaled = values / temperatures.unsqueeze(1)
        if cut is not None:
            scaled = scaled.masked_fill(scaled < cut.unsqueeze(1), -torch.inf)
        values = torch.where((temperatures == 0).unsqueeze(1), values, scaled + noise)
    columns = best_columns(values, topk)
    probs = values.softmax(dim=1).gather(1, columns)
    return probs, columns if token_map is None else token_map[columns]


def best_columns(values: torch.Tensor, topk: int) -> torch.Tensor:
    """Columns `[R, K]` of the largest float32 values `[R, V]`, equal ones by column, NaN as -inf.

    torch.topk leaves the order of equal values open, so it gets distinct keys: the float's bits as
    an ordered integer, then the column."""
    bits = (values.nan_to_num(-torch.inf, torch.inf, -torch.inf) + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    columns = torch.arange(values.shape[1], device=values.device)
    keys = (ordered << 32) + (_LAST_COLUMN - columns)
    return _LAST_COLUMN - (keys.topk(topk, dim=1).values & 0xFFFFFFFF)


def _noise(
    seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, token_map: torch.Tensor | None
) -> torch.Tensor:
    if token_map is None:
        return gumbel_noise(seeds, positions, vocab_size)
    return gumbel_noise(seeds, positions, int(token_map.max()) + 1).index_select(1, token_map)
