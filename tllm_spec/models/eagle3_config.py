"""The shape of an EAGLE-3 draft head, read from its `config.json`.

A head is a Llama, Qwen3 or DeepSeek layer with a different input, so its configuration is a
`ModelConfig` with further fields. `eagle3_format.py` knows the published spellings."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tllm_spec.models.checkpoint import OUTPUT
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.config_file import read_config
from tllm_spec.models.draft_head import EMBEDDING, MASK_TOKENS, mask_token_in
from tllm_spec.models.draft_kind import HeadKind
from tllm_spec.models.registry import model_config_of

# The published spellings of an EAGLE-3 head's `config.json`, read into one flat dictionary.
#
# Two are in use: a flat Llama config, in which NVIDIA's heads nest some keys under `eagle_config`,
# and the speculators format (vllm-project/speculators), which nests the decoder layer's keys under
# `transformer_layer_config`. P-EAGLE heads have the same keys and a mask token, and heads with
# latent attention (MLA) further ones of DeepSeek's. Trainers copy keys of the target's
# configuration: those that would change what a head computes are refused unless they are off, and
# others that are not known are left to a warning, since drafts change no text and tensors must
# fit.


LATENT_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "PEagleDraftModel",
    "PeagleLlamaForCausalLM",
    *LATENT_ARCHITECTURES,
)
# `model_type` of a speculators layer -> the architecture whose attention and MLP it has.
_LAYER_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_PARALLEL = "parallel_drafting"

# Variants that are not implemented, each with the value that means that the head is without it.
_SERVED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "logit_scale": 1.0,
    "position_embedding_type": "rope",
}
# What `ModelConfig` reads.
DECODER_KEYS = frozenset(
    """
    architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps hidden_act attention_bias mlp_bias rope_theta
    rope_scaling rope_parameters partial_rotary_factor max_position_embeddings
    original_max_position_embeddings sliding_window use_sliding_window max_window_layers layer_types
    tie_word_embeddings quantization_config eos_token_id dtype torch_dtype
    """.split()  # noqa: SIM905 (a list of one key a line would fill the file)
)
# And `Eagle3Config`.
_READ = DECODER_KEYS | frozenset(
    """
    draft_vocab_size truncated_vocab_size target_hidden_size num_aux_hidden_states capture_layers
    norm_before_residual norm_before_fc norm_output fc_norm use_aux_norm bias parallel_drafting
    mask_token_id pard_token ptd_token_id
    """.split()  # noqa: SIM905 (a list of one key a line would fill the file)
)
# Also of a head with latent attention, and what such a head is without.
_OF_LATENTS = frozenset(
    """
    kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_interleave
    """.split()  # noqa: SIM905 (a list of one key a line would fill the file)
)
_NOT_WITH_LATENTS = {"sliding_window": None, "mlp_bias": False}
# The target's experts and MTP modules, of which it has none: its MLP is dense.
_OF_TARGET = frozenset(
    """
    n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size moe_layer_freq
    first_k_dense_replace n_group topk_group topk_method scoring_func norm_topk_prob
    routed_scaling_factor aux_loss_alpha seq_aux ep_size num_nextn_predict_layers
    """.split()  # noqa: SIM905 (a list of one key a line would fill the file)
)
# Names, versions, training and generation settings: they do not change what the head computes.
WITHOUT_EFFECT = frozenset(
    """
    _name_or_path _attn_implementation_autoset attn_implementation auto_map model_type
    target_model_type transformers_version speculators_model_type speculators_version
    speculators_config has_no_defaults_at_init enable_sp_ulysses num_lookahead_tokens has_lm_head
    parallel_draft_heads_num_layers attention_dropout initializer_range pretraining_tp use_cache
    bos_token_id pad_token_id unk_token_id sep_token_id chunk_size_feed_forward id2label label2id
    problem_type return_dict output_attentions output_hidden_states is_encoder_decoder torchscript
    max_length min_length num_beams num_beam_groups num_return_sequences temperature top_k top_p
    typical_p repetition_penalty length_penalty diversity_penalty embed_requires_grad
    """.split()  # noqa: SIM905 (a list of one key a line would fill the file)
)


# Keys that change what a layer or a head computes without a tensor that shows it, and those of
# other kinds of drafters.
_MATTERS = frozenset(
    """
    embedding_multiplier residual_multiplier attention_multiplier logits_scaling logit_softcapping
    final_logit_softcapping attn_logit_softcapping query_pre_attn_scalar scale_emb scale_depth
    dim_model_base clip_qkv swiglu_limit hidden_activation attention_chunk_size no_rope_layers
    no_rope_layer_interval rope_interleave rope_local_base_freq use_parallel_residual
    parallel_residual attention_mode attention_sinks projector_type emb_dim gru_hidden_dim
    shift_label markov_head_type enable_confidence_head conv_kernel_size conv_group_size
    add_para_norm skip_prenorm skip_output_norm
    """.split()  # noqa: SIM905 (a list of one key a line would fill the file)
)


def flat_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The head's keys on one level, with the `architectures` of its decoder layer; as
    `capture_layers`, the layers of the target whose outputs it reads, if the file names them; as
    `mask_token`, the mask token of a P-EAGLE head, else None; and `unknown_keys`.

    Raises:
        ValueError: another kind of drafter, or keys that are not served; all of them are named.
    """
    is_speculators = raw.get("speculators_model_type") is not None
    flat = _flat_speculators(raw) if is_speculators else _flat_llama(raw)
    nested: dict[str, Any] = flat.pop("eagle_config", None) or {}
    flat["capture_layers"] = _capture_layers(flat.pop(_LAYER_IDS, None), nested.get(_LAYER_IDS))
    flat |= {key: value for key, value in nested.items() if key != _LAYER_IDS}
    if flat["architectures"] == ["DeepseekV3ForCausalLM"]:
        served = _SERVED | _NOT_WITH_LATENTS
        unknown = unknown_keys(flat, _READ | _OF_LATENTS, served, "EAGLE-3")
    else:
        unknown = unknown_keys(flat, _READ, _SERVED, "EAGLE-3")
    return flat | {"mask_token": _mask_token(flat), "unknown_keys": unknown}


