"""Which rows of a round's forward belong to which request."""

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class RoundRows:
    """T rows of B requests, one request after another. Each request has the first 1 to W rows of
    its window. The host knows B, W and T only; which rows are whose is read on the device."""

    num_requests: int
    """B."""
    window: int
    """W."""
    num_rows: int
    """T."""
    offsets: torch.Tensor | None = None
    """[B + 1] int32, device: request b has the rows offsets[b] to offsets[b + 1]. None: all have W
    rows, a rectangle."""

    @classmethod
    def rectangle(cls, num_requests: int, window: int) -> "RoundRows":
        return cls(num_requests, window, num_requests * window)

    @property
    def counts(self) -> torch.Tensor | int:
        """Rows of each request, `[B]` int32; of a rectangle W."""
        return self.window if self.offsets is None else self.offsets.diff()

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the requests `[B, ...]`, repeated for each of their rows: `[T, ...]`."""
        if self.offsets is None:
            return values.repeat_interleave(self.window, dim=0)
        return values.index_select(0, self._owners)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """The rows' part `[T, ...]` of values of whole windows `[B, W, ...]`."""
        values = values.flatten(0, 1)
        return values if self.offsets is None else values.index_select(0, self._places)

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the rows `[T, ...]` as whole windows `[B, W, ...]`. A request's last row stands
        for the rows that it does not have."""
        if self.offsets is not None:
            values = values.index_select(0, self.padded_rows.flatten())
        return values.view(self.num_requests, self.window, *values.shape[1:])

    def column(self, values: torch.Tensor, index: int) -> torch.Tensor:
        """Values of the rows `[T, ...]` at one index of each window, `[B, ...]`, as in `padded`."""
        if self.offsets is None:
            return values[index :: self.window]
        return values.index_select(0, self.padded_rows[:, index])

    @cached_property
    def padded_rows(self) -> torch.Tensor:
        """The row of each place of whole windows, `[B, W]`."""
        assert self.offsets is not None
        places = torch.arange(self.window, device=self.offsets.device)
        return torch.minimum(self.offsets[:-1, None] + places, self.offsets[1:, None] - 1)

    @cached_property
    def _owners(self) -> torch.Tensor:
        """The request of each row, `[T]`."""
        assert self.offsets is not None
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.offsets.device)
        return torch.searchsorted(self.offsets[1:], rows, right=True)

    @cached_property
    def _places(self) -> torch.Tensor:
        """The place of each row in the flattened whole windows, `[T]`."""
        assert self.offsets is not None
        rows = torch.arange(self.num_rows, device=self.offsets.device)
        unused = torch.arange(self.num_requests, device=rows.device) * self.window
        return rows + self.expand(unused - self.offsets[:-1])
