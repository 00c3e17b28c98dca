"""A training run's state in a file, from which it is resumed."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

FILE = "checkpoint.pt"


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    seconds: float = 0.0
    best: float = math.inf
    """The lowest loss of a validation."""
    history: list[dict[str, float]] = field(default_factory=list)


class Checkpoint:
    """A file in the folder `output`."""

    def __init__(self, output: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self._file, self._model, self._optimizer = output / FILE, model, optimizer

    def save(self, progress: Progress) -> None:
        """An interrupted run leaves the file before."""
        state = {
            "progress": asdict(progress),
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        written = self._file.with_suffix(".new")
        torch.save(state, written)
        written.replace(self._file)

    def load(self) -> Progress:
        """Raises ValueError if there is no file, or one of another model."""
        if not self._file.is_file():
            raise ValueError(f"there is no {self._file} to resume from")
        state = torch.load(self._file, map_location="cpu", weights_only=True)
        try:
            self._model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise ValueError(f"{self._file} is of another model: {error}") from error
        self._optimizer.load_state_dict(state["optimizer"])
        return Progress(**state["progress"])
