"""The target's hidden states that a draft head reads: which layers, and the buffer for them.

The engine passes it to the target's forward; the drafter reads the buffer afterwards."""

import torch

from tllm_spec.kernels.slots.row_copies import copy_rows


def default_capture_layers(num_layers: int) -> tuple[int, ...]:
    """The low, middle and high layer whose outputs an EAGLE-3 head reads by default.

    Raises ValueError for a model that has too few layers for three different ones.
    """
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if num_layers < 7:
        raise ValueError(
            f"a model of {num_layers} layers has too few for the default capture layers, which "
            "need 7; set eagle3_layers_to_capture"
        )
    return layers


class SpecMetadata:
    """`layers`: ids of the layers whose outputs (residual included) are captured, in the order of
    the head's input; the number of layers, as an id, is the final norm. `buffer` `[T_max, n * H]`:
    the states of the latest forward's rows. `other`: is given the same outputs; None: there is none
    else who reads states."""

    def __init__(
        self,
        layers: tuple[int, ...],
        hidden_size: int,
        max_num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.other: SpecMetadata | None = None
        self.buffer = torch.zeros(
            (max_num_tokens, len(layers) * hidden_size), dtype=dtype, device=device
        )
        # Views of the buffer by layer id, for as many rows as the latest forward had.
        self._columns: dict[int, torch.Tensor] = {}
        self._num_rows = -1

    def maybe_capture_hidden_states(self, layer_id: int, hidden: torch.Tensor) -> None:
        """Called after every layer with its output `[T, H]`, residual included; keeps it if the
        layer is captured."""
        if self.other is not None:
            self.other.maybe_capture_hidden_states(layer_id, hidden)
        if layer_id not in self.layers:
            return
        if hidden.shape[0] != self._num_rows:
            self._num_rows = hidden.shape[0]
            parts = self.buffer[: self._num_rows].chunk(len(self.layers), 1)
            self._columns = dict(zip(self.layers, parts, strict=True))
        copy_rows(hidden, self._columns[layer_id])

    @property
    def last_layer(self) -> int:
        """The last layer whose states are read."""
        own = max(self.layers)
        return own if self.other is None else max(own, self.other.last_layer)

    def captured(self, num_rows: int) -> torch.Tensor:
        """The states of the latest forward, `[T, n * H]`: a view that the next forward
        overwrites."""
        return self.buffer[:num_rows]
