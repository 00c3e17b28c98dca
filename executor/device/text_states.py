"""Hidden states of a text on their way to the host (`record_hidden_states`)."""

import torch

from tllm_spec.executor.device.transfer import ToHost


class TextStates:
    """The rows of one text in the order of its tokens, as far as rounds with it were launched. Only
    `read` waits for the device. num_bytes: of the host's memory, at most; a text that needs more is
    dropped."""

    def __init__(self, num_bytes: int, row_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_dropped = False
        self._num_rows_left = num_bytes // row_bytes
        self._parts: list[tuple[ToHost, int, int | None]] = []

    def add_chunk(self, sent: ToHost, first: int, number: int) -> None:
        """A context chunk has these rows of sent states `[T, C]`."""
        self._add(sent, first, number, number)

    def add_window(self, sent: ToHost, index: int, width: int) -> None:
        """A window is one of sent windows `[N, W, C]` with lengths `[N]`."""
        self._add(sent, index, None, width)

    def _add(self, sent: ToHost, first: int, number: int | None, num_rows: int) -> None:
        self._num_rows_left -= num_rows
        if self._num_rows_left < 0:
            self.is_dropped = True
            self._parts.clear()
        if not self.is_dropped:
            self._parts.append((sent, first, number))

    def read(self) -> torch.Tensor:
        """`[T, C]`. A round that was launched after the text's end adds rows that mean nothing."""
        rows = []
        for sent, first, number in self._parts:
            states, *lens = sent.wait()
            if number is None:
                rows.append(states[first, : int(lens[0][first])])
            else:
                rows.append(states[first : first + number])
        return torch.cat(rows)