def _mask_token(flat: dict[str, Any]) -> int | None:
    found = mask_token_in(flat)
    if found is None and flat.get(_PARALLEL):
        raise ValueError(
            f"{_PARALLEL} is true in config.json of the EAGLE-3 head, which has no mask token; "
            f"needed is one of {', '.join(MASK_TOKENS)}."
        )
    if found is not None and flat.get(_PARALLEL) is False:
        raise ValueError(
            f"config.json of the EAGLE-3 head has the mask token {found}, and {_PARALLEL} is "
            "false; keep one."
        )
    return found


def _flat_llama(raw: dict[str, Any]) -> dict[str, Any]:
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ValueError(
            f"architectures of the EAGLE-3 head is {names}; served is one of "
            f"{', '.join(ARCHITECTURES)}, and the speculators format (speculators_model_type)."
        )
    if names[0] in LATENT_ARCHITECTURES:
        own = {key: value for key, value in raw.items() if key not in _OF_TARGET}
        return own | {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 0}
    return raw | {"architectures": ["LlamaForCausalLM"]}


def _flat_speculators(raw: dict[str, Any]) -> dict[str, Any]:
    """In this format a head always has an output layer of its own. Readers of EAGLE-3 heads assume
    different defaults of `norm_before_residual`, so the key must be there; of P-EAGLE heads it is
    false."""
    kind, layer = raw["speculators_model_type"], raw.get("transformer_layer_config")
    if kind not in ("eagle3", "peagle"):
        raise ValueError(f"speculators_model_type is {kind!r}; served are 'eagle3' and 'peagle'.")
    if not isinstance(layer, dict):
        raise ValueError("transformer_layer_config of the EAGLE-3 head must be a JSON object.")
    model_type = layer.get("model_type", "llama")
    if model_type not in _LAYER_ARCHITECTURES:
        raise ValueError(
            f"model_type in transformer_layer_config of the EAGLE-3 head is {model_type!r}; "
            f"served are {', '.join(_LAYER_ARCHITECTURES)}."
        )
    needed = {"eagle3": "norm_before_residual", "peagle": "mask_token_id"}[kind]
    for key in ("draft_vocab_size", needed):
        if raw.get(key) is None:
            raise ValueError(f"config.json of the EAGLE-3 head has no {key}.")
    outer = {key: value for key, value in raw.items() if key != "transformer_layer_config"}
    architectures = [_LAYER_ARCHITECTURES[model_type]]
    return layer | outer | {"architectures": architectures, "tie_word_embeddings": False}


