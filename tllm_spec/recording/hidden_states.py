"""Recorded hidden states of the target (`record_hidden_states`): a safetensors file for a request,
with its record as metadata.

`read_hidden_states` is what trains and replays draft heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tllm_spec.recording.traffic_folder import metadata_of, states_files_of
from tllm_spec.recording.traffic_record import TrafficRecord, read_line

if TYPE_CHECKING:
    import torch

FORMAT = "tllm_spec hidden states 1"


@dataclass(frozen=True)
class HiddenStates:
    """What the target computed for the T tokens of a text that it has read: the prompt and the
    output but for its last token, which nothing read.

    ids: `[T]` int64. captured: `[T, C * H]`, the outputs of C layers, residual included, in the
    order of `layers`. hidden: `[T, H]`, after the final norm, so the LM head makes the logits of
    token t + 1 from row t. States have the target's dtype and are on the CPU."""

    record: TrafficRecord
    layers: tuple[int, ...]
    ids: torch.Tensor
    captured: torch.Tensor
    hidden: torch.Tensor

    def of_layers(self, layers: Sequence[int], num_layers: int) -> torch.Tensor | None:
        """`[T, n * H]` of these layers, of which the number `num_layers` is the final norm; None
        where one of them is not recorded."""
        import torch

        parts = self.captured.chunk(len(self.layers), dim=1)
        found = dict(zip(self.layers, parts, strict=True)) | {num_layers: self.hidden}
        if not found.keys() >= set(layers):
            return None
        return torch.cat([found[layer] for layer in layers], dim=1)

    def to_file(self) -> bytes:
        """The file's content; `ids` are in the record."""
        from safetensors.torch import save

        tensors = {"captured": self.captured.contiguous(), "hidden": self.hidden.contiguous()}
        layers = ",".join(map(str, self.layers))
        record = self.record.to_line().decode()
        content: bytes = save(tensors, {"format": FORMAT, "layers": layers, "record": record})
        return content


def read_hidden_states(path: Path) -> Iterator[HiddenStates]:
    """Those of a folder of recorded traffic, oldest first; one text is in memory at a time. Raises
    ValueError for a folder without any, and for a file that is not in the format."""
    files = states_files_of(path)
    if not files:
        raise ValueError(
            f"{path} has no recorded hidden states; serving with record_hidden_states records them"
        )
    yield from map(read_states_file, files)


def read_states_file(file: Path) -> HiddenStates:
    """Raises ValueError for a file that is not in the format."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    metadata = metadata_of(file)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{file}: format = {metadata.get('format')!r}: {FORMAT!r} is accepted")
    record = read_line(metadata.get("record", ""), str(file))
    try:
        layers = tuple(map(int, metadata.get("layers", "").split(",")))
        tensors = load_file(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    captured, hidden = (tensors.get(name, torch.empty(0)) for name in ("captured", "hidden"))
    rows, size = (*hidden.shape, 0, 0)[:2]
    if (
        not isinstance(record, TrafficRecord)
        or tensors.keys() != {"captured", "hidden"}
        or not (hidden.dtype == captured.dtype and hidden.is_floating_point())
        or hidden.shape != (rows, size)
        or captured.shape != (rows, size * len(layers))
        or rows != len(record.prompt) + len(record.output) - 1
    ):
        raise ValueError(f"{file}: its tensors are not the hidden states of its record")
    ids = torch.tensor([*record.prompt, *record.output][:rows])
    return HiddenStates(record, layers, ids, captured, hidden)
