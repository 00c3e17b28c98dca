"""How drafts are made: one class for each decoding type, named as in TensorRT-LLM.

These are plain settings. `executor/speculative/modes.py` says what runs for each class.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Strict,
    field_validator,
    model_validator,
)

from tllm_spec.config_base import ConfigError
from tllm_spec.draft_shape import NO_DRAFTS, DraftShape, DraftShapes
from tllm_spec.draft_tree_config import MAX_NODES, TREE_NAMES, DraftTreeDecodingConfig
from tllm_spec.import_path import make_object
from tllm_spec.option_checks import NotServed, shown
from tllm_spec.speculative_base import DECODING_NOT_SERVED, NO_TREE, RelaxedRule
from tllm_spec.speculative_base import DecodingBaseConfig as DecodingBaseConfig
from tllm_spec.speculative_base import DraftModelDecodingConfig as DraftModelDecodingConfig

NO_DRAFT_MODEL = "this decoding type has no draft model"
NO_DRAFT_PROBABILITY = (
    "these drafts have no probabilities to accept against; they are compared with the target's "
    "tokens"
)

HOST_DRAFTS_NOT_SERVED: Mapping[str, NotServed] = {
    **DECODING_NOT_SERVED,
    "speculative_model": NotServed((None,), NO_DRAFT_MODEL),
    "load_format": NotServed((None,), NO_DRAFT_MODEL),
    "speculative_token_map": NotServed((None,), NO_DRAFT_MODEL),
    "use_rejection_sampling": NotServed((False,), NO_DRAFT_PROBABILITY),
    "draft_sampling": NotServed(("coupled",), NO_DRAFT_PROBABILITY),
}
EAGLE_NOT_SERVED: Mapping[str, NotServed] = {
    **DECODING_NOT_SERVED,
    "eagle3_model_arch": NotServed(("llama3",), "only heads with Llama's layer are served"),
    "max_non_leaves_per_layer": NotServed((None,), NO_TREE),
    "num_eagle_layers": NotServed(
        (None,),
        "the head has the layers of its checkpoint (TensorRT-LLM has deprecated this option)",
    ),
    "greedy_sampling": NotServed(
        (True,),
        "SamplingParams say how each request is sampled, draft_sampling how its drafts are drawn",
    ),
    "posterior_threshold": NotServed((None,), "drafts are not accepted for being merely likely"),
}
RELAXED_OPTIONS = frozenset(
    ("relaxed_topk", "relaxed_delta", "begin_thinking_phase_token", "end_thinking_phase_token")
)
MTP_NOT_SERVED: Mapping[str, NotServed] = {
    **DECODING_NOT_SERVED,
    "speculative_model": NotServed((None,), "the module is in the target's checkpoint"),
    "load_format": NotServed((None,), "the module is loaded as the target is"),
    "speculative_token_map": NotServed((None,), "the module has the target's output layer"),
    "use_dynamic_tree": NotServed((False,), NO_TREE),
    "dynamic_tree_max_topK": NotServed((None,), NO_TREE),
}


class NGramDecodingConfig(DecodingBaseConfig):
    """Drafts looked up in the tokens seen so far (prompt lookup)."""

    decoding_type: Literal["NGram"] = "NGram"
    """Prompt lookup: copies what followed the same tokens before."""
    max_matching_ngram_size: PositiveInt = 2
    """Longest run of last tokens that is looked up; shorter runs are tried after it."""
    is_keep_all: bool = True
    """Remember every continuation of a run, not only one."""
    is_use_oldest: bool = True
    """Propose the oldest continuation of a run, not the newest."""
    is_public_pool: bool = False
    """Share the pool between requests. A public pool proposes one user's text to another, who can
    tell from timing that it was there. True is TensorRT-LLM's default."""
    max_pool_entries: PositiveInt = 1_000_000
    """Entries of the pool; the oldest ones go first. In TensorRT-LLM it grows without a limit."""

    not_served: ClassVar[Mapping[str, NotServed]] = HOST_DRAFTS_NOT_SERVED
    old_names: ClassVar[Mapping[str, str]] = {
        **DecodingBaseConfig.old_names,
        "prompt_lookup_num_tokens": "max_draft_len",
    }


class DraftTargetDecodingConfig(DraftTreeDecodingConfig):
    """Drafts from a smaller model with the target's tokenizer."""

    decoding_type: Literal["Draft_Target"] = "Draft_Target"
    """A smaller model with the target's tokenizer."""
    draft_target_one_model: bool = False
    """True runs the draft model inside the target's forward: a round is one CUDA graph. False runs
    it in its own engine before the forward. Rounds overlap either way. True is the default in newer
    versions of TensorRT-LLM."""

    @property
    def may_pause(self) -> bool:
        return not self.draft_target_one_model


