"""`speculative_config.adaptive`: what the user says about draft lengths that follow the traffic.

A mapping, the name of a preset, or the path of a JSON file as SGLang takes it. Keys that are whole
numbers are batch-size slots, by their smallest batch size. Any other key holds for all slots; of
these, a slot may override those of its strategy. How the strategies decide is not known here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from tllm_spec.config.config_base import ConfigError, ConfigModel
from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.config.option_checks import shown, unknown_options

DEFAULT_STEPS = (0, 1, 2, 3, 5, 7)  # of the cost model without a ladder of the user's


def _ladder(steps: object) -> tuple[int, ...]:
    """Sorted, without repetitions. Raises ValueError for anything but a list of integers of 0 or
    more."""
    if not isinstance(steps, (list, tuple)) or not steps:
        raise ValueError("a list of one or more draft lengths is needed, e.g. [0, 1, 3]")
    wrong = [step for step in steps if type(step) is not int or step < 0]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no draft length; accepted: integers of 0 or more")
    return tuple(sorted(set(steps)))


Ladder = Annotated[tuple[int, ...], BeforeValidator(_ladder)]
Probability = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Smoothing = Annotated[float, Field(gt=0, le=1)]


class EmaOptions(ConfigModel):
    """SGLang's rule, with its names and defaults. The average number of accepted drafts of a
    request and round is smoothed, and the draft length moves along the ladder until it is about one
    above that. Any key that only this strategy has selects it. `compat: true`, for all slots,
    counts each observation for the present length, as SGLang does."""

    candidate_steps: Ladder
    """Draft lengths to choose from; 0 is plain decoding. Every slot has its own list."""
    ema_alpha: Smoothing = 0.2
    """Weight of a round in the smoothed average; above 0 and at most 1."""
    update_interval: PositiveInt = 5
    """Rounds between two decisions."""
    warmup_batches: NonNegativeInt = 10
    """Rounds before the first interval begins."""
    down_hysteresis: Finite = -0.25
    """Added to the threshold below which the length falls: the next shorter length - 0.5, or 0.5
    where that is 0. A lower value makes the length fall later."""
    up_hysteresis: Finite = 0.0
    """Added to the threshold above which the length rises: the present length - 0.5. A higher value
    makes the length rise later."""
    ceiling_coeff: NotNegative = 0.0
    """A length that does not rise is at most this times the smoothed average, rounded up and at
    least 1. 0: no such limit."""


class CandidateTree(ConfigModel):
    """A dynamic tree that may be chosen. Each number is at most that of the decoding type."""

    max_draft_len: PositiveInt
    dynamic_tree_max_topK: Annotated[int, Field(ge=2)]
    max_total_draft_tokens: PositiveInt

    @property
    def shape(self) -> DraftShape:
        return DraftShape(
            self.max_draft_len, self.max_total_draft_tokens, self.dynamic_tree_max_topK
        )


TREE_EXAMPLE = "[{max_draft_len: 3, dynamic_tree_max_topK: 4, max_total_draft_tokens: 8}]"


def _trees(trees: object) -> tuple[CandidateTree, ...]:
    """Raises ValueError for anything but a list of mappings, ConfigError for a tree's mistakes."""
    if not isinstance(trees, (list, tuple)) or not all(isinstance(tree, Mapping) for tree in trees):
        raise ValueError(f"a list of trees is needed, e.g. {TREE_EXAMPLE}")
    return tuple(CandidateTree(**tree) for tree in trees)


CandidateTrees = Annotated[tuple[CandidateTree, ...], BeforeValidator(_trees)]


class CostModelOptions(ConfigModel):
    """The default: the draft length with the most expected tokens per second. `context_buckets`,
    for all slots of either strategy, has context lengths in tokens, e.g. `[4096, 16384]`: rounds
    below, between and above them are decided separately, by the average context of their requests.
    Drafters that were trained on short texts are right less often in long ones."""

    candidate_steps: Ladder
    """Draft lengths to choose from; 0 is plain decoding. Without slots it may be left out and is
    0, 1, 2, 3, 5, 7 up to `max_draft_len`."""
    candidate_trees: CandidateTrees | None = None
    """Trees to choose from next to chains of the lengths of `candidate_steps`, where
    `use_dynamic_tree` is true: a list of `max_draft_len`, `dynamic_tree_max_topK` and
    `max_total_draft_tokens`. null: the tree of the decoding type, one of half its drafts and one of
    a quarter. An empty list leaves a slot with chains."""
    prior_acceptance: Probability = 0.6
    """Probability that a draft is accepted, as assumed before any draft was verified."""
    window_trials: Annotated[float, Field(ge=32, allow_inf_nan=False)] = 256.0
    """Memory of the acceptance estimate, in drafts seen at a position; at least 32."""
    switch_margin: NotNegative = 0.01
    """Relative gain in tokens per second that a draft length must promise to replace another."""
    probe_time_share: Probability = 0.005
    """Share of the time that probes of longer draft lengths may add."""


