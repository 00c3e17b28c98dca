"""Synthetic acceptance for benchmarks: drafts are accepted by chance, whatever the tokens."""

from itertools import accumulate

import torch

from tllm_spec.kernels.slot_tables import SyntheticRates, TreeRates

# Rates of chains are by draft, rates of trees by depth for every rank of a child.
Rates = tuple[float, ...] | tuple[tuple[float, ...], ...]


def synthetic_acceptance(
    rates: Rates | None, seeds: torch.Tensor
) -> tuple[SyntheticRates | None, TreeRates | None]:
    """The rates on the device: of chains, or else of trees. seeds `[S]`: of the slots."""
    if rates is None:
        return None, None
    if not isinstance(rates[0], tuple):
        return SyntheticRates(_tensor(rates, seeds.device), seeds), None
    by_depth = [row for row in rates if isinstance(row, tuple)]
    width = max(map(len, by_depth))
    bounds = [list(accumulate((*row, *[0.0] * (width - len(row))))) for row in by_depth]
    return None, TreeRates(_tensor(bounds, seeds.device), seeds)


def _tensor(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)
