"""The shapes of the models that speed is measured on, the bytes that a round must stream, the
operations of a prefill.

Folders are written with a config.json and no weights (`load_format: dummy`). Knows no engine and no
measurement."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]

BYTES_A_WEIGHT = 2  # bfloat16, of weights and of keys and values
READ_BYTES_PER_S = 4.45e12  # pure reading on an H200, measured
MATMUL_FLOPS = 790e12  # a large bfloat16 product on an H200, measured
RATES = (
    0.73,
    0.52,
    0.35,
    0.25,
    0.18,
    0.13,
    0.09,
)  # synthetic acceptance by position: 2.60 tokens a round for K = 3

LLAMA_8B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
EAGLE3_8B: Config = {
    **LLAMA_8B,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}
LLAMA_1B: Config = {
    **LLAMA_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
SHAPES: Mapping[str, Config] = {"target": LLAMA_8B, "eagle3": EAGLE3_8B, "draft": LLAMA_1B}
NUM_CAPTURED = 3  # layers of the target that an EAGLE-3 head reads


def write_configs(folder: Path) -> None:
    """`folder/target`, `folder/eagle3` and `folder/draft`, to be loaded with `load_format:
    dummy`."""
    for name, config in SHAPES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def layer_weights(config: Config, input_size: int | None = None) -> int:
    """Elements of one decoder layer's matrices; `input_size`: of its attention, where it is not the
    hidden size."""
    hidden = config["hidden_size"]
    q_size = config["num_attention_heads"] * head_dim(config)
    kv_size = config["num_key_value_heads"] * head_dim(config)
    attention = (input_size or hidden) * (q_size + 2 * kv_size) + q_size * hidden
    return int(attention + 3 * hidden * config["intermediate_size"])


def streamed_bytes(config: Config) -> int:
    """Weights that a forward of few tokens reads: all matrices once; of the embedding only rows, so
    none."""
    layers = config["num_hidden_layers"] * layer_weights(config)
    return BYTES_A_WEIGHT * int(layers + config["vocab_size"] * config["hidden_size"])


def eagle3_bytes(draft_len: int) -> int:
    """Weights that the head reads in a round: layer and output layer once a draft, the fusion of
    states once."""
    hidden = EAGLE3_8B["hidden_size"]
    step = layer_weights(EAGLE3_8B, 2 * hidden) + EAGLE3_8B["draft_vocab_size"] * hidden
    return BYTES_A_WEIGHT * int(draft_len * step + NUM_CAPTURED * hidden * hidden)


def kv_bytes(config: Config, num_tokens: float) -> float:
    """Keys and values of all layers."""
    a_token: int = (
        2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim(config)
    )
    return BYTES_A_WEIGHT * a_token * num_tokens


def round_bytes(num_tokens: float, draft: str | None = None, draft_len: int = 0) -> float:
    """What a round of the 8B target with `num_tokens` tokens of context in all reads at least:
    weights and KV of the target once, of the draft (`eagle3` or `draft`) once for each token that
    it drafts."""
    num_bytes = streamed_bytes(LLAMA_8B) + kv_bytes(LLAMA_8B, num_tokens)
    if draft is None:
        return num_bytes
    weights = (
        eagle3_bytes(draft_len) if draft == "eagle3" else draft_len * streamed_bytes(SHAPES[draft])
    )
    return num_bytes + weights + draft_len * kv_bytes(SHAPES[draft], num_tokens)


def read_ms(num_bytes: float) -> float:
    return num_bytes / READ_BYTES_PER_S * 1e3


def prefill_flops(num_prompts: int, prompt_len: int, config: Config = LLAMA_8B) -> float:
    """Operations of prefilling whole prompts, an addition and a multiplication counting as two.

    Every token goes through all matrices of the layers (2 operations a weight), and the token at
    position i attends to i + 1 keys: 2 operations for each element of a score and 2 for each
    element of the sum of values, so 4 * heads * head_dim * (i + 1) a layer. Only the last token of
    a prompt goes through the output layer. Norms, rotary, softmax and activations are left out."""
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    matrices = 2 * num_layers * layer_weights(config) * prompt_len
    keys_seen = prompt_len * (prompt_len + 1) / 2
    attention = 4 * num_layers * config["num_attention_heads"] * head_dim(config) * keys_seen
    output = 2 * config["vocab_size"] * hidden
    return float(num_prompts * (matrices + attention + output))