EMA_ONLY = EmaOptions.model_fields.keys() - CostModelOptions.model_fields.keys()
FOR_ALL_SLOTS = frozenset({"strategy", "compat", "context_buckets"})
SlotOptions = EmaOptions | CostModelOptions


@dataclass(frozen=True)
class AdaptiveConfig:
    """A checked configuration: slots by their smallest batch size, ascending."""

    slots: tuple[tuple[int, SlotOptions], ...]
    compat: bool  # `ema` ignores which draft length produced an observation, as SGLang does
    context_buckets: tuple[int, ...] = ()  # tokens of context from which on rounds are a class

    @property
    def draft_lens(self) -> tuple[int, ...]:
        """Every draft length that some slot may choose, ascending."""
        return tuple(sorted({steps for _, slot in self.slots for steps in slot.candidate_steps}))

    @property
    def is_cost_model(self) -> bool:
        return all(isinstance(slot, CostModelOptions) for _, slot in self.slots)

    @property
    def trees(self) -> tuple[DraftShape, ...]:
        """The shapes of all `candidate_trees`, each once."""
        options = [slot for _, slot in self.slots if isinstance(slot, CostModelOptions)]
        return tuple({tree.shape: None for own in options for tree in own.candidate_trees or ()})

    def as_options(self) -> dict[int | str, Any]:
        """As `parse` takes it, in plain values."""
        slots: dict[int | str, Any] = {low: slot.as_options() for low, slot in self.slots}
        if self.context_buckets:
            slots["context_buckets"] = list(self.context_buckets)
        if self.is_cost_model:
            return {"strategy": "cost_model", **slots}
        return {"strategy": "ema", "compat": self.compat, **slots}

    @classmethod
    def parse(cls, adaptive: object, max_draft_len: float = inf) -> AdaptiveConfig:
        """`max_draft_len`: the longest draft length that a ladder may have; the default ladder and
        those of presets end there. Raises ValueError, which names slot and key, for a mistake. With
        `max_draft_len` the enclosing configuration puts the name of the field before each line of
        the message."""
        try:
            config = adaptive
            if not isinstance(config, AdaptiveConfig):
                config = cls._parse(adaptive, max_draft_len)
        except ConfigError as error:
            if max_draft_len < inf:
                raise
            raise ConfigError([f"adaptive.{line}" for line in error.lines]) from None
        except ValueError as error:
            if max_draft_len < inf:
                raise
            raise ValueError(f"adaptive = {shown(adaptive)}: {error}") from None
        if (longest := config.draft_lens[-1]) > max_draft_len:
            raise ValueError(
                f"candidate_steps has {longest}, and max_draft_len = {max_draft_len} is the most "
                "that there is room for"
            )
        return config

    @classmethod
    def _parse(cls, adaptive: object, max_draft_len: float) -> AdaptiveConfig:
        """Raises ConfigError, whose lines begin with a key inside, or ValueError about `adaptive`
        as a whole."""
        if isinstance(adaptive, str):
            is_preset = adaptive in PRESETS
            adaptive = _preset(adaptive, max_draft_len) if is_preset else _read_file(adaptive)
        if not isinstance(adaptive, Mapping):
            raise ValueError(f"a mapping, a path, or one of {', '.join(PRESETS)} is needed")
        root, slots = _split(adaptive)
        options: type[SlotOptions] = (
            EmaOptions if _strategy(root, slots) == "ema" else CostModelOptions
        )
        lines = _mistakes_for_all_slots(root, options)
        ladder = root.pop("candidate_steps", None)
        if ladder is not None and slots:
            lines.append(f"candidate_steps = {shown(ladder)} is refused: each slot has its own")
        elif ladder is not None:
            slots = {1: {"candidate_steps": ladder}}
        elif not slots and options is CostModelOptions:
            steps = {min(each, max_draft_len) for each in (*DEFAULT_STEPS, max_draft_len)}
            slots = {1: {"candidate_steps": sorted(steps - {inf})}}
        if not slots:
            raise ValueError(
                'it has no batch-size slot; needed: e.g. "1": {"candidate_steps": [1, 3, 7]}'
            )
        own = {key: value for key, value in root.items() if key in options.model_fields}
        checked = []
        for low in sorted(slots):
            try:
                checked.append((low, _slot(options, {} if lines else own, low, slots[low])))
            except ConfigError as error:
                lines += error.lines
        if lines:
            raise ConfigError(lines)
        return cls(
            tuple(checked), root.get("compat", False), tuple(root.get("context_buckets", ()))
        )


