"""How drafts are made: one class for each decoding type, named as in TensorRT-LLM.

These are plain settings. `executor/speculative/modes.py` says what runs for each class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    Strict,
    field_validator,
)

from tllm_spec.config.config_base import ConfigError, ConfigModel, PathText, check
from tllm_spec.config.draft_tree_config import DraftTreeDecodingConfig
from tllm_spec.config.draft_tree_config import NGramDecodingConfig as NGramDecodingConfig
from tllm_spec.config.draft_tree_config import SAEnhancerConfig as SAEnhancerConfig
from tllm_spec.config.draft_tree_config import (
    UserProvidedDecodingConfig as UserProvidedDecodingConfig,
)
from tllm_spec.config.engine_config import KVCacheType
from tllm_spec.config.neighbours import SPECULATIVE_RENAMED
from tllm_spec.config.option_checks import (
    absent_reason,
    many_unknown,
    name_here,
    refusals,
    shown,
    unknown_options,
    with_our_names,
)
from tllm_spec.config.speculative_base import DecodingBaseConfig as DecodingBaseConfig
from tllm_spec.config.speculative_base import DraftModelDecodingConfig, RelaxedRule
from tllm_spec.config.text_search import MAX_MATCH, GlobalPoolConfig, TextSearch

# Decoding types whose draft network makes all drafts of a round in one forward, from mask tokens.


class PARDDecodingConfig(DraftTreeDecodingConfig, DraftModelDecodingConfig):
    """Drafts from a smaller model with the target's tokenizer that was tuned to answer at mask
    tokens (PARD). The names are TensorRT-LLM's."""

    decoding_type: Literal["PARD"] = "PARD"
    """A smaller model that was tuned to draft all tokens in one forward."""
    draft_target_one_model: bool = True
    """True runs the draft model inside the target's forward: a round is one CUDA graph. False runs
    it in its own engine before the forward. Rounds overlap either way."""
    mask_token_id: NonNegativeInt | None = None
    """The token that stands for drafts. null: `mask_token_id` or `pard_token` in the draft model's
    `config.json`."""


class BlockHeadDecodingConfig(DraftTreeDecodingConfig, DraftModelDecodingConfig):
    """The options of the decoding types whose head's layers attend to keys and values of the
    target's hidden states and fill in a block of mask tokens. The names are TensorRT-LLM's."""

    mask_token_id: NonNegativeInt | None = None
    """The token that stands for drafts. null: what the head's `config.json` says."""
    target_layer_ids: Annotated[tuple[NonNegativeInt, ...], Strict(False)] | None = None
    """Target layers, counted from 0, whose outputs the head reads. null: what the head's
    `config.json` says."""


class DFlashDecodingConfig(BlockHeadDecodingConfig):
    """Drafts from a DFlash head, all of whose drafts of a round are independent of each other."""

    decoding_type: Literal["DFlash"] = "DFlash"
    """A head that fills in a block of mask tokens after the newest one."""


class DSparkDecodingConfig(BlockHeadDecodingConfig):
    """Drafts from a DSpark head: a DFlash head that corrects the logits of each draft by the one
    before, and says how likely it is to be accepted."""

    decoding_type: Literal["DSpark"] = "DSpark"
    """A head like DFlash's, whose logits of a draft depend on the one before."""
    block_size: PositiveInt | None = None
    """Drafts that the head was trained for. null: what its `config.json` says; another number is
    refused. `max_draft_len` may be smaller."""
    markov_rank: PositiveInt | None = None
    """Rank of the correction. null: what the head's `config.json` says; another one is refused."""
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    """How it reads the draft before. null: what the head's `config.json` says; another one is
    refused."""
    confidence_calibration_path: PathText | None = None
    """JSON file with `temperatures`, a number for each draft, by which the logits of its
    probability of being accepted are divided. null: 1. SGLang's name is
    `speculative_dspark_confidence_sts_path`."""


DraftBackend = Literal["torch", "tensorrt", "onnxruntime"]
RELAXED_OPTIONS = frozenset(
    ("relaxed_topk", "relaxed_delta", "begin_thinking_phase_token", "end_thinking_phase_token")
)


