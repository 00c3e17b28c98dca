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
from pathlib import Path
from typing import Any

import yaml
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from tllm_spec.config.adaptive_config import AdaptiveConfig, EmaOptions
from tllm_spec.config.config_base import ConfigModel, check
from tllm_spec.config.llm_args import LlmArgs, read_options
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController, controller_for
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes
from tllm_spec.recording.traffic_folder import read_lines, read_records
from tllm_spec.recording.traffic_record import json_object, named


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


def read_controller(path: Path, *, initial_steps: int | None, **given: Any) -> AdaptiveController:
    """From a YAML or JSON file of LLM arguments, checked as an engine checks them, or of the
    adaptive keys. given: as `controller_for` has it. Raises ValueError for a file that says nothing
    about adaptive draft lengths, and for a draft length to begin with that they do not have."""
    try:
        tree = yaml.safe_load("".join(read_lines(path)))
    except yaml.YAMLError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    given |= {"initial_steps": initial_steps}
    names = LlmArgs.model_fields.keys() | LlmArgs.ignored.keys()
    if not isinstance(tree, dict) or names.isdisjoint(tree):
        config = AdaptiveConfig.parse({} if tree is None else tree)
        _check_initial_steps(initial_steps, config)
        return AdaptiveController.from_config(config, **given)
    args = LlmArgs(**{"model": "of no importance", **read_options(path)})
    if (spec := args.speculative_config) is None:
        raise ValueError(
            f"{path}: speculative_config = None: nothing to replay, as no round has drafts"
        )
    if spec.adaptive is None:
        raise ValueError(
            f"{path}: speculative_config.adaptive = None: nothing to replay, as every round has "
            f"max_draft_len = {spec.max_draft_len} drafts or what the limits leave of them"
        )
    _check_initial_steps(initial_steps, spec.adaptive)
    return controller_for(
        spec,
        **given,
        max_num_tokens=args.max_num_tokens,
        # An engine has no more slots than rows.
        max_batch_size=min(args.max_batch_size, args.max_num_tokens),
    )


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
        with named(f"line {number} of the trace"):
            yield TraceRound(**json_object(line))


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


def replay(
    controller: AdaptiveController, rounds: Iterable[TraceRound], *, every_round: bool
) -> Iterator[str]:
    """A line for each round, or only for those after which another length is asked for."""
    for number, each in enumerate(rounds, start=1):
        controller.note_context(each.context_len)
        steps = controller.tier_for(each.batch_size)
        is_changed = controller.observe(
            ObservedRound(
                *(each.batch_size, each.num_accepted, each.num_steps, each.seconds),
                context_len=controller.context_len,
            )
        )
        if every_round or is_changed:
            then = f" -> {controller.tier_for(each.batch_size)}" if is_changed else ""
            yield f"round {number}: batch {each.batch_size}, draft length {steps}{then}"