class EagleHeadDecodingConfig(DraftTreeDecodingConfig):
    """The options of the decoding types whose drafts come from a head on the target's hidden
    states. The names are TensorRT-LLM's."""

    eagle3_one_model: bool = True
    """True runs the head inside the target's forward: a round is one CUDA graph. False runs it in
    its own engine after the forward. Rounds overlap either way."""
    eagle3_layers_to_capture: Annotated[tuple[int, ...], Strict(False)] | None = None
    """Target layers, counted from 0, whose outputs an EAGLE-3 head reads. null: what the head's
    `config.json` says, else a low, a middle and a high layer."""
    eagle3_model_arch: Literal["llama3"] = "llama3"
    """Architecture of the head."""

    not_served: ClassVar[Mapping[str, NotServed]] = EAGLE_NOT_SERVED
    old_names: ClassVar[Mapping[str, str]] = TREE_NAMES

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
    def may_pause(self) -> bool:
        return False


class EagleDecodingConfig(EagleHeadDecodingConfig):
    """Drafts from an EAGLE-1 or EAGLE-2 head, a small model that reads the target's last hidden
    state. A folder with an EAGLE-3 head is served as `Eagle3`, as in TensorRT-LLM."""

    decoding_type: Literal["Eagle"] = "Eagle"
    """An EAGLE-1 or EAGLE-2 head: one layer that reads the target's last hidden state."""


class Eagle3DecodingConfig(EagleHeadDecodingConfig):
    """Drafts from an EAGLE-3 head, a small model that reads hidden states of the target."""

    decoding_type: Literal["Eagle3"] = "Eagle3"
    """An EAGLE-3 head: one layer that reads hidden states of the target."""


class MTPDecodingConfig(DecodingBaseConfig):
    """Drafts from the next-token-prediction modules in the target's own checkpoint."""

    decoding_type: Literal["MTP"] = "MTP"
    """The next-token-prediction module of the target's checkpoint (DeepSeek V3)."""
    mtp_eagle_one_model: bool = True
    """True runs the module inside the target's forward: a round is one CUDA graph. False runs it in
    its own engine after the forward. Rounds overlap either way."""

    use_mtp_vanilla: bool = False
    """Draft k of a round comes from module k of the checkpoint (`num_nextn_predict_layers` there),
    so `max_draft_len` is their number at most. False uses the first module for all drafts, as EAGLE
    does."""
    use_relaxed_acceptance_for_thinking: bool = False
    """**Lossy**: between the two thinking tokens, a greedy request also accepts a draft that is
    among the target's `relaxed_topk` best tokens and whose log probability is at most
    `relaxed_delta` below the best one's."""
    relaxed_topk: PositiveInt = 1
    """For relaxed acceptance. 1 accepts the best token only."""
    relaxed_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """For relaxed acceptance, in nats."""
    begin_thinking_phase_token: NonNegativeInt = 128798
    """Token id that begins the thinking phase. The default is DeepSeek R1's `<think>`."""
    end_thinking_phase_token: NonNegativeInt = 128799
    """Token id that ends it. The default is DeepSeek R1's `</think>`."""

    not_served: ClassVar[Mapping[str, NotServed]] = MTP_NOT_SERVED
    old_names: ClassVar[Mapping[str, str]] = {
        **DecodingBaseConfig.old_names,
        "num_nextn_predict_layers": "max_draft_len",
    }

    @model_validator(mode="after")
    def _check_relaxed(self) -> MTPDecodingConfig:
        given = sorted(RELAXED_OPTIONS & self.model_fields_set)
        if not self.use_relaxed_acceptance_for_thinking:
            changed = [
                name
                for name in given
                if getattr(self, name) != type(self).model_fields[name].default
            ]
            if changed:
                raise ValueError(
                    f"{', '.join(changed)}: for relaxed acceptance only; set "
                    "use_relaxed_acceptance_for_thinking: true or leave them out"
                )
            return self
        for name in ("use_rejection_sampling", "synthetic_acceptance_rates"):
            if value := getattr(self, name):
                raise ValueError(
                    f"use_relaxed_acceptance_for_thinking = True and {name} = {shown(value)} are "
                    "exclusive, because each decides what is accepted"
                )
        if self.begin_thinking_phase_token == self.end_thinking_phase_token:
            raise ValueError(
                f"begin_thinking_phase_token = {self.begin_thinking_phase_token} must not be "
                "end_thinking_phase_token"
            )
        return self

    @property
    def relaxed_rule(self) -> RelaxedRule | None:
        if not self.use_relaxed_acceptance_for_thinking:
            return None
        return RelaxedRule(
            self.relaxed_topk,
            self.relaxed_delta,
            self.begin_thinking_phase_token,
            self.end_thinking_phase_token,
        )

    @property
    def why_no_overlap(self) -> str | None:
        return None

    @property
    def may_pause(self) -> bool:
        return False