class DraftTargetDecodingConfig(DraftTreeDecodingConfig, DraftModelDecodingConfig):
    """Drafts from a smaller model, best with the target's tokenizer."""

    decoding_type: Literal["Draft_Target"] = "Draft_Target"
    """A smaller model, best with the target's tokenizer."""
    draft_target_one_model: bool = False
    """True runs the draft model inside the target's forward: a round is one CUDA graph. False runs
    it in its own engine before the forward. Rounds overlap either way. True is the default in newer
    versions of TensorRT-LLM."""
    draft_backend: DraftBackend = "torch"
    """What runs the draft model's network. `tensorrt` builds an engine at the first start and keeps
    it on disk; `onnxruntime` is for CPUs."""
    kv_cache_dtype: KVCacheType | None = None
    """Type of the draft model's own KV cache, as `kv_cache_config.dtype`, which null stands for."""


class EagleHeadDecodingConfig(DraftTreeDecodingConfig, DraftModelDecodingConfig):
    """The options of the decoding types whose drafts come from a head on the target's hidden
    states. The names are TensorRT-LLM's."""

    eagle3_one_model: bool = True
    """True runs the head inside the target's forward: a round is one CUDA graph. False runs it in
    launches of its own after the forward. Rounds overlap either way."""
    eagle3_layers_to_capture: Annotated[tuple[int, ...], Strict(False)] | None = None
    """Target layers, counted from 0, whose outputs an EAGLE-3 head reads. null: what the head's
    `config.json` says, else a low, a middle and a high layer."""
    eagle3_model_arch: Literal["llama3"] = "llama3"
    """Architecture of the head."""
    draft_backend: DraftBackend = "torch"
    """What runs the layers of an EAGLE-3 head with `eagle3_one_model: false`. `tensorrt` builds an
    engine at the first start and keeps it on disk; `onnxruntime` is for CPUs."""

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


class EagleDecodingConfig(EagleHeadDecodingConfig):
    """Drafts from an EAGLE-1 or EAGLE-2 head, a small model that reads the target's last hidden
    state. A folder with an EAGLE-3 head is served as `Eagle3`, as in TensorRT-LLM."""

    decoding_type: Literal["Eagle"] = "Eagle"
    """An EAGLE-1 or EAGLE-2 head: one layer that reads the target's last hidden state."""


class Eagle3DecodingConfig(EagleHeadDecodingConfig):
    """Drafts from an EAGLE-3 head, a small model that reads hidden states of the target."""

    decoding_type: Literal["Eagle3"] = "Eagle3"
    """An EAGLE-3 head: one layer that reads hidden states of the target."""