def _capture_layers(inputs: list[int] | None, outputs: list[int] | None) -> tuple[int, ...] | None:
    """At the top level, as speculators and vLLM read it, `n` is the state that enters layer n,
    which is the output of layer n - 1. In `eagle_config`, as TensorRT-LLM and SGLang read it, it is
    the output of layer n."""
    if inputs and outputs:
        raise ValueError(
            f"{_LAYER_IDS} of the EAGLE-3 head is {inputs} at the top level, where it counts "
            f"inputs of layers, and {outputs} in eagle_config, where it counts outputs; keep one."
        )
    if inputs and min(inputs) < 1:
        raise ValueError(
            f"{_LAYER_IDS} of the EAGLE-3 head is {inputs}; 0, the target's embedding, is not "
            "served, only 1 and above."
        )
    layers = outputs or [layer - 1 for layer in inputs or ()]
    return tuple(layers) or None


def unknown_keys(
    flat: dict[str, Any], read: frozenset[str], served: Mapping[str, Any], kind: str
) -> tuple[str, ...]:
    """The keys that are neither off, nor `read`, nor known to have no effect. Raises ValueError,
    with all reasons, for keys that are not `served` with their value, and for those that matter."""
    reasons = [
        f"{key} is {flat[key]!r}, and only {only!r} is served"
        for key, only in served.items()
        if flat.get(key, only) not in (only, None)
    ]
    unknown = flat.keys() - read - WITHOUT_EFFECT - served.keys()
    found = tuple(key for key in sorted(unknown) if flat[key])
    reasons += [
        f"{key} is {flat[key]!r}, which is not served; delete it if it does not change what the "
        "head computes"
        for key in found
        if key in _MATTERS
    ]
    if reasons:
        raise ValueError(f"config.json of the {kind} head: {'; '.join(reasons)}.")
    return found


def check_layers(config: ModelConfig, kind: str) -> None:
    """Raises ValueError for quantised weights."""
    if not config.quantisation.is_plain:
        name = "FP8" if config.quantisation.four_bit is None else "4-bit"
        raise ValueError(f"The {kind} head has {name} weights; heads are served in 16 or 32 bits.")


