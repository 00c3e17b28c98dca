"""What the adaptive draft length would have done with recorded rounds: `tllm-bench adaptive-replay`.

A trace is JSON lines, one a round, in order:

    {"batch_size": 4, "num_accepted": [3, 0, 1, 2], "num_steps": 3, "seconds": 0.0051}

`num_accepted`: accepted drafts of each request that was drafted for. `num_steps`: the draft length that was verified;
without it, the round counts as one of the length that the controller asked for. `seconds`: the round's time, if it
is known. `sampled`: true where not all requests were greedy.
The trace is what happened, so decisions do not change what comes after them.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from tllm_spec.adaptive_config import AdaptiveConfig
from tllm_spec.config_base import ConfigModel
from tllm_spec.executor.speculative.adaptive import AdaptiveController
from tllm_spec.executor.speculative.round_times import MeasuredRoundTimes


class TraceRound(ConfigModel):
    batch_size: PositiveInt
    num_accepted: list[NonNegativeInt]
    num_steps: NonNegativeInt | None = None
    seconds: PositiveFloat | None = None
    sampled: bool = False


@dataclass(frozen=True)
class ReplayedRound:
    line: int
    batch_size: int
    sampled: bool
    steps: int  # what the controller asked for
    changed: bool  # whether it will ask for another length at this batch size next time

    def __str__(self) -> str:
        return f"round {self.line}: batch {self.batch_size}{' sampled' * self.sampled}, draft length {self.steps}"


def read_config(path: Path) -> AdaptiveConfig:
    """From a YAML or JSON file of the adaptive keys, or of LLM arguments with `speculative_config.adaptive`."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if isinstance(tree, dict) and isinstance(tree.get("speculative_config"), dict):
        tree = tree["speculative_config"].get("adaptive")
    return AdaptiveConfig.parse({} if tree is None else tree)


def read_round_times(path: Path) -> MeasuredRoundTimes:
    try:
        return MeasuredRoundTimes.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def read_trace(lines: Iterable[str]) -> Iterator[TraceRound]:
    """Raises ValueError that names the line."""
    for number, line in enumerate(lines, start=1):
        try:
            tree: Any = json.loads(line)
            if not isinstance(tree, dict):
                raise ValueError("a JSON object is needed")
            yield TraceRound(**tree)
        except ValueError as error:
            raise ValueError(f"line {number} of the trace: {error}") from error


def replay(controller: AdaptiveController, rounds: Iterable[TraceRound]) -> Iterator[ReplayedRound]:
    for number, each in enumerate(rounds, start=1):
        steps = controller.steps_for(each.batch_size, each.sampled)
        changed = controller.observe(
            each.batch_size, each.num_accepted, each.num_steps, each.seconds, sampled=each.sampled
        )
        yield ReplayedRound(number, each.batch_size, each.sampled, steps, changed)
