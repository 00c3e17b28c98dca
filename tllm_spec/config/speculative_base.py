"""The options that all decoding types share, and those of the types with a draft model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt, ValidationInfo, field_validator

from tllm_spec.config.adaptive_config import AdaptiveConfig, Probability
from tllm_spec.config.config_base import ConfigError, ConfigModel, PathText, check
from tllm_spec.config.draft_shape import (
    MAX_BUDGETS,
    MAX_DRAFT_LEN,
    NO_DRAFTS,
    DraftShape,
    DraftShapes,
    checked_schedule,
    with_lower_bounds,
)
from tllm_spec.config.neighbours import (
    ADAPTIVE,
    ADAPTIVE_FILE,
    NUM_CHILDREN,
    NUM_NODES,
    SPECULATIVE_IGNORED,
    SPECULATIVE_RENAMED,
    Ignored,
    Renamed,
)
from tllm_spec.config.option_checks import shown
from tllm_spec.config.text_search import TextSearch

# Synthetic acceptance: a number for each draft of a chain, or a list for each depth of a tree.
Rates = tuple[float, ...] | tuple[tuple[float, ...], ...]
NO_BENCHMARK = "synthetic acceptance is for benchmarks and changes the text"


def _tuple_of(sequence: object) -> object:
    """A list from YAML as a tuple. Raises ValueError for anything that has no order."""
    if not isinstance(sequence, (list, tuple)):
        raise ValueError("a list is needed")
    return tuple(tuple(each) if isinstance(each, list) else each for each in sequence)


@dataclass(frozen=True)
class RelaxedRule:
    """Relaxed acceptance of drafts between two tokens; see `MTPDecodingConfig`."""

    top_k: int
    delta: float
    begin_token: int
    end_token: int


class DecodingBaseConfig(ConfigModel):
    """The options that all decoding types share."""

    decoding_type: str
    """Where drafts come from: `NGram`, `SA`, `Draft_Target`, `PARD`, `Eagle`, `Eagle3`, `DFlash`,
    `DSpark`, `MTP`, `User_Provided`, or `AUTO`, which chooses all options. It may be left out where
    `speculative_model` is there: the JSON of its folder says what it is."""
    max_draft_len: PositiveInt
    """Draft tokens of a request in one round, at most. With `adaptive` or a schedule it is the
    longest length that may be chosen."""
    adaptive: AdaptiveConfig | None = None
    """Lets the draft length of each round follow acceptance and load. A mapping, one of
    `conservative`, `aggressive` and `newest`, or the path of a JSON file as SGLang takes it; see
    `docs/adaptive.md`."""
    max_total_draft_tokens: PositiveInt | None = None
    """Draft tokens of a request in one round over all branches of a tree: its nodes without the
    root. A chain has `max_draft_len`, which null stands for."""
    max_rejected_rounds: PositiveInt | None = 8
    """A request whose drafts were all rejected in about this many rounds pauses drafting; each
    pause is twice as long as the last, and an accepted draft ends it. null: requests never pause.
    Refused where drafts are made in the target's round or from its hidden states."""
    max_concurrency: PositiveInt | None = None
    """No drafts in batches of more requests than this."""
    enable_adaptive_verification: bool = False
    """In batches of more than 16 requests, drafts may share the rows of a round: they go to those
    that are likeliest to be accepted, in whichever request. Whether, and how many rows there are,
    follows acceptance and load, as draft lengths do with `adaptive`, whose cost model it needs.
    Refused with draft trees, `use_rejection_sampling` and `draft_len_schedule`."""
    round_times_path: PathText | None = None
    """JSON file of how long rounds take by batch size and draft length, for `adaptive`'s cost
    model: read if it is there, otherwise written when they were measured. TensorRT-LLM's and
    SGLang's cost tables (`token_counts`, `step_time_ms`) are read, and what is written has their
    keys, too. null: rounds are measured at every start."""
    verify_budget: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Rows that a request has on average in a round, its own token included. The rows of a batch go
    to the drafts that are likeliest to be accepted, in whichever request; a request has 1 to
    `max_total_draft_tokens` + 1 of them. null: all requests have equally many. Refused with draft
    trees, `use_rejection_sampling` and `adaptive`."""
    draft_len_schedule_keys: Literal["lower_bound", "upper_bound"] | None = None
    """What the keys of `draft_len_schedule` are. `upper_bound` is TensorRT-LLM's reading for
    one-model decoding: each key ends a range of batch sizes, and above the largest there are no
    drafts. null is `lower_bound`, and refuses a schedule whose smallest key is above 1."""
    draft_len_schedule: dict[int, int] | None = None
    """`{batch size: draft length}`. The entry of the largest key not above the batch size holds; a
    batch smaller than every key uses `max_draft_len`."""
    acceptance_rate_threshold: Probability | None = None
    """Stops drafting when a smaller share of the drafts of the last `acceptance_rate_window_size`
    rounds was accepted. One window of rounds in 100 tries again; in TensorRT-LLM the stop is
    final."""
    acceptance_rate_window_size: PositiveInt | None = None
    """Rounds that `acceptance_rate_threshold` looks at. 0, as in TensorRT-LLM, switches both
    off."""
    use_rejection_sampling: bool = False
    """At temperature > 0, accepts a draft with probability min(1, p/q) and otherwise draws from
    (p - q)+, instead of comparing tokens. The distribution of the text is the same; the text of a
    seed is not."""
    draft_sampling: Literal["coupled", "greedy"] = "coupled"
    """How drafts are drawn at temperature > 0: with the noise that the target's token at that
    position is drawn with, or the draft model's best token."""
    threshold_single: Probability = 1.0
    """For rejection sampling on draft trees. Below 1 it is **lossy**: a draft is also accepted
    where the target gives it at least this probability. SGLang's name is
    `speculative_accept_threshold_single`."""
    threshold_acc: Probability = 1.0
    """For rejection sampling on draft trees. Below 1 it is **lossy**: the probabilities of drafts
    are divided by this before the coin decides. SGLang's name is
    `speculative_accept_threshold_acc`."""
    synthetic_acceptance_rates: Annotated[Rates, BeforeValidator(_tuple_of)] | None = None
    """For benchmarks with dummy weights: **changes the text**, which then means nothing. Entry i is
    the probability that drafts 0 to i are all accepted, whatever the tokens, e.g.
    `[0.73, 0.52, 0.35]`. For trees, entry i has the probabilities that a path of i drafts continues
    to its last node's first child, second child and so on, e.g. `[[0.6, 0.2], [0.5, 0.2, 0.1]]`."""

    counts_on_device: ClassVar[bool] = False  # only the device knows how many drafts there are
    # Whether the user's code drafts, perhaps differently on each rank of a model.
    runs_users_code: ClassVar[bool] = False
    # Whether a draft comes with the probability that its source gave it.
    drafts_have_probabilities: ClassVar[bool] = True
    # Why a round cannot start before the host has read the last one's tokens.
    why_no_overlap: ClassVar[str | None] = None
    renamed: ClassVar[Mapping[str, Renamed]] = SPECULATIVE_RENAMED
    ignored: ClassVar[Ignored] = SPECULATIVE_IGNORED

    def __init__(self, /, **options: Any) -> None:
        named = with_lower_bounds(self.with_our_names(options))
        window = named.get("acceptance_rate_window_size")
        if type(window) is int and window == 0:  # by which TensorRT-LLM says that both are off
            named |= {"acceptance_rate_window_size": None, "acceptance_rate_threshold": None}
        if named.get("enable_adaptive_verification") is True and named.get("adaptive") is None:
            named["adaptive"] = {}
        if named.get("max_total_draft_tokens") is None:
            named["max_total_draft_tokens"] = self._default_num_nodes(named)
        try:
            super().__init__(**named)
        except ConfigError as error:
            raise ConfigError(error.lines + _counted_root(options, error.lines)) from error

    @classmethod
    def with_our_names(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        if options.get(ADAPTIVE_FILE) is not None:
            options = {name: each for name, each in options.items() if name != ADAPTIVE}
        rates = options.get("synthetic_acceptance_rates")
        if rates and options.get("rejection_sample_method") == "synthetic":  # vLLM says it twice
            options = {**options, "rejection_sample_method": None}
        renamed = super().with_our_names(options)
        is_chain = options.get(NUM_CHILDREN, 1) == 1 and "eagle_choices" not in options
        if NUM_NODES in options and is_chain:
            renamed.setdefault("max_draft_len", renamed.get("max_total_draft_tokens"))
        return renamed

    def as_options(self) -> dict[str, Any]:
        return super().as_options() | {"decoding_type": self.decoding_type}

    @classmethod
    def _default_num_nodes(cls, options: Mapping[str, Any]) -> Any:
        """`max_total_draft_tokens` where it is not given."""
        length = options.get("max_draft_len")
        return length if type(length) is int and length > 0 else None

    @field_validator("max_draft_len", mode="before")
    @classmethod
    def _check_draft_len(cls, max_draft_len: object) -> object:
        is_int = type(max_draft_len) is int
        if max_draft_len is None or (is_int and max_draft_len not in range(1, MAX_DRAFT_LEN + 1)):
            raise ValueError(
                f"{cls.__name__} needs an integer from 1 to {MAX_DRAFT_LEN}, the drafts of a "
                "round; plain decoding is speculative_config: null"
            )
        return max_draft_len

    @field_validator("adaptive", mode="plain")
    @classmethod
    def _parse_adaptive(cls, adaptive: object, info: ValidationInfo) -> AdaptiveConfig | None:
        if adaptive is None or "max_draft_len" not in info.data:
            return None
        return AdaptiveConfig.parse(adaptive, info.data["max_draft_len"])

    @field_validator("draft_len_schedule")
    @classmethod
    def _check_schedule(
        cls, schedule: dict[int, int] | None, info: ValidationInfo
    ) -> dict[int, int] | None:
        max_draft_len = info.data.get("max_draft_len")
        if schedule is None or max_draft_len is None:
            return schedule
        return checked_schedule(schedule, max_draft_len, info.data.get("draft_len_schedule_keys"))

    @check
    def _check_draft_lens(self) -> Iterator[str]:
        schedule = self.draft_len_schedule
        if schedule is None and self.draft_len_schedule_keys is not None:
            yield (
                f"draft_len_schedule_keys = {self.draft_len_schedule_keys!r} needs "
                "draft_len_schedule"
            )
        if schedule and self.max_concurrency:
            yield (
                f"max_concurrency = {self.max_concurrency} and draft_len_schedule = {schedule} "
                f"are exclusive; {{1: {self.max_draft_len}, {self.max_concurrency + 1}: 0}} "
                "is max_concurrency as a schedule"
            )

    @check
    def _check_candidate_trees(self) -> Iterator[str]:
        if self.adaptive is not None and self.adaptive.trees and not self.mixes_trees:
            yield (
                "adaptive.candidate_trees needs use_dynamic_tree: true with dynamic_tree_max_topK "
                "above 1, and draft weights (Draft_Target, Eagle, Eagle3 or MTP)"
            )
        if self.mixes_trees and self.draft_len_schedule is not None:
            yield (
                f"draft_len_schedule = {self.draft_len_schedule} is refused: with adaptive trees "
                "a draft length does not limit the work of a round; use adaptive's slots"
            )

    @check
    def _check_budget(self) -> Iterator[str]:
        adaptive, named, reasons = self.adaptive, "enable_adaptive_verification = True", []
        if self.verify_budget is not None:
            named = f"verify_budget = {self.verify_budget:g}"
            if adaptive is not None:
                is_verifying = self.enable_adaptive_verification
                other = "enable_adaptive_verification" if is_verifying else "adaptive"
                reasons.append(f"{other} also says what is verified")
        elif not self.enable_adaptive_verification or adaptive is None:
            return
        elif not adaptive.is_cost_model:
            reasons.append("it needs adaptive's cost_model, and ema has rounds of equal windows")
        elif (number := len(self.shapes.budgets)) > MAX_BUDGETS:
            reasons.append(
                f"it compares {MAX_BUDGETS} kinds of rounds at most, and candidate_steps make "
                f"{number}: give fewer"
            )
        elif adaptive.draft_lens[-1] < 3:
            reasons.append("it needs candidate_steps of 3 or more: shorter drafts gain nothing")
        if self.verify_budget is None and self.draft_len_schedule is not None:
            reasons.append("draft_len_schedule also says what is verified; use adaptive's slots")
        if self.drafts_trees:
            reasons.append(
                "requests share the rows of chains only, not of draft trees; use a chain"
            )
        if self.use_rejection_sampling:
            reasons.append(
                "with use_rejection_sampling = True a choice by the drafts' probabilities would "
                "change the distribution of the text"
            )
        if reasons:
            yield f"{named} is refused: {'; '.join(reasons)}"

    @check
    def _check_round_times(self) -> Iterator[str]:
        if self.round_times_path and (self.adaptive is None or not self.adaptive.is_cost_model):
            yield (
                f"round_times_path = {self.round_times_path!r} is refused: only adaptive's "
                "cost_model compares times; accepted: null"
            )

    @check
    def _check_pauses(self) -> Iterator[str]:
        rounds = self.max_rejected_rounds
        if "max_rejected_rounds" in self.model_fields_set and rounds and not self.may_pause:
            yield (
                f"max_rejected_rounds = {rounds} is refused: drafts that are made in the target's "
                "round cost the same for a request that pauses; accepted: null"
            )

    @check
    def _check_probabilities(self) -> Iterator[str]:
        for name, only in (("use_rejection_sampling", False), ("draft_sampling", "coupled")):
            if not self.drafts_have_probabilities and getattr(self, name) != only:
                yield (
                    f"{name} = {getattr(self, name)!r} is refused: these drafts have no "
                    "probabilities to accept against; they are compared with the target's tokens; "
                    f"accepted: {only!r}"
                )

    @check
    def _check_acceptance(self) -> Iterator[str]:
        threshold, window = self.acceptance_rate_threshold, self.acceptance_rate_window_size
        if (threshold is None) != (window is None):
            yield (
                f"acceptance_rate_threshold = {threshold} and acceptance_rate_window_size = "
                f"{window} need each other"
            )
        if self.use_rejection_sampling and self.draft_sampling == "greedy":
            yield (
                "draft_sampling = 'greedy' contradicts use_rejection_sampling = True, which draws "
                "its drafts from the draft model's distribution; leave one of them out"
            )
        thresholds = self.threshold_single, self.threshold_acc
        if thresholds != (1.0, 1.0) and not (self.use_rejection_sampling and self.drafts_trees):
            yield (
                f"threshold_single = {thresholds[0]} and threshold_acc = {thresholds[1]} need "
                "use_rejection_sampling: true and a draft tree; accepted: 1.0"
            )
        rates = self.synthetic_acceptance_rates
        if problem := rates and _rate_problem(rates, is_tree=self.drafts_trees):
            yield f"synthetic_acceptance_rates = {shown(rates)}: {problem}; {NO_BENCHMARK}"
        elif rates is not None and len(rates) != self.max_draft_len:
            yield (
                f"synthetic_acceptance_rates = {rates} has length {len(rates)}, not max_draft_len "
                f"= {self.max_draft_len}: one probability for each draft; {NO_BENCHMARK}"
            )
        if rates is not None and self.use_rejection_sampling:
            yield (
                f"synthetic_acceptance_rates = {rates} and use_rejection_sampling = True are "
                f"exclusive, because each decides what is accepted; {NO_BENCHMARK}"
            )

    @check
    def _check_num_nodes(self) -> Iterator[str]:
        total = self.max_total_draft_tokens
        if not self.drafts_trees and total != self.max_draft_len:
            yield (
                f"max_total_draft_tokens = {total} is refused: drafts are a chain of max_draft_len "
                f"= {self.max_draft_len} unless the options ask for a tree"
            )

    def check_code(self) -> None:
        """Raises ValueError when code that the options name cannot be imported."""

    @property
    def drafts_trees(self) -> bool:
        """Whether the drafts of a round may have branches."""
        return False

    @property
    def mixes_trees(self) -> bool:
        """Whether rounds choose between chains and trees."""
        return False

    def tree_of(self, depth: int) -> DraftShape:
        """The largest tree of this depth, where drafts are trees."""
        nodes = self.max_total_draft_tokens or depth
        return DraftShape(depth, nodes, nodes)

    @cached_property
    def shapes(self) -> DraftShapes:
        """What a round's drafts look like, by tier."""
        if self.drafts_trees:
            trees = map(self.tree_of, range(1, self.max_draft_len + 1))
            return DraftShapes([NO_DRAFTS, *trees], narrows=self.runs_users_code)
        if self.enable_adaptive_verification and self.adaptive is not None:
            return DraftShapes.with_budgets(self.max_draft_len, self.adaptive.draft_lens)
        return DraftShapes.chains(self.max_draft_len, self.verify_budget)

    def text_search(self, max_batch_size: int) -> TextSearch | None:
        """How drafts are looked up in texts; None: they are not."""
        return None

    @property
    def relaxed_rule(self) -> RelaxedRule | None:
        """How drafts are accepted that the target has not chosen; None: they are not."""
        return None

    @property
    def lossy_option(self) -> str | None:
        """The option that lets drafts be accepted that the target would not draw, if one does."""
        if self.relaxed_rule is not None:
            return "use_relaxed_acceptance_for_thinking"
        if self.synthetic_acceptance_rates is not None:
            return "synthetic_acceptance_rates"
        lowered = [
            name for name in ("threshold_single", "threshold_acc") if getattr(self, name) < 1
        ]
        return lowered[0] if lowered else None

    @property
    def may_pause(self) -> bool:
        """Whether a request that pauses saves the time of its drafts: they have launches of their
        own or are the user's code's."""
        return not getattr(self, "draft_target_one_model", not self.runs_users_code)

    @property
    def length_varies(self) -> bool:
        """Whether rounds of one engine may have different draft lengths, by their load."""
        limits = self.draft_len_schedule, self.max_concurrency, self.acceptance_rate_threshold
        return self.adaptive is not None or any(limit is not None for limit in limits)


class DraftModelDecodingConfig(DecodingBaseConfig):
    """The options of the decoding types that have draft weights."""

    speculative_model: PathText
    """Folder of the draft model or head, GGUF file of a model, or zoo name. `speculative_model_dir`
    is its old name, `speculative_draft_model_path` SGLang's."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` fills the draft weights with random numbers."""
    speculative_token_map: PathText | None = None
    """File with the ids of frequent tokens, to which drafts are limited (FR-Spec): a smaller output
    layer drafts faster. What `torch.save` wrote (a tensor or a list), `.json` or `.safetensors`.
    Refused for EAGLE-3 heads with a vocabulary of their own."""
    draft_window_size: PositiveInt | None = None
    """Tokens that the draft network sees, its own included: fewer help on texts that are longer
    than those it was trained on, and take less time. null: as its `config.json` says. Only drafts
    change, no text. SGLang's name is `speculative_draft_window_size`."""
    draft_sink_size: PositiveInt | None = None
    """First tokens of a text that the draft network sees besides those of `draft_window_size`,
    without which it is refused. Both then count whole pages. null: none. SGLang's name is
    `speculative_draft_sink_size`."""

    null_is_default: ClassVar[frozenset[str]] = frozenset(("load_format",))

    @check
    def _check_sink(self) -> Iterator[str]:
        if self.draft_sink_size is not None and self.draft_window_size is None:
            yield f"draft_sink_size = {self.draft_sink_size} needs draft_window_size"

    @check
    def _check_draft_backend(self) -> Iterator[str]:
        """Why the backend does not draft."""
        backend: str = getattr(self, "draft_backend", "torch")
        if backend == "torch":
            return
        reasons, is_model = [], hasattr(self, "draft_target_one_model")
        one_model = "draft_target_one_model" if is_model else "eagle3_one_model"
        if getattr(self, one_model):
            reasons.append(f"{one_model} = True drafts in the target's own round")
        if self.drafts_trees:
            reasons.append("its network drafts chains, not trees")
        if self.speculative_token_map is not None:
            reasons.append("its network has no token map")
        if getattr(self, "kv_cache_dtype", None) == "fp8":
            reasons.append("its network reads no FP8 KV cache")
        if is_model and getattr(self, "sa_config", None) is not None:
            reasons.append(
                "its network reads two tokens to draft, and sa_config needs all new ones"
            )
        if reasons:
            yield f"draft_backend = {backend!r} is refused: {'; '.join(reasons)}; accepted: 'torch'"


def _rate_problem(rates: Rates, *, is_tree: bool) -> str | None:
    """What is wrong with synthetic acceptance rates; None: nothing."""
    if any(isinstance(each, tuple) != is_tree for each in rates):
        form = "a list of probabilities for each depth" if is_tree else "one for each draft"
        return f"of a {'tree' if is_tree else 'chain'} they are {form}"
    numbers = [number for each in rates for number in (each if isinstance(each, tuple) else [each])]
    if not all(0 <= number <= 1 for number in numbers):
        return "probabilities are in 0..1"
    if any(sum(each) > 1 + 1e-9 for each in rates if isinstance(each, tuple)):
        return "those of one depth exclude each other, so they add up to 1 at most"
    if not is_tree and any(later > earlier for earlier, later in pairwise(numbers)):
        return "they cannot rise, because a draft is accepted only with all before it"
    return None


def _counted_root(options: Mapping[str, Any], lines: list[str]) -> list[str]:
    """What else must be said to a user of SGLang's names, who knows another number."""
    total = options.get(NUM_NODES)
    if type(total) is not int or not any("max_total_draft_tokens" in line for line in lines):
        return []
    return [f"{NUM_NODES} = {total} counts the root: it is max_total_draft_tokens = {total - 1}"]