Own = TypeVar("Own", bound="Eagle3Config")


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(ModelConfig):
    """`vocab_size` is the target's: the head reads its tokens."""

    kind: HeadKind = "EAGLE-3"

    draft_vocab_size: int | None
    """Tokens that the head proposes; None: all of the target's."""
    target_hidden_size: int
    capture_layers: tuple[int, ...] | None
    """Layers of the target whose outputs the head was trained on, in the order of its input."""
    num_aux_hidden_states: int | None = None
    """How many captured states the head reads, if the config says so."""
    norm_before_fc: bool = False
    """One RMSNorm over all captured states together, before `fc_norm` and `fc`."""
    fc_norm: bool = False
    """An RMSNorm for each captured state, before `fc`."""
    norm_before_residual: bool = False
    """The first layer's residual is the normed hidden state instead of the hidden state."""
    norm_output: bool = False
    """The next step reads the hidden state after the final norm instead of before it."""
    bias: bool = False
    """Whether `fc` has one."""
    mask_token: int | None = None
    """P-EAGLE: the token that stands for drafts in the rows that draft all tokens at once; None:
    the head drafts one token after the other."""

    @property
    def output_size(self) -> int:
        """The width of the head's logits."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def has_own_width(self) -> bool:
        """Whether the target's embedding and output layer are of another width."""
        return self.hidden_size != self.target_hidden_size

    @property
    def has_own_lm_head(self) -> bool:
        """Without a checkpoint. Otherwise the output layer is the target's, or an embedding."""
        if self.tie_word_embeddings:
            return self.output_size < self.vocab_size
        return self.draft_vocab_size is not None or self.has_own_width

    @property
    def own_modules(self) -> Set[str]:
        """`EMBEDDING` and `OUTPUT`, if the head has its own without a checkpoint."""
        names = {EMBEDDING: self.has_own_width, OUTPUT: self.has_own_lm_head}
        return {name for name, is_own in names.items() if is_own}

    @classmethod
    def from_pretrained(cls, path: Path) -> "Eagle3Config":
        """Read `path/config.json`.

        Raises:
            ValueError: the file is missing or unreadable, or asks for something that is not served.
        """
        return cls.from_dict(read_config(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Eagle3Config":
        """The same, from the parsed file."""
        flat = flat_config(raw)
        decoder = model_config_of(flat)
        if decoder.mla is not None:  # trainers of heads give all norms the same epsilon
            decoder = replace(decoder, mla=replace(decoder.mla, norm_eps=decoder.rms_norm_eps))
        config = cls(
            **vars(decoder) | {"unknown_keys": flat["unknown_keys"]},
            draft_vocab_size=_draft_vocab_size(flat),
            target_hidden_size=int(flat.get("target_hidden_size") or flat["hidden_size"]),
            capture_layers=flat["capture_layers"],
            num_aux_hidden_states=flat.get("num_aux_hidden_states"),
            norm_before_fc=bool(flat.get("norm_before_fc")),
            fc_norm=bool(flat.get("fc_norm") or flat.get("use_aux_norm")),
            norm_before_residual=bool(flat.get("norm_before_residual")),
            norm_output=bool(flat.get("norm_output")),
            bias=bool(flat.get("bias")),
            mask_token=flat["mask_token"],
        )
        check_head(config)
        return config

    def for_target(self: Own, target: ModelConfig, num_captured: int) -> Own:
        """The configuration with the target's vocabulary, which may be padded to another size or
        have added tokens if the head proposes only some of it, and with the width of the target's
        states, which some heads of another width do not name. Raises ValueError unless the head was
        trained for such a target with `num_captured` captured layers."""
        names_width = self.target_hidden_size != self.hidden_size
        may_differ = self.output_size < min(self.vocab_size, target.vocab_size)
        for key, own, wanted, is_free in (
            ("target_hidden_size", self.target_hidden_size, target.hidden_size, not names_width),
            ("vocab_size", self.vocab_size, target.vocab_size, may_differ),
        ):
            if own != wanted and not is_free:
                raise ValueError(
                    f"{key} of the {self.kind} head is {own}, the target's is {wanted}; they must "
                    "be equal, since the head reads the target's tokens and hidden states."
                )
        from_layers = None if self.capture_layers is None else len(self.capture_layers)
        for key, trained in (
            ("eagle_aux_hidden_state_layer_ids", from_layers),
            ("num_aux_hidden_states", self.num_aux_hidden_states),
        ):
            if trained not in (None, num_captured):
                raise ValueError(
                    f"{num_captured} layers of the target are captured; the {self.kind} head reads "
                    f"{trained} ({key} of its config.json). Set eagle3_layers_to_capture to "
                    f"{trained} layers."
                )
        if self.mask_token is not None and not 0 <= self.mask_token < target.vocab_size:
            raise ValueError(
                f"the mask token of the head is {self.mask_token}; it must be a token of the "
                f"target, 0 to {target.vocab_size - 1}."
            )
        return replace(self, vocab_size=target.vocab_size, target_hidden_size=target.hidden_size)


def _draft_vocab_size(flat: dict[str, Any]) -> int | None:
    """`truncated_vocab_size` is another name for it; there the whole vocabulary's size means that
    nothing is truncated."""
    size, truncated = flat.get("draft_vocab_size"), flat.get("truncated_vocab_size")
    if truncated in (None, flat["vocab_size"]):
        return size
    if size not in (None, truncated):
        raise ValueError(
            f"draft_vocab_size of the EAGLE-3 head is {size} and truncated_vocab_size is "
            f"{truncated}; they must be equal."
        )
    return int(truncated)


def check_head(config: Eagle3Config) -> None:
    """Raises ValueError for quantised weights, and for vocabularies that do not fit each other."""
    check_layers(config, config.kind)
    if not 0 < config.output_size <= config.vocab_size:
        raise ValueError(
            f"draft_vocab_size is {config.draft_vocab_size}; it must be 1 to vocab_size, which is "
            f"{config.vocab_size}, or null."
        )
