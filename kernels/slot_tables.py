"""The tables that `slot_windows` and `slot_trees` update."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SlotTables:
    """Tables indexed by slot, int64, documented in `SlotState`: kv_lens, num_drafts, previous_token
    `[S]`, window `[S, K_max + 1]`."""

    kv_lens: torch.Tensor
    window: torch.Tensor
    num_drafts: torch.Tensor
    previous_token: torch.Tensor


@dataclass(frozen=True)
class TreeTables:
    """The trees in the slots' windows, `[S, W_max]` int64 each, documented in `DraftTree`. `order`:
    the node that each row had before `choose_nodes` put them in order."""

    parents: torch.Tensor
    depths: torch.Tensor
    bits: torch.Tensor
    order: torch.Tensor


@dataclass(frozen=True)
class SyntheticRates:
    """Synthetic acceptance (`accept_by_rates`). seeds `[S]`: of the slots, for the coins, any
    stride."""

    rates: torch.Tensor
    seeds: torch.Tensor


@dataclass(frozen=True)
class TreeRates:
    """Synthetic acceptance of trees (`accept_tree_by_rates`). bounds `[>= D, R]` float64,
    contiguous; seeds as above."""

    bounds: torch.Tensor
    seeds: torch.Tensor
