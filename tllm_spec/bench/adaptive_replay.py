"""What the adaptive draft length would have done with recorded rounds: `tllm-bench
adaptive-replay`.

A trace is JSON lines, one a round, in order:

    {"batch_size": 4, "num_accepted": [3, 0, 1, 2], "num_steps": 3, "seconds": 0.0051}

`num_accepted`: accepted drafts of each request that was drafted for. `num_steps`: the draft length
that was verified; without it, the round counts as one of the length that the controller asked for.
`seconds`: the round's time, if it is known. `context_len`: average tokens of the requests, which
`context_buckets` need. The trace is what happened: decisions do not change the rounds after them.

A folder of recorded traffic (`record_traffic`) is a trace, too, without times.

A file of LLM arguments gives the controller that an engine with these arguments has, limits
included; one of the `adaptive` keys alone gives that policy without any limit."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from tllm_spec.config.adaptive_config import AdaptiveConfig, EmaOptions
from tllm_spec.config.config_base import ConfigModel, check
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.speculative.draft_length.adaptive import (
    AdaptiveController,
    controller_for,
)
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes
from tllm_spec.recording.traffic_folder import read_records


class TraceRound(ConfigModel):
    batch_size: PositiveInt
    num_accepted: list[NonNegativeInt]
    num_steps: NonNegativeInt | None = None
    seconds: PositiveFloat | None = None
    context_len: NonNegativeInt = 0

    @check
    def _check_together(self) -> Iterator[str]:
        number, most = len(self.num_accepted), max(self.num_accepted, default=0)
        if number > self.batch_size:
            yield (
                f"num_accepted has {number} numbers, and batch_size = {self.batch_size} requests "
                "ran"
            )
        if self.num_steps is not None and most > self.num_steps:
            yield (
                f"num_accepted has {most}, and num_steps = {self.num_steps} drafts were verified"
            )


@dataclass(frozen=True)
class ReplayedRound:
    line: int
    batch_size: int
    steps: int  # what the controller asked for
    changed: bool  # whether it will ask for another length at this batch size next time

    def __str__(self) -> str:
        return f"round {self.line}: batch {self.batch_size}, draft length {self.steps}"


def read_controller(
    path: Path,
    *,
    graph_batch_sizes: Iterable[int] | None = None,
    initial_steps: int | None = None,
    round_times: MeasuredRoundTimes | None = None,
) -> AdaptiveController:
    """From a YAML or JSON file of LLM arguments, or of the adaptive keys. Raises ValueError for a
    file that says nothing about adaptive draft lengths, and for a draft length to begin with that
    they do not have."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not _is_llm_arguments(tree):
        config = AdaptiveConfig.parse({} if tree is None else tree)
        _check_initial_steps(initial_steps, config)
        return AdaptiveController.from_config(
            config,
            graph_batch_sizes=graph_batch_sizes,
            initial_steps=initial_steps,
            round_times=round_times,
        )
    args, config = _llm_args(tree, path)
    _check_initial_steps(initial_steps, config)
    return controller_for(
        args.speculative_config,
        graph_batch_sizes=graph_batch_sizes,
        initial_steps=initial_steps,
        round_times=round_times,
        max_num_tokens=args.max_num_tokens,
        # An engine has no more slots than rows.
        max_batch_size=min(args.max_batch_size, args.max_num_tokens),
    )


def _is_llm_arguments(tree: object) -> bool:
    names = LlmArgs.model_fields.keys() | LlmArgs.ignored.keys()
    return isinstance(tree, dict) and not names.isdisjoint(tree)


def _llm_args(tree: dict[Any, Any], path: Path) -> tuple[LlmArgs, AdaptiveConfig]:
    """Checked as an engine checks them, and their `adaptive`. No model is looked at."""
    if wrong := [key for key in tree if not isinstance(key, str)]:
        raise ValueError(
            f"{path} has the key {wrong[0]!r} among LLM arguments; names of options are needed"
        )
    args = LlmArgs(**{"model": "of no importance", **tree})
    spec = args.speculative_config
    if spec is None:
        raise ValueError(
            f"{path}: speculative_config = None: nothing to replay, as no round has drafts"
        )
    if spec.adaptive is None:
        raise ValueError(
            f"{path}: speculative_config.adaptive = None: nothing to replay, as every round has "
            "max_draft_len = "
            f"{spec.max_draft_len} drafts or what the limits leave of them"
        )
    return args, spec.adaptive


def _check_initial_steps(steps: int | None, config: AdaptiveConfig) -> None:
    if steps is None:
        return
    if not isinstance(config.slots[0][1], EmaOptions):
        raise ValueError(
            f"initial_steps = {steps} is for strategy: ema; cost_model begins with the length that "
            "its prior expects to be the fastest"
        )
    if steps not in config.draft_lens:
        ladder = ", ".join(map(str, config.draft_lens))
        raise ValueError(
            f"initial_steps = {steps} is in no ladder of candidate_steps; accepted: {ladder}"
        )


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


def recorded_trace(folder: Path) -> Iterator[TraceRound]:
    """The rounds of recorded traffic, in order. What a round brought to several requests has one
    time. Raises ValueError for a folder without records."""
    rounds: dict[int, list[tuple[int, int, int]]] = {}
    for record in read_records(folder):
        context_len = len(record.prompt)
        for offset, num_tokens, num_drafts in record.rounds:
            if offset is not None and num_tokens is not None and num_drafts is not None:
                brought = rounds.setdefault(record.arrived_us + offset, [])
                brought.append((num_tokens - 1, num_drafts, context_len))
            context_len += num_tokens or 0
    for _, brought in sorted(rounds.items()):
        yield TraceRound(
            batch_size=len(brought),
            num_accepted=[accepted for accepted, drafts, _ in brought if drafts],
            num_steps=max(drafts for _, drafts, _ in brought),
            context_len=sum(tokens for _, _, tokens in brought) // len(brought),
        )


def replay(controller: AdaptiveController, rounds: Iterable[TraceRound]) -> Iterator[ReplayedRound]:
    for number, each in enumerate(rounds, start=1):
        controller.note_context(each.context_len)
        steps = controller.tier_for(each.batch_size)
        changed = controller.observe(
            ObservedRound(
                *(each.batch_size, each.num_accepted, each.num_steps, each.seconds),
                context_len=controller.context_len,
            )
        )
        yield ReplayedRound(number, each.batch_size, steps, changed)
