"""Reads `config.json` and checks the type and range of every value that is used, so that the
readers of single keys need no checks of their own. A key has one type wherever it stands: at the
top, or in an object such as `text_config`."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tllm_spec.config.option_checks import shown
from tllm_spec.models.formats.gguf_config import gguf_config
from tllm_spec.models.formats.gguf_file import read_gguf
from tllm_spec.zoo.registry import is_gguf

CONFIG = "config.json"
MAX_INT = 2**31 - 1
MAX_SIZE = 2**18  # of one dimension of a weight; no product of them overflows
MAX_LAYERS = 1000
MAX_NUMBER = 1e30


@dataclass(frozen=True)
class _Kind:
    """What a value must be, in words, and a test of it."""

    text: str
    accepts: Callable[[Any], bool]
    is_nullable: bool = True
    """Whether null may stand where an architecture has a default."""


def _is_int(low: int, high: int = MAX_INT) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_number(low: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= MAX_NUMBER


def _is_list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(accepts, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_COUNT, _TOKEN = _is_int(0), _is_int(-MAX_INT)
_SIZE = f"an integer from 1 to {MAX_SIZE}"
_OBJECT = _Kind("an object", lambda value: isinstance(value, Mapping))
_KEYS: tuple[tuple[_Kind, str], ...] = (
    (
        _Kind(f"an integer from 1 to {MAX_INT}", _is_int(1), is_nullable=False),
        "vocab_size max_position_embeddings floor_scale index_topk",
    ),
    (
        _Kind(_SIZE, _is_int(1, MAX_SIZE), is_nullable=False),
        """
        hidden_size intermediate_size intermediate_size_mlp num_attention_heads kv_lora_rank
        qk_nope_head_dim qk_rope_head_dim v_head_dim moe_intermediate_size num_local_experts
        num_experts interleave_moe_layer_step no_rope_layer_interval full_attention_interval
        linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim
        linear_conv_kernel_dim backbone_hidden_size num_centroids centroid_intermediate_top_k
        index_head_dim index_n_heads
        """,
    ),
    (
        _Kind(f"an integer from 1 to {MAX_LAYERS}", _is_int(1, MAX_LAYERS), is_nullable=False),
        "num_hidden_layers",
    ),
    (
        _Kind(f"{_SIZE}, or null", _is_int(1, MAX_SIZE)),
        """
        num_key_value_heads head_dim q_lora_rank target_hidden_size num_aux_hidden_states
        global_head_dim num_global_key_value_heads top_k_experts block_size dspark_block_size
        conv_kernel_size conv_group_size selector_rank selector_top_k
        """,
    ),
    (
        _Kind(f"an integer from 1 to {MAX_INT}, or null", _is_int(1)),
        """
        attention_chunk_size original_max_position_embeddings truncated_vocab_size rotary_dim
        sliding_window_pattern _sliding_window_pattern swa_window_size
        """,
    ),
    (
        _Kind(f"an integer from 0 to {MAX_SIZE}", _is_int(0, MAX_SIZE)),
        "n_routed_experts n_shared_experts moe_layer_freq decoder_sparse_step n_group topk_group",
    ),
    (
        _Kind(f"an integer from 0 to {MAX_SIZE}", _is_int(0, MAX_SIZE), is_nullable=False),
        "num_experts_per_tok shared_expert_intermediate_size "
        "hidden_size_per_layer_input vocab_size_per_layer_input",
    ),
    (
        _Kind(f"an integer from 0 to {MAX_INT}", _COUNT),
        "draft_vocab_size sliding_window max_window_layers markov_rank dspark_markov_rank "
        "mask_token_id dspark_noise_token_id",
    ),
    (
        _Kind(f"an integer from 0 to {MAX_LAYERS}", _is_int(0, MAX_LAYERS)),
        "num_nextn_predict_layers mtp_num_hidden_layers index_topk_freq index_skip_topk_offset",
    ),
    (
        _Kind(f"an integer from 0 to {MAX_LAYERS}", _is_int(0, MAX_LAYERS), is_nullable=False),
        "first_k_dense_replace num_kv_shared_layers",
    ),
    (
        _Kind(f"a number from 0 to {MAX_NUMBER}", _is_number(0), is_nullable=False),
        "rms_norm_eps routed_scaling_factor attn_scale",
    ),
    (
        _Kind(f"a number from 0 to {MAX_NUMBER}", _is_number(0)),
        """
        low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mscale mscale_all_dim
        llama_4_scaling_beta partial_rotary_factor attn_logit_softcapping final_logit_softcapping
        """,
    ),
    (_Kind(f"a number from 1 to {MAX_NUMBER}", _is_number(1)), "factor"),
    (_Kind(f"a number from 2 to {MAX_NUMBER}", _is_number(2)), "rope_theta rope_local_base_freq"),
    (
        _Kind(f"a number from 1 to {MAX_NUMBER}", _is_number(1), is_nullable=False),
        "query_pre_attn_scalar swiglu_alpha swiglu_limit",
    ),
    (
        # Llama 4 has an integer for one of them.
        _Kind("true or false", lambda value: isinstance(value, (bool, int))),
        """
        tie_word_embeddings attention_bias mlp_bias qkv_bias bias use_qk_norm use_sliding_window
        norm_topk_prob rope_interleave attn_temperature_tuning truncate norm_before_fc fc_norm
        use_aux_norm norm_before_residual norm_output attn_output_gate attention_k_eq_v
        enable_moe_block use_double_wide_mlp use_ordered_embeddings indexer_rope_interleave
        is_causal causal use_swa sample_from_anchor sliding_window_non_causal
        enable_confidence_head confidence_head_with_markov
        """,
    ),
    (
        # Gemma 4 has a name for it.
        _Kind("true, false or a name", lambda value: isinstance(value, (bool, int, str))),
        "use_bidirectional_attention",
    ),
    (
        _Kind("a name", _is_text),
        """
        dtype torch_dtype type rope_type scoring_func model_type speculators_model_type
        markov_head_type
        """,
    ),
    (_Kind("a name", _is_text, is_nullable=False), "hidden_act hidden_activation topk_method"),
    (
        _Kind("a list of names", _is_list_of(_is_text)),
        "architectures layer_types mlp_layer_types indexer_types",
    ),
    (
        _Kind("letters or a list of names", lambda x: _is_text(x) or _is_list_of(_is_text)(x)),
        "index_topk_pattern",
    ),
    (
        _Kind("a list of layer numbers", _is_list_of(_is_int(0, MAX_LAYERS))),
        "moe_layers mlp_only_layers eagle_aux_hidden_state_layer_ids aux_hidden_state_layer_ids "
        "target_layer_ids dspark_target_layer_ids",
    ),
    (
        _Kind("a list of positive numbers", _is_list_of(_is_number(1e-6))),
        "short_factor long_factor",
    ),
    (_Kind("a list of token ids", _is_list_of(_COUNT)), "suppress_tokens"),
    (_Kind("a list of 0 and 1", _is_list_of(lambda value: value in (0, 1))), "no_rope_layers"),
    (
        _Kind(
            "a token id or a list of them",
            lambda value: _TOKEN(value) or _is_list_of(_TOKEN)(value),
        ),
        "eos_token_id",
    ),
    (
        _OBJECT,
        """
        rope_parameters rope_scaling text_config transformer_layer_config eagle_config
        full_attention sliding_attention per_layer_config dflash_config
        """,
    ),
)
_KINDS = {key: kind for kind, keys in _KEYS for key in keys.split()}


def read_config(path: Path) -> dict[str, Any]:
    """The object in `path/config.json`, or what a GGUF file says in its stead. Raises ValueError if
    the file is missing or unreadable, or if a value that is used has a wrong type; all of them are
    named."""
    if is_gguf(path):
        return _checked(path, gguf_config(read_gguf(path)))
    return read_checked(path / CONFIG)


def read_checked(file: Path) -> dict[str, Any]:
    """The same of any file with keys of a configuration, such as generation_config.json."""
    return _checked(file, read_json(file))


def _checked(file: Path, raw: dict[str, Any]) -> dict[str, Any]:
    if mistakes := list(_mistakes(raw, "")):
        raise ValueError(f"{file}: {'; '.join(mistakes)}.")
    return raw


def with_defaults(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`raw`, and `defaults` for absent keys. Raises ValueError for null where only a value has a
    meaning."""
    for key in defaults.keys() & raw.keys():
        if raw[key] is None and not _KINDS[key].is_nullable:
            raise ValueError(f"{key} is null; it must be {_KINDS[key].text}.")
    return {**defaults, **raw}


def required(raw: Mapping[str, Any], key: str) -> Any:
    """The value of a key that has no default. Raises ValueError if it is absent or null."""
    if raw.get(key) is None:
        raise ValueError(f"config.json has no {key}.")
    return raw[key]


def _mistakes(fields: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in fields.items():
        kind = _KINDS.get(key)
        if kind is None or value is None:
            continue
        if not kind.accepts(value):
            yield f"{prefix}{key} is {shown(value)}; it must be {kind.text}"
        elif kind is _OBJECT:
            yield from _mistakes(value, f"{prefix}{key}.")


# JSON files of a model's folder.


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's folder. Raises ValueError for anything else."""
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; a model is a folder in Hugging Face's format, or a .gguf file."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}.") from error
    except RecursionError:
        raise ValueError(f"{path} is not readable JSON: it is nested too deeply.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return content
