"""The models that speed is measured on, and the least that a round must read or compute.

Shapes are folders with a config.json and no weights (`load_format: dummy`); `zoo` runs anywhere."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]

WEIGHT_BYTES = 2  # bfloat16, for weights, keys and values
READ_BYTES_PER_S = 4.45e12  # pure reads on an H200, measured
MATMUL_FLOPS = 790e12  # a large bfloat16 GEMM on an H200, measured
# Synthetic acceptance by position: 2.60 tokens per round with three drafts.
RATES = (0.73, 0.52, 0.35, 0.25, 0.18, 0.13, 0.09)

LLAMA_8B: Config = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
EAGLE3_8B: Config = {
    **LLAMA_8B, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}  # fmt: skip
PEAGLE_8B: Config = {
    **EAGLE3_8B, "architectures": ["PeagleLlamaForCausalLM"], "parallel_drafting": True,
    "mask_token_id": 0,
}  # fmt: skip
LLAMA_1B: Config = {
    **LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
TINY: Config = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "torch_dtype": "float32",
}  # fmt: skip
SHAPES: Mapping[str, Config] = {
    "target": LLAMA_8B, "eagle3": EAGLE3_8B, "peagle": PEAGLE_8B, "draft": LLAMA_1B,
}  # fmt: skip
ZOO = {
    "target": "zoo:llama", "eagle3": "zoo:llama-eagle3", "peagle": "zoo:llama-peagle",
    "draft": "zoo:llama-draft",
}  # fmt: skip
NUM_CAPTURED = 3  # target layers whose hidden states an EAGLE-3 head reads


@dataclass(frozen=True)
class Models:
    """`shape`: `llama-8b` or `zoo`. `folder` holds the 8B shapes' configurations."""

    shape: str
    device: str
    folder: Path

    @property
    def is_8b(self) -> bool:
        return self.shape == "llama-8b"

    @property
    def target(self) -> str:
        return self._path("target")

    @property
    def options(self) -> dict[str, Any]:
        """`LlmArgs` of every engine. Prefix reuse is off."""
        kv_cache = {"enable_block_reuse": False} | ({} if self.is_8b else {"max_tokens": 4096})
        return {"device": self.device, "kv_cache_config": kv_cache, **self._load_format}

    def eagle3(self, draft_len: int, **options: Any) -> dict[str, Any]:
        return self._drafting("Eagle3", "eagle3", draft_len) | options

    def peagle(self, draft_len: int, **options: Any) -> dict[str, Any]:
        return self._drafting("Eagle3", "peagle", draft_len) | options

    def draft_target(self, draft_len: int, **options: Any) -> dict[str, Any]:
        return self._drafting("Draft_Target", "draft", draft_len) | options

    def ngram(self, draft_len: int, **options: Any) -> dict[str, Any]:
        rates = {"synthetic_acceptance_rates": RATES[:draft_len]}
        return {"decoding_type": "NGram", "max_draft_len": draft_len} | rates | options

    @property
    def _load_format(self) -> dict[str, str]:
        return {"load_format": "dummy"} if self.is_8b else {}

    def _path(self, name: str) -> str:
        return str(self.folder / name) if self.is_8b else ZOO[name]

    def _drafting(self, decoding_type: str, name: str, draft_len: int) -> dict[str, Any]:
        return {
            "decoding_type": decoding_type,
            "speculative_model": self._path(name),
            "max_draft_len": draft_len,
            "synthetic_acceptance_rates": RATES[:draft_len],
            **self._load_format,
        }


@contextmanager
def open_models(shape: str, device: str) -> Iterator[Models]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, config in SHAPES.items():
            (folder / model).mkdir()
            (folder / model / "config.json").write_text(json.dumps(config))
        yield Models(shape, device, folder)


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def layer_weights(config: Config, input_size: int | None = None) -> int:
    """Elements of a decoder layer's matrices. `input_size`: the attention's, if not hidden_size."""
    hidden = config["hidden_size"]
    q_size = config["num_attention_heads"] * head_dim(config)
    kv_size = config["num_key_value_heads"] * head_dim(config)
    attention = (input_size or hidden) * (q_size + 2 * kv_size) + q_size * hidden
    return int(attention + 3 * hidden * config["intermediate_size"])


def streamed_bytes(config: Config) -> int:
    """Weights that a forward of few tokens reads: every matrix once, the embedding not at all."""
    layers = config["num_hidden_layers"] * layer_weights(config)
    return WEIGHT_BYTES * int(layers + config["vocab_size"] * config["hidden_size"])


def eagle3_bytes(draft_len: int) -> int:
    """Weights that the head reads in a round: `fc` once, the layer and lm_head once per draft."""
    hidden = EAGLE3_8B["hidden_size"]
    step = layer_weights(EAGLE3_8B, 2 * hidden) + EAGLE3_8B["draft_vocab_size"] * hidden
    return WEIGHT_BYTES * int(draft_len * step + NUM_CAPTURED * hidden * hidden)


def kv_bytes(config: Config, num_tokens: float) -> float:
    """Keys and values of all layers."""
    heads: int = config["num_hidden_layers"] * config["num_key_value_heads"]
    return WEIGHT_BYTES * 2 * heads * head_dim(config) * num_tokens


def round_bytes(num_tokens: float, draft: str | None = None, draft_len: int = 0) -> float:
    """What a round of the 8B target reads at least, with `num_tokens` tokens of context in all:
    weights and KV of the target once, and of the draft once per draft (`eagle3` or `draft`), or
    once (`peagle`)."""
    num_bytes = streamed_bytes(LLAMA_8B) + kv_bytes(LLAMA_8B, num_tokens)
    if draft is None:
        return num_bytes
    passes = 1 if draft == "peagle" else draft_len
    own = draft_len * streamed_bytes(SHAPES[draft]) if draft == "draft" else eagle3_bytes(passes)
    return num_bytes + own + passes * kv_bytes(SHAPES[draft], num_tokens)


def read_ms(num_bytes: float) -> float:
    return num_bytes / READ_BYTES_PER_S * 1e3


def prefill_flops(num_prompts: int, prompt_len: int, config: Config = LLAMA_8B) -> float:
    """Operations of prefilling whole prompts, where a multiply-add counts as two.

    Every token goes through all layer matrices. The token at position i attends to i + 1 keys:
    4 * heads * head_dim * (i + 1) operations per layer. Only a prompt's last token goes through
    lm_head. Norms, rotary embedding, softmax and activations are left out."""
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    matrices = 2 * num_layers * layer_weights(config) * prompt_len
    num_pairs = prompt_len * (prompt_len + 1) / 2
    attention = 4 * num_layers * config["num_attention_heads"] * head_dim(config) * num_pairs
    return float(num_prompts * (matrices + attention + 2 * config["vocab_size"] * hidden))
