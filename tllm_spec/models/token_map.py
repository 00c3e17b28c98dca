"""A draft network that computes logits of some of the target's tokens only: the frequent ones,
which a file lists (FR-Spec, arXiv 2502.14856), or those that a draft model's other tokenizer has,
too. The position in the list is the draft's id of a token."""

import json
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tllm_spec.models.layers import Placement, specialize_for_cpu
from tllm_spec.models.linear import Linear, OutputLinear
from tllm_spec.text.vocabulary import SharedTokens

# What the readers raise for files that are not theirs: an unpickler raises whatever it runs into.
_UNREADABLE = (
    *(OSError, ValueError, RuntimeError, EOFError, LookupError, TypeError, AssertionError),
    *(struct.error, pickle.UnpicklingError, SafetensorError),
)


@dataclass(frozen=True)
class DraftTokens:
    """The tokens that a network drafts. ids `[V_draft]` int64: the target's; rows `[V_draft]`: of
    the network's output layer. read_as `[V + 1]`: the network's ids of all of the target's, and
    of the mask token if it has one; None: the ids are equal."""

    ids: torch.Tensor
    rows: torch.Tensor
    read_as: torch.Tensor | None = None

    @classmethod
    def of_shared(
        cls,
        shared: SharedTokens,
        vocab_size: int,
        limit: torch.Tensor | None = None,
        mask_token: int | None = None,
    ) -> "DraftTokens":
        """The tokens of a draft model with another tokenizer. vocab_size: the target's; limit: a
        token map; mask_token: of a model that drafts all tokens at once. Raises ValueError if none
        of the map's tokens is shared."""
        rows, ids = torch.tensor([*shared.target_ids.items()]).T
        read_as = torch.full((vocab_size + 1,), shared.unknown)
        read_as[-1] = shared.unknown if mask_token is None else mask_token
        read_as[torch.tensor([*shared.draft_ids])] = torch.tensor([*shared.draft_ids.values()])
        if limit is not None:
            row_of = torch.full((vocab_size,), -1).index_copy_(0, ids, rows)
            ids = limit[row_of[limit] >= 0]
            rows = row_of[ids]
            if not len(ids):
                raise ValueError("the draft model's tokenizer has none of the map's tokens")
        return cls(ids, rows, read_as)

    def divisible(self, num_ranks: int) -> "DraftTokens":
        """The tokens without the last ones, so that each rank has equally many."""
        size = len(self.ids) - len(self.ids) % num_ranks
        return DraftTokens(self.ids[:size], self.rows[:size], self.read_as)


def read_token_map(path: Path, vocab_size: int) -> torch.Tensor:
    """`[V_draft]` int64 on the CPU: the target's ids in the order of the file. It holds a list of
    integers (`.json`), one tensor (`.safetensors`), or, for any other ending, what `torch.save`
    wrote: a tensor or a list. `vocab_size`: what the ids must be below.

    Raises:
        ValueError: the file is missing, unreadable or no list of distinct ids of the vocabulary.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; token maps are files and are not downloaded")
    ids = as_ids(_content(path))
    if ids is None:
        raise ValueError(f"{path} must hold one list of token ids, which are integers")
    if not len(ids):
        raise ValueError(f"{path} is empty; at least one token id is needed")
    check_ids(ids, vocab_size, f"{path} has")
    return ids


def check_ids(ids: torch.Tensor, vocab_size: int, subject: str) -> None:
    """Raises ValueError unless `ids` `[V_draft]`, integers on the CPU, are distinct and below
    `vocab_size`. `subject`: how the sentence begins, with its verb."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"{subject} the token id {int(outside[0])}; ids are 0 to {vocab_size - 1}")
    repeated = (torch.bincount(ids) > 1).nonzero()
    if len(repeated):
        raise ValueError(f"{subject} the token id {int(repeated[0])} more than once")


def reduced_output(layer: Linear, ids: torch.Tensor, placement: Placement) -> OutputLinear:
    """An output layer with the rows `ids` of another one, which may be sharded: each rank has a
    slice of its rows. Raises ValueError if their number cannot be split evenly over the ranks."""
    mapping = placement.mapping
    mapping.shard(len(ids), "the number of tokens in speculative_token_map")
    local, ids = layer.weight.shape[0], ids.to(layer.weight.device)
    own = ids - local * mapping.tp_rank
    is_here = (own >= 0) & (own < local)
    rows = layer.weight.new_zeros((len(ids), layer.weight.shape[1]))
    rows[is_here] = layer.weight[own[is_here]]
    placement.communicator.all_reduce(rows)  # every row is on one rank and 0 on the others
    reduced = OutputLinear(rows.shape[1], len(ids), placement=placement)
    share = reduced.weight.shape[0]
    reduced.weight.copy_(rows.narrow(0, share * mapping.tp_rank, share))
    specialize_for_cpu(reduced, placement)
    return reduced


def _content(path: Path) -> Any:
    """What the file holds. `weights_only` refuses pickles that run code."""
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        if path.suffix == ".safetensors":
            tensors = list(load_file(path).values())
            return tensors[0] if len(tensors) == 1 else None
        return torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is not a readable token map: {reason}") from error


def as_ids(content: Any) -> torch.Tensor | None:
    """`[N]` int64 of a list or of a tensor; None: it is not a list of integers."""
    if isinstance(content, torch.Tensor):
        is_list = content.dim() == 1 and not content.is_floating_point()
        is_list = is_list and content.dtype != torch.bool and not content.is_complex()
        return content.to(torch.int64) if is_list else None
    if not isinstance(content, Sequence) or isinstance(content, str):
        return None
    numbers = [each.item() if _is_scalar(each) else each for each in content]
    if any(type(each) is not int for each in numbers):
        return None
    fits = all(-(2**63) <= each < 2**63 for each in numbers)
    return torch.tensor(numbers, dtype=torch.int64) if fits else None


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0
