"""Hidden states of a text on their way to the host (`record_hidden_states`)."""

import torch

from tllm_spec.executor.device.transfer import ToHost


class TextStates:
    """The rows of one text in the order of its tokens, as far as rounds with it were launched. Only
    `read` waits for the device. num_bytes: of the host's memory, when the text is complete."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._parts: list[tuple[ToHost, int, int | None]] = []

    def add_chunk(self, sent: ToHost, first: int, number: int) -> None:
        """A context chunk has these rows of sent states `[T, C]`."""
        self._parts.append((sent, first, number))

    def add_window(self, sent: ToHost, index: int) -> None:
        """A window is one of sent windows `[N, W, C]` with lengths `[N]`."""
        self._parts.append((sent, index, None))

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
