"""Token arrays on the training device: random sequences for training, all sequences in order for
validation."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenData:
    tokens: Tensor
    """`[N]` int16, on the training device: the documents, concatenated."""
    num_bytes: int
    """Size of the text in bytes."""

    @classmethod
    def load(cls, file: Path, device: torch.device) -> "TokenData":
        with np.load(file) as arrays:
            tokens = torch.from_numpy(arrays["tokens"].astype(np.int16))
            return cls(tokens.to(device), int(arrays["num_bytes"]))

    def sample(self, num_windows: int, length: int) -> Tensor:
        """`[num_windows, length]` int64: sequences from random offsets, which may span
        documents."""
        device = self.tokens.device
        offsets = torch.randint(len(self.tokens) - length + 1, (num_windows, 1), device=device)
        return self.tokens[offsets + torch.arange(length, device=device)].long()

    def windows(self, length: int, num_windows: int) -> Iterator[Tensor]:
        """Batches `[<= num_windows, length]` of consecutive sequences over all tokens, without a
        tail shorter than one sequence."""
        whole = self.tokens[: len(self.tokens) // length * length].view(-1, length)
        for batch in torch.split(whole, num_windows):
            yield batch.long()
