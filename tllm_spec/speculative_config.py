"""How drafts are made: one class for each decoding type, named as in TensorRT-LLM.

These are plain settings. Which drafter, engines and managers a class stands for is not known here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    PositiveInt,
    Strict,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tllm_spec.adaptive_config import AdaptiveConfig, Probability
from tllm_spec.config_base import ConfigError, ConfigModel
from tllm_spec.import_path import make_object
from tllm_spec.option_checks import NotServed, shown

PathText = Annotated[
    str, BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path)
]

logger = logging.getLogger(__name__)

NO_TREE = "drafts are chains; a chain has max_draft_len tokens"
NO_GATE = (
    "TensorRT-LLM's older names; use acceptance_rate_threshold with acceptance_rate_window_size"
)
NO_DRAFT_MODEL = "this decoding type has no draft model"
NO_DRAFT_PROBABILITY = (
    "these drafts have no probabilities to accept against; equality with the target's token decides"
)
BENCHMARK_DEVICE = "synthetic acceptance is a benchmark device that changes the text"


def _tuple_of(sequence: object) -> object:
    """A list of YAML as the tuple that a frozen object holds. Raises ValueError for what has no
    order."""
    if not isinstance(sequence, (list, tuple)):
        raise ValueError("a list is needed")
    return tuple(sequence)


class DecodingBaseConfig(ConfigModel):
    """What every decoding type has.

    `draft_len_schedule` maps batch sizes to draft lengths. It has one meaning here: the entry of
    the largest key not above the batch size holds, and a batch smaller than every key uses
    `max_draft_len`. TensorRT-LLM reads the same mapping in two ways; its other reading (each key is
    the *upper* end of a range, and 0 above the largest key) is not available: for "4 drafts up to 8
    requests, then none" write `{1: 4, 9: 0}`.

    `adaptive` (SGLang's) lets the draft length of each round follow acceptance and load;
    docs/adaptive.md has all its keys. `max_draft_len` is then the longest that it may choose.

    `acceptance_rate_threshold` with `acceptance_rate_window_size`: rounds have no drafts once fewer
    of the drafts of so many rounds were accepted; one window of rounds in 100 tries again, where
    TensorRT-LLM never does.

    `max_rejected_rounds` (ours): a request whose drafts were all rejected in about so many rounds
    is not drafted for in the next ones, each pause twice as long as the last; an accepted draft
    ends that. None: never. It has no effect, and is refused, where drafts are made inside the
    target's forward. With `adaptive` its `mark_patience` says the same.

    `synthetic_acceptance_rates` (ours) is a benchmark device for dummy weights, whose drafts would
    never be accepted. **It changes the text, which then means nothing.** Entry i is the probability
    that draft i of a round is accepted, and with it all before it, whatever the tokens are:
    P(accepted > i), as benchmarks print it position by position, e.g. `[0.73, 0.52, 0.35]`. It
    stands in for the comparison with the target's token."""

    decoding_type: str
    max_draft_len: PositiveInt
    adaptive: AdaptiveConfig | None = None
    max_rejected_rounds: PositiveInt | None = 8
    max_concurrency: PositiveInt | None = None
    draft_len_schedule: dict[int, int] | None = None
    acceptance_rate_threshold: Probability | None = None
    acceptance_rate_window_size: PositiveInt | None = None
    use_rejection_sampling: bool = False
    draft_sampling: Literal["coupled", "greedy"] = "coupled"
    synthetic_acceptance_rates: Annotated[tuple[float, ...], BeforeValidator(_tuple_of)] | None = (
        None
    )

    overlaps_plain_rounds: ClassVar[bool] = (
        True  # those of draft length 0, whatever holds for the others
    )
    not_served: ClassVar[Mapping[str, NotServed]] = {
        "max_total_draft_tokens": NotServed((None,), NO_TREE),
        "acceptance_length_threshold": NotServed((None,), NO_GATE),
        "acceptance_window": NotServed((None, 0), NO_GATE),
        "allow_advanced_sampling": NotServed(
            (True, False), "every sampling option works with speculation"
        ),
        "enable_penalty": NotServed((True, False), "penalties always work with speculation"),
        "advanced_sampling_mode": NotServed(("full",), "no sampling filter is left out"),
    }

    @field_validator("max_draft_len", mode="before")
    @classmethod
    def _check_draft_len(cls, max_draft_len: object) -> object:
        if max_draft_len is None or (type(max_draft_len) is int and max_draft_len < 1):
            raise ValueError(
                f"{cls.__name__} needs an integer of 1 or more, the drafts of a round; "
                "plain decoding is speculative_config: null"
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
    def _sort_schedule(cls, schedule: dict[int, int] | None) -> dict[int, int] | None:
        if schedule is None:
            return None
        if not schedule:
            raise ValueError("it has no entry; null means no schedule")
        if min(schedule) < 1 or min(schedule.values()) < 0:
            raise ValueError("batch sizes start at 1 and draft lengths at 0")
        return dict(sorted(schedule.items()))

    @field_validator("synthetic_acceptance_rates")
    @classmethod
    def _check_rates(cls, rates: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if rates is not None and not all(0 <= rate <= 1 for rate in rates):
            raise ValueError(f"probabilities lie in 0..1; {BENCHMARK_DEVICE}")
        if rates is not None and any(later > earlier for earlier, later in pairwise(rates)):
            raise ValueError(
                "they cannot rise, as a draft is accepted only with all before it; "
                f"{BENCHMARK_DEVICE}"
            )
        return rates

    @model_validator(mode="after")
    def _check_together(self) -> DecodingBaseConfig:
        schedule = self.draft_len_schedule
        if schedule and self.max_concurrency:
            raise ValueError(
                f"max_concurrency = {self.max_concurrency} and draft_len_schedule = {schedule} are "
                "exclusive;"
                f" {{1: {self.max_draft_len}, {self.max_concurrency + 1}: 0}} says the first as a "
                "schedule"
            )
        if schedule and max(schedule.values()) > self.max_draft_len:
            raise ValueError(
                f"draft_len_schedule = {schedule} exceeds max_draft_len = {self.max_draft_len}"
            )
        if (
            self.overlaps
            and "max_rejected_rounds" in self.model_fields_set
            and self.max_rejected_rounds
        ):
            raise ValueError(
                f"max_rejected_rounds = {self.max_rejected_rounds} is refused: drafts that are "
                "made in the target's round cost the same for a request that pauses; accepted: "
                "null"
            )
        if self.adaptive and "max_rejected_rounds" in self.model_fields_set:
            raise ValueError(
                f"max_rejected_rounds = {self.max_rejected_rounds} and adaptive are exclusive; "
                "adaptive.mark_patience "
                "says the first"
            )
        if (self.acceptance_rate_threshold is None) != (self.acceptance_rate_window_size is None):
            raise ValueError(
                f"acceptance_rate_threshold = {self.acceptance_rate_threshold} and "
                "acceptance_rate_window_size = "
                f"{self.acceptance_rate_window_size} need each other"
            )
        if self.use_rejection_sampling and self.draft_sampling == "greedy":
            raise ValueError(
                "draft_sampling = 'greedy' contradicts use_rejection_sampling = True, which draws "
                "its drafts "
                "from the draft model's distribution; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_synthetic(self) -> DecodingBaseConfig:
        rates = self.synthetic_acceptance_rates
        if rates is None:
            return self
        if len(rates) != self.max_draft_len:
            raise ValueError(
                f"synthetic_acceptance_rates = {rates} has length {len(rates)}, not max_draft_len "
                "= "
                f"{self.max_draft_len}: one probability for each draft; {BENCHMARK_DEVICE}"
            )
        if self.use_rejection_sampling:
            raise ValueError(
                f"synthetic_acceptance_rates = {rates} and use_rejection_sampling = True are "
                "exclusive, as "
                f"each is a rule of its own for what is accepted; {BENCHMARK_DEVICE}"
            )
        return self

    @property
    def why_no_overlap(self) -> str | None:
        """Why a round cannot start before the host has read the last one's tokens; None: it can."""
        return f"{self.decoding_type} drafts are made on the host from tokens"

    @property
    def overlaps(self) -> bool:
        """Whether rounds may overlap with this way of drafting."""
        return self.why_no_overlap is None


HOST_DRAFTS_NOT_SERVED: Mapping[str, NotServed] = {
    **DecodingBaseConfig.not_served,
    "speculative_model": NotServed((None,), NO_DRAFT_MODEL),
    "speculative_model_dir": NotServed((None,), NO_DRAFT_MODEL),
    "load_format": NotServed((None,), NO_DRAFT_MODEL),
    "use_rejection_sampling": NotServed((False,), NO_DRAFT_PROBABILITY),
    "draft_sampling": NotServed(("coupled",), NO_DRAFT_PROBABILITY),
}


class NGramDecodingConfig(DecodingBaseConfig):
    """Drafts looked up in the tokens seen so far (prompt lookup).

    `is_public_pool` is False here and True in TensorRT-LLM: a public pool proposes one user's text
    to another, who can tell from timing and statistics that it was there. Set it where users may
    know that. `max_pool_entries` bounds the pool, which TensorRT-LLM lets grow for ever; the oldest
    entries go first."""

    decoding_type: Literal["NGram"] = "NGram"
    max_matching_ngram_size: PositiveInt = 2
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = False
    max_pool_entries: PositiveInt = 1_000_000

    not_served: ClassVar[Mapping[str, NotServed]] = HOST_DRAFTS_NOT_SERVED


class DraftModelDecodingConfig(DecodingBaseConfig):
    """What the decoding types with draft weights share: the weights, and how drafts are drawn from
    them.

    At temperature > 0 `draft_sampling` says how a draft is drawn: `coupled`, with the same noise as
    the target's own token at that position, or `greedy`, the draft model's best token.
    `use_rejection_sampling` replaces the comparison of tokens by the classical rule: accept with
    probability min(1, p/q), else draw from (p - q)+."""

    speculative_model: PathText = Field(
        validation_alias=AliasChoices("speculative_model", "speculative_model_dir")
    )
    load_format: Literal["auto", "dummy"] = "auto"

    @field_validator("load_format", mode="before")
    @classmethod
    def _null_means_auto(cls, load_format: object) -> object:
        return "auto" if load_format is None else load_format


class DraftTargetDecodingConfig(DraftModelDecodingConfig):
    """Drafts from a smaller model with the target's tokenizer.

    `draft_target_one_model`: True puts the draft model into the target's forward, so that a round
    is one CUDA graph and rounds overlap. False runs it in its own engine, between scheduling and
    the target's forward."""

    decoding_type: Literal["Draft_Target"] = "Draft_Target"
    draft_target_one_model: bool = False

    @property
    def why_no_overlap(self) -> str | None:
        one_model = self.draft_target_one_model
        return (
            None if one_model else "the draft model runs in an engine of its own before the target"
        )


EAGLE3_NOT_SERVED: Mapping[str, NotServed] = {
    **DecodingBaseConfig.not_served,
    "eagle3_model_arch": NotServed(("llama3",), "only heads with Llama's layer are served"),
    "eagle_choices": NotServed((None,), NO_TREE),
    "use_dynamic_tree": NotServed((False,), NO_TREE),
    "dynamic_tree_max_topK": NotServed((None,), NO_TREE),
    "max_non_leaves_per_layer": NotServed((None,), NO_TREE),
    "num_eagle_layers": NotServed(
        (None,),
        "the head has the layers of its checkpoint (TensorRT-LLM has deprecated this option)",
    ),
    "greedy_sampling": NotServed(
        (True,),
        "SamplingParams say how each request is sampled, draft_sampling how its drafts are drawn",
    ),
    "posterior_threshold": NotServed((None,), "a draft is never accepted for being merely likely"),
    "sa_config": NotServed((None,), "the head's drafts are not mixed with a suffix automaton's"),
}


class Eagle3DecodingConfig(DraftModelDecodingConfig):
    """Drafts from an EAGLE-3 head, a small model that reads hidden states of the target.

    `eagle3_one_model`: True puts the head into the target's forward, so that a round is one CUDA
    graph. False runs it in launches of its own after the target's forward, so that a round is two.
    Rounds overlap on both paths.

    `eagle3_layers_to_capture`: ids of the target layers, counted from 0, whose **outputs** the head
    reads; kept in ascending order. None: a low, a middle and a high layer. That the ids lie inside
    the model, and that the head has as many inputs, is checked where the models are known."""

    decoding_type: Literal["Eagle3"] = "Eagle3"
    eagle3_one_model: bool = True
    eagle3_layers_to_capture: Annotated[tuple[int, ...], Strict(False)] | None = None
    eagle3_model_arch: Literal["llama3"] = "llama3"

    not_served: ClassVar[Mapping[str, NotServed]] = EAGLE3_NOT_SERVED

    @field_validator("eagle3_layers_to_capture")
    @classmethod
    def _sort_layers(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if layers is None:
            return None
        if not layers or min(layers) < 0:
            raise ValueError(
                "one or more layer ids are needed, counted from 0; the outputs of these layers are "
                "captured, and null means a low, a middle and a high one"
            )
        return tuple(sorted(set(layers)))

    @property
    def why_no_overlap(self) -> str | None:
        return None


class UserProvidedDecodingConfig(DecodingBaseConfig):
    """Drafts from the user's own object, or from a class that is named by its import path (for
    YAML).

    `drafter` and `resource_manager` are objects, or "package.module:ClassName"; a named class is
    called with `drafter_args` / `resource_manager_args`."""

    decoding_type: Literal["User_Provided"] = "User_Provided"
    drafter: Any
    drafter_args: dict[str, Any] | None = None
    resource_manager: Any = None
    resource_manager_args: dict[str, Any] | None = None

    overlaps_plain_rounds: ClassVar[bool] = (
        False  # the objects see each round end before the next one begins
    )
    not_served: ClassVar[Mapping[str, NotServed]] = HOST_DRAFTS_NOT_SERVED

    @model_validator(mode="after")
    def _check_objects(self) -> UserProvidedDecodingConfig:
        if self.drafter is None:
            raise ValueError('drafter = None: an object or "package.module:ClassName" is needed')
        for name in ("drafter", "resource_manager"):
            given, arguments = getattr(self, name), getattr(self, f"{name}_args")
            if isinstance(given, str) and not all(given.partition(":")):
                raise ValueError(
                    f'{name} = {given!r} is no import path; write "package.module:ClassName"'
                )
            if arguments and not isinstance(given, str):
                raise ValueError(f"{name}_args = {arguments} needs {name} to be an import path")
        return self

    def make_drafter(self) -> Any:
        """The drafter object. Raises ValueError when its import path or arguments lead nowhere."""
        return make_object("drafter", self.drafter, self.drafter_args)

    def make_resource_manager(self) -> Any:
        """The resource manager object or None. Raises ValueError as `make_drafter`."""
        return make_object("resource_manager", self.resource_manager, self.resource_manager_args)


CONFIG_OF_TYPE: Mapping[str, type[DecodingBaseConfig]] = {
    "NGram": NGramDecodingConfig,
    "Draft_Target": DraftTargetDecodingConfig,
    "DraftTarget": DraftTargetDecodingConfig,
    "Eagle3": Eagle3DecodingConfig,
    "Eagle": Eagle3DecodingConfig,
    "User_Provided": UserProvidedDecodingConfig,
    "UserProvided": UserProvidedDecodingConfig,
}
TYPES_SERVED = "accepted: NGram, Draft_Target, Eagle3, User_Provided"
TYPES_NOT_SERVED = frozenset(
    ["MTP", "Medusa", "Lookahead", "SA", "PARD", "DFlash", "DSpark", "SaveState", "AUTO"]
)


def speculative_config_from(value: object) -> object:
    """A mapping becomes the class that its `decoding_type` names; the field itself checks
    everything else."""
    if not isinstance(value, Mapping):
        return value
    options = dict(value)
    decoding_type = options.pop("decoding_type", None)
    if not isinstance(decoding_type, str):
        raise ConfigError(
            [f"decoding_type = {shown(decoding_type)} is not a known type; {TYPES_SERVED}"]
        )
    if decoding_type == "Eagle":  # as TensorRT-LLM's PyTorch backend does
        logger.warning("decoding_type = 'Eagle' is served as Eagle3")
    if decoding_type in CONFIG_OF_TYPE:
        return CONFIG_OF_TYPE[decoding_type](**options)
    problem = "is not served yet" if decoding_type in TYPES_NOT_SERVED else "is not a known type"
    raise ConfigError([f"decoding_type = {shown(decoding_type)} {problem}; {TYPES_SERVED}"])


SpeculativeConfig = Annotated[DecodingBaseConfig, BeforeValidator(speculative_config_from)]