class UserProvidedDecodingConfig(DecodingBaseConfig):
    """Drafts from the user's own object, or from a class that is named by its import path."""

    decoding_type: Literal["User_Provided"] = "User_Provided"
    """Your own `Drafter`."""
    drafter: Any
    """A `Drafter` object, or the import path of its class as `package.module:ClassName`."""
    drafter_args: dict[str, Any] | None = None
    """Keyword arguments for a `drafter` named by its import path."""
    resource_manager: Any = None
    """A `ResourceManager` that the drafter is called with, or its import path."""
    resource_manager_args: dict[str, Any] | None = None
    """Keyword arguments for a `resource_manager` named by its import path."""

    # A user's drafter sees every round end before the next one begins.
    overlaps_plain_rounds: ClassVar[bool] = False
    serves_ranks: ClassVar[bool] = False
    not_served: ClassVar[Mapping[str, NotServed]] = HOST_DRAFTS_NOT_SERVED

    @property
    def drafts_trees(self) -> bool:
        return (self.max_total_draft_tokens or 0) > self.max_draft_len

    @cached_property
    def shapes(self) -> DraftShapes:
        nodes, lengths = self.max_total_draft_tokens or 0, range(1, self.max_draft_len + 1)
        if not self.drafts_trees:
            return super().shapes
        return DraftShapes([NO_DRAFTS, *(DraftShape(depth, nodes, nodes) for depth in lengths)])

    @model_validator(mode="after")
    def _check_tree(self) -> UserProvidedDecodingConfig:
        if self.drafts_trees and (self.max_total_draft_tokens or 0) > MAX_NODES:
            raise ValueError(
                f"max_total_draft_tokens = {self.max_total_draft_tokens} is more than {MAX_NODES}"
            )
        return self

    @model_validator(mode="after")
    def _check_objects(self) -> UserProvidedDecodingConfig:
        if self.drafter is None:
            raise ValueError('drafter = None: an object or "package.module:ClassName" is needed')
        for name in ("drafter", "resource_manager"):
            given, arguments = getattr(self, name), getattr(self, f"{name}_args")
            if isinstance(given, str) and not all(given.partition(":")):
                raise ValueError(
                    f'{name} = {given!r} is not an import path; write "package.module:ClassName"'
                )
            if arguments and not isinstance(given, str):
                raise ValueError(f"{name}_args = {arguments} needs {name} to be an import path")
        return self

    def make_drafter(self) -> Any:
        """The drafter object. Raises ValueError when its import path or arguments are wrong."""
        return make_object("drafter", self.drafter, self.drafter_args)

    def make_resource_manager(self) -> Any:
        """The resource manager object or None. Raises ValueError as `make_drafter` does."""
        return make_object("resource_manager", self.resource_manager, self.resource_manager_args)


CONFIG_OF_TYPE: Mapping[str, type[DecodingBaseConfig]] = {
    "NGram": NGramDecodingConfig,
    "Draft_Target": DraftTargetDecodingConfig,
    "DraftTarget": DraftTargetDecodingConfig,
    "Eagle3": Eagle3DecodingConfig,
    "Eagle": EagleDecodingConfig,
    "MTP": MTPDecodingConfig,
    "User_Provided": UserProvidedDecodingConfig,
    "UserProvided": UserProvidedDecodingConfig,
}
TYPES_SERVED = "accepted: NGram, Draft_Target, Eagle, Eagle3, MTP, User_Provided"
# TensorRT-LLM's other decoding types, with the classes that have them.
TYPES_NOT_SERVED: Mapping[str, str] = {
    "AUTO": "AutoDecodingConfig",
    "DFlash": "DFlashDecodingConfig",
    "DSpark": "DSparkDecodingConfig",
    "Lookahead": "LookaheadDecodingConfig",
    "Medusa": "MedusaDecodingConfig",
    "PARD": "PARDDecodingConfig",
    "SA": "SADecodingConfig",
    "SaveState": "SaveHiddenStatesDecodingConfig",
}


def type_refusal(decoding_type: object) -> str:
    """The sentence that refuses a decoding type."""
    is_known = isinstance(decoding_type, str) and decoding_type in TYPES_NOT_SERVED
    problem = "is not served yet" if is_known else "is not a known type"
    return f"decoding_type = {shown(decoding_type)} {problem}; {TYPES_SERVED}"


def speculative_config_from(value: object) -> object:
    """Turns a mapping into the class that its `decoding_type` names. Raises ConfigError."""
    if not isinstance(value, Mapping):
        return value
    options = dict(value)
    decoding_type = options.pop("decoding_type", None)
    if not isinstance(decoding_type, str) or decoding_type not in CONFIG_OF_TYPE:
        raise ConfigError([type_refusal(decoding_type)])
    return CONFIG_OF_TYPE[decoding_type](**options)


SpeculativeConfig = Annotated[DecodingBaseConfig, BeforeValidator(speculative_config_from)]