class MTPDecodingConfig(DraftTreeDecodingConfig):
    """Drafts from the next-token-prediction modules that belong to the target."""

    decoding_type: Literal["MTP"] = "MTP"
    """The next-token-prediction module of the target (DeepSeek V3)."""
    max_draft_len: PositiveInt = 1
    """Draft tokens of a request in one round, at most. The default is one, the number of modules in
    most checkpoints."""
    speculative_model: PathText | None = None
    """Folder that has the modules only, as SGLang exports them (NextN), or Gemma 4's assistant.
    null, or the target's own folder: they are in the target's checkpoint."""
    mtp_eagle_one_model: bool = True
    """True runs the module inside the target's forward: a round is one CUDA graph. False runs it in
    launches of its own after the forward. Rounds overlap either way."""

    use_mtp_vanilla: bool = False
    """Draft k of a round comes from module k of the checkpoint (`num_nextn_predict_layers` there),
    so `max_draft_len` is their number at most. False uses the first module for all drafts, as EAGLE
    does."""
    use_relaxed_acceptance_for_thinking: bool = False
    """**Lossy**: between the two thinking tokens, a greedy request also accepts a draft that is
    among the target's `relaxed_topk` best tokens and whose log probability is at most
    `relaxed_delta` below the best one's."""
    relaxed_topk: PositiveInt = 1
    """For relaxed acceptance: how many of the best tokens count. 1: the best one only."""
    relaxed_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """For relaxed acceptance: largest difference of log probabilities, in nats."""
    begin_thinking_phase_token: NonNegativeInt = 128798
    """Token id that begins the thinking phase. The default is DeepSeek R1's `<think>`."""
    end_thinking_phase_token: NonNegativeInt = 128799
    """Token id that ends it. The default is DeepSeek R1's `</think>`."""

    @classmethod
    def with_our_names(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        renamed = super().with_our_names(options)
        if renamed.get("max_draft_len") is None:  # whose default other options follow
            renamed["max_draft_len"] = cls.model_fields["max_draft_len"].default
        return renamed

    @check
    def _check_relaxed(self) -> Iterator[str]:
        if not self.use_relaxed_acceptance_for_thinking:
            usual = {name: type(self).model_fields[name].default for name in RELAXED_OPTIONS}
            if changed := sorted(name for name in usual if getattr(self, name) != usual[name]):
                yield (
                    f"{', '.join(changed)}: for relaxed acceptance only; set "
                    "use_relaxed_acceptance_for_thinking: true or leave them out"
                )
            return
        if self.drafts_trees:
            yield (
                "use_relaxed_acceptance_for_thinking = True is refused for draft trees: its rule "
                "is for chains"
            )
        for name in ("use_rejection_sampling", "synthetic_acceptance_rates"):
            if value := getattr(self, name):
                yield (
                    f"use_relaxed_acceptance_for_thinking = True and {name} = {shown(value)} are "
                    "exclusive, because each decides what is accepted"
                )
        if self.begin_thinking_phase_token == self.end_thinking_phase_token:
            yield (
                f"begin_thinking_phase_token = {self.begin_thinking_phase_token} must not be "
                "end_thinking_phase_token"
            )

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


class SADecodingConfig(GlobalPoolConfig, DecodingBaseConfig):
    """Drafts copied from the latest of the longest earlier occurrences of the text's end."""

    decoding_type: Literal["SA"] = "SA"
    """Copies what followed the longest earlier occurrence of the text's last tokens."""
    max_matching_ngram_size: int = -1
    """Most tokens of the text's end that are looked up, 1 to 64; fewer are tried after it. -1: the
    longest match, as 64."""

    drafts_have_probabilities: ClassVar[bool] = False
    counts_on_device: ClassVar[bool] = True

    @field_validator("max_matching_ngram_size")
    @classmethod
    def _check_size(cls, size: int) -> int:
        if size != -1 and not 1 <= size <= MAX_MATCH:
            raise ValueError(f"-1 (the longest match) or 1 to {MAX_MATCH} is accepted")
        return size

    def text_search(self, max_batch_size: int) -> TextSearch:
        size = self.max_matching_ngram_size
        max_match = MAX_MATCH if size == -1 else size
        return TextSearch(max_match, num_shared=self.num_shared(max_batch_size), corpus=self.corpus)


class AutoDecodingConfig(ConfigModel):
    """The engine chooses all options of `speculative_config`: docs/auto.md says how. Those that
    are given next to it replace what it chooses."""

    model_config = ConfigDict(extra="allow", frozen=True)

    decoding_type: Literal["AUTO"] = "AUTO"
    """The engine chooses. In TensorRT-LLM it means NGram with drafts by the batch size."""
    speculative_model: PathText | None = None
    """Folder of a draft model or head of any kind. null: MTP modules of the target, where it has
    them, or else matches in the text."""


CONFIG_OF_TYPE: Mapping[str, type[DecodingBaseConfig]] = {
    "NGram": NGramDecodingConfig,
    "Draft_Target": DraftTargetDecodingConfig,
    "DraftTarget": DraftTargetDecodingConfig,
    "Eagle3": Eagle3DecodingConfig,
    "Eagle": EagleDecodingConfig,
    "DFlash": DFlashDecodingConfig,
    "DSpark": DSparkDecodingConfig,
    "MTP": MTPDecodingConfig,
    "PARD": PARDDecodingConfig,
    "SA": SADecodingConfig,
    "User_Provided": UserProvidedDecodingConfig,
    "UserProvided": UserProvidedDecodingConfig,
}
# The neighbours' names for `decoding_type`.
NAMES_OF_TYPE = {
    name: row for name, row in DecodingBaseConfig.renamed.items() if row.path == "decoding_type"
}
TYPES_SERVED = (
    "accepted: AUTO, NGram, Draft_Target, DFlash, DSpark, Eagle, Eagle3, MTP, PARD, SA, "
    "User_Provided"
)
# TensorRT-LLM's other decoding types, with the classes that have them.
TYPES_NOT_SERVED: Mapping[str, str] = {
    "Lookahead": "LookaheadDecodingConfig",
    "Medusa": "MedusaDecodingConfig",
    "SaveState": "SaveHiddenStatesDecodingConfig",
}


# Methods that other engines name.
METHODS_NOT_SERVED = frozenset(("Domino", "LiLiCorr", "UNO", "XPress"))


_TYPE_BY_NAME = {name.lower(): name for name in CONFIG_OF_TYPE}


def type_refusal(decoding_type: object) -> str:
    """The sentence that refuses a decoding type. vLLM writes names in small letters."""
    known = {name.lower() for name in (*TYPES_NOT_SERVED, *METHODS_NOT_SERVED)}
    name = decoding_type.lower() if isinstance(decoding_type, str) else ""
    problem = "is not served yet" if name in known else "is not a known type"
    if name not in known and (close := get_close_matches(name, _TYPE_BY_NAME, n=1)):
        problem += f", did you mean {_TYPE_BY_NAME[close[0]]}?"
    return f"decoding_type = {shown(decoding_type)} {problem}; {TYPES_SERVED}"


REQUIRED_LENGTH = "max_draft_len is required"
NO_LENGTH = "; --speculate, or decoding_type: AUTO, chooses it"


def speculative_config_from(value: object) -> object:
    """Turns a mapping into the class that its `decoding_type` names, in any case, or vLLM's
    `method`. Raises ConfigError."""
    if not isinstance(value, Mapping):
        return value
    try:
        options = with_our_names(value, NAMES_OF_TYPE)
    except ValueError as error:
        lines = [f"{line}; leave one of them out" for line in str(error).splitlines()]
        raise ConfigError(lines) from None
    if options.get("decoding_type") == "Draft_Target" and options.get("parallel_drafting") is True:
        options |= {"decoding_type": "PARD", "parallel_drafting": None}  # as vLLM calls it
    algorithm = value.get("speculative_algorithm", value.get("speculative_algo"))
    if algorithm == "EAGLE" and not _has_model(options):
        options["decoding_type"] = "MTP"  # SGLang's name for the target's own modules
    if "decoding_type" not in options:
        line = f"decoding_type is required; {TYPES_SERVED}; a folder of draft weights may say it"
        raise ConfigError([line, *_wrong_keys(options)])
    decoding_type = options.pop("decoding_type")
    if not isinstance(decoding_type, str) or decoding_type.lower() not in _TYPE_BY_NAME:
        raise ConfigError([type_refusal(decoding_type), *_wrong_keys(options)])
    kind = CONFIG_OF_TYPE[_TYPE_BY_NAME[decoding_type.lower()]]
    lines = [
        f"{name} = {shown(options.pop(name))} is an option of {' and '.join(owners)}, not of "
        f"{decoding_type}"
        for name, owners in _owners_of(options, kind).items()
    ]
    try:
        config = kind(**options)
    except ConfigError as error:
        told = (line + NO_LENGTH * line.startswith(REQUIRED_LENGTH) for line in error.lines)
        raise ConfigError([*lines, *told]) from error
    if lines:
        raise ConfigError(lines)
    return config


def _has_model(options: Mapping[str, Any]) -> bool:
    return any(
        value is not None and name_here(name, SPECULATIVE_RENAMED) == "speculative_model"
        for name, value in options.items()
    )


def _wrong_keys(options: Mapping[str, Any]) -> list[str]:
    """Sentences about those of `options` that no decoding type has."""
    known = {name for kind in CONFIG_OF_TYPE.values() for name in kind.model_fields}
    taken = known | DecodingBaseConfig.ignored.keys() | DecodingBaseConfig.renamed.keys()
    unknown = {name: value for name, value in options.items() if name not in taken}
    reasons = {name: reason for name in unknown if (reason := absent_reason(name))}
    return [
        *refusals(options, DecodingBaseConfig.ignored).values(),
        *(f"{key} = {shown(unknown.pop(key))} is refused: {why}" for key, why in reasons.items()),
        *(many_unknown(unknown, ()) or unknown_options(unknown, known)),
    ]


def _owners_of(options: Mapping[str, Any], kind: type[DecodingBaseConfig]) -> dict[str, list[str]]:
    """The decoding types that have each of `options` that have a value and that `kind` has not; no
    entry for a name that none has."""
    owners = {}
    for name in sorted(name for name, value in options.items() if value is not None):
        ours = name_here(name, kind.renamed)
        if ours not in kind.model_fields:
            kinds = [
                each for each in dict.fromkeys(CONFIG_OF_TYPE.values()) if ours in each.model_fields
            ]
            owners[name] = [each.model_fields["decoding_type"].default for each in kinds]
    return {name: found for name, found in owners.items() if found}


SpeculativeConfig = Annotated[DecodingBaseConfig, BeforeValidator(speculative_config_from)]