def _mistakes_for_all_slots(root: Mapping[str, Any], options: type[SlotOptions]) -> list[str]:
    """What is wrong with keys that hold for all slots. A slot's model would name its slot."""
    known = FOR_ALL_SLOTS | options.model_fields.keys()
    lines = unknown_options({key: root[key] for key in root if key not in known}, known)
    compat, buckets = root.get("compat", False), root.get("context_buckets", ())
    if type(compat) is not bool or (compat and options is not EmaOptions):
        accepted = "true or false" if options is EmaOptions else "false, unless strategy: ema"
        lines.append(f"compat = {shown(compat)} is refused; accepted: {accepted}")
    is_list = isinstance(buckets, (list, tuple))
    if (
        not is_list
        or any(type(each) is not int or each < 1 for each in buckets)
        or (list(buckets) != sorted(set(buckets)))
    ):
        lines.append(
            f"context_buckets = {shown(buckets)} is refused; accepted: context lengths in tokens, "
            "ascending, e.g. [4096, 16384]"
        )
    own = {key: root[key] for key in root if key in options.model_fields}
    try:
        options(**own | {"candidate_steps": [0]})
    except ConfigError as error:
        lines += error.lines
    return lines


def _split(adaptive: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[int, Any]]:
    """Global keys, and slots by their smallest batch size: a slot's key is an integer or a string
    of digits."""
    root: dict[str, Any] = {}
    slots: dict[int, Any] = {}
    for key, value in adaptive.items():
        if (type(key) is int and key >= 0) or (
            isinstance(key, str) and key.isascii() and key.isdigit()
        ):
            if int(key) in slots:
                raise ValueError(f"it has slot {int(key)} twice, as an integer and as a string")
            slots[int(key)] = value
        elif isinstance(key, str):
            root[key] = value
        else:
            raise ValueError(
                f"it has the key {key!r}; accepted: names, and batch sizes of 0 or more"
            )
    return root, slots


def _strategy(root: dict[str, Any], slots: Mapping[int, Any]) -> str:
    """Removes `strategy` from `root`. Where it is missing, any key that only `ema` has selects
    `ema`; otherwise the strategy is `cost_model`."""
    levels = [root, *(slot for slot in slots.values() if isinstance(slot, Mapping))]
    is_sglang = any(EMA_ONLY & level.keys() for level in levels)
    strategy = root.pop("strategy", "ema" if is_sglang else "cost_model")
    if strategy not in ("ema", "cost_model"):
        raise ConfigError(
            [f"strategy = {shown(strategy)} is refused; accepted: 'ema' or 'cost_model'"]
        )
    return str(strategy)


def _slot(
    options: type[SlotOptions], shared: Mapping[str, Any], low: int, slot: object
) -> SlotOptions:
    """A slot's keys override the global ones."""
    where = f"slot {low}"
    if not isinstance(slot, Mapping):
        raise ConfigError(
            [f"{where} = {shown(slot)} is no mapping; needed: e.g. {{candidate_steps: [1, 3]}}"]
        )
    if "candidate_steps" not in slot:
        raise ConfigError(
            [f"{where}.candidate_steps is missing: every slot has its own list of draft lengths"]
        )
    named = {str(key): value for key, value in slot.items()}
    if misplaced := [key for key in named if key in FOR_ALL_SLOTS]:
        belongs = "is refused in a slot: this key holds for all slots and belongs next to them"
        raise ConfigError([f"{where}.{key} = {shown(named[key])} {belongs}" for key in misplaced])
    try:
        return options(**{**shared, **named})
    except ConfigError as error:
        raise ConfigError([f"{where}.{line}" for line in error.lines]) from None


def _read_file(path: str) -> dict[str, Any]:
    """SGLang's JSON file. Without `strategy` it is `strategy: ema`."""
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        known = ", ".join(PRESETS)
        raise ValueError(f"it is no preset ({known}) and cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"the file must hold a JSON object, not {shown(tree)}")
    return {"strategy": "ema", **tree}


def _ema(*slots: tuple[int, list[int], float, float]) -> dict[Any, Any]:
    """A preset, from (smallest batch size, candidate_steps, down_hysteresis, ceiling_coeff)."""
    names = ("candidate_steps", "down_hysteresis", "ceiling_coeff")
    return {"strategy": "ema"} | {low: dict(zip(names, slot, strict=True)) for low, *slot in slots}


PRESETS: Mapping[str, dict[Any, Any]] = {
    "conservative": _ema((1, [1, 3, 7], -0.25, 0.0), (8, [1, 3], 0.0, 0.0), (32, [1], 0.0, 0.0)),
    "aggressive": _ema(
        (1, [1, 3, 7], -0.25, 0.0),
        (8, [1, 3, 7], -0.25, 3.0),
        (64, [1, 3], -0.25, 1.67),
        (128, [1, 3], -0.25, 1.2),
    ),
    "newest": _ema(
        (1, [1, 3, 5, 7], -0.25, 0.0),
        (8, [0, 1, 3], 0.0, 0.0),
        (32, [0, 1], 0.0, 0.0),
        (64, [0], 0.0, 0.0),
    ),
}


def _preset(name: str, max_draft_len: float) -> dict[Any, Any]:
    """The preset, without longer draft lengths."""
    slots = {low: slot for low, slot in PRESETS[name].items() if isinstance(low, int)}
    return PRESETS[name] | {
        low: slot | {"candidate_steps": [n for n in slot["candidate_steps"] if n <= max_draft_len]}
        for low, slot in slots.items()
    }
