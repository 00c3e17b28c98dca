"""Random checkpoints of every family whose weights are divided in its own way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tllm_spec
from tests.lossless.other_tokenizer import write_draft_with_another_tokenizer
from tests.models import tiny_dflash as dflash
from tests.models.deepseek import MISTRAL4, save_deepseek
from tests.models.fp8_checkpoint import quantise
from tests.models.gemma4 import save_assistant, save_larger
from tests.models.gpt_oss import in_mxfp4, save_gpt_oss
from tests.models.helpers import save_checkpoint
from tests.models.mtp_reference import save_predictable
from tests.models.qwen3_next import save_predictable as save_qwen3_next
from tests.models.test_families import MINIMAX, MINISTRAL
from tests.models.test_gemma3 import save_gemma3
from tests.models.test_llama4 import save_llama4
from tests.models.test_phi3 import save as save_phi3
from tests.models.test_qwen3_next_formats import is_published
from tests.models.tiny_dflash import write_tiny_dflash
from tests.models.tiny_eagle import write_tiny_eagle
from tests.models.tiny_eagle3 import write_tiny_eagle3

EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
QWEN2 = EXPERTS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [0]}
QWEN3 = EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]}
# A rank's slices end with blocks of 128.
IN_FP8 = EXPERTS | {
    "hidden_size": 256,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
# Inputs of ranks end with blocks of 128, but outputs do not.
QWEN3_5_FP8 = {
    "hidden_size": 160,
    "head_dim": 64,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 64,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
LLAMA4 = {"num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "attention_bias": True}
V2 = {"q_lora_rank": None, "n_shared_experts": 2}
SIZES = dflash.SIZES | {"hidden_size": 64, "vocab_size": 128}
HEAD: dict[str, Any] = {"hidden_size": 64, "vocab_size": 128, "draft_vocab_size": 100}


def save_eagle(folder: Path) -> None:
    """With a token map of all tokens, in another order."""
    write_tiny_eagle(folder, hidden_size=64, vocab_size=128, num_heads=4, num_kv_heads=2)
    (folder / "tokens.json").write_text(json.dumps(list(range(128))[::-1]))


def save_fp8(folder: Path) -> None:
    """Activations have scales of blocks."""
    save_checkpoint(folder, "Qwen3Moe", **IN_FP8)
    quantise(folder, granularity="deepseek")


def save_fp8_by_token(folder: Path) -> None:
    save_checkpoint(folder, "Llama", mlp_bias=True)
    quantise(folder, granularity="row")


def save_qwen3_5_fp8(folder: Path) -> None:
    """Blocks end within the parts of a projection, and within those of ranks."""
    save_qwen3_next(folder, family="Qwen3_5Moe", **QWEN3_5_FP8)
    quantise(folder, is_published, "deepseek")


# Eight ranks have a head each.
EIGHT_HEADS: dict[str, Any] = {
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16
}  # fmt: skip


def save_with_text(folder: Path) -> None:
    """With the tokenizer of a trained model."""
    zoo = Path(tllm_spec.__file__).parent / "zoo" / "llama"
    vocab_size = json.loads((zoo / "config.json").read_text())["vocab_size"]
    save_checkpoint(folder, "Llama", vocab_size=vocab_size, **EIGHT_HEADS)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(zoo / name, folder / name)


def save_fp8_experts_by_token(folder: Path) -> None:
    save_checkpoint(folder, "Qwen3Moe", **QWEN3)
    quantise(folder, granularity="row")


SAVERS = {
    "text-eight-heads": save_with_text,
    "eight-heads": lambda folder: save_checkpoint(folder, "Llama", **EIGHT_HEADS),
    "eight-heads-experts": lambda folder: save_checkpoint(
        folder, "Qwen3Moe", **QWEN3 | EIGHT_HEADS
    ),
    "eight-heads-latent": lambda folder: save_predictable(
        folder, num_modules=2, num_attention_heads=8, num_key_value_heads=8
    ),
    "eagle3-eight-heads": lambda folder: write_tiny_eagle3(
        folder, num_captured=2, num_heads=8, num_kv_heads=2, **HEAD | {"draft_vocab_size": 104}
    ),
    "qwen2-moe": lambda folder: save_checkpoint(folder, "Qwen2Moe", **QWEN2),
    "qwen3-moe": lambda folder: save_checkpoint(folder, "Qwen3Moe", **QWEN3),
    "qwen3-moe-fp8": save_fp8,
    "llama-fp8-by-token": save_fp8_by_token,
    "qwen3-moe-fp8-by-token": save_fp8_experts_by_token,
    "mixtral": lambda folder: save_checkpoint(folder, "Mixtral", num_local_experts=4),
    "llama4": lambda folder: save_llama4(folder, **LLAMA4),
    "gemma3": save_gemma3,
    "gemma4": save_larger,
    "gemma4-per-layer": lambda folder: save_larger(folder, "per layer"),
    "gemma4-assistant": lambda folder: save_assistant(
        folder, save_larger(folder / "target"), ordered=True
    ),
    "gemma4-experts": lambda folder: save_larger(folder, "experts"),
    "gpt-oss": save_gpt_oss,
    "gpt-oss-mxfp4": lambda folder: in_mxfp4(folder, save_gpt_oss(folder, intermediate_size=64)),
    "phi3": save_phi3,
    "minimax-m2": lambda folder: save_checkpoint(folder, "MiniMaxM2", **MINIMAX),
    "ministral3": lambda folder: save_checkpoint(folder, "Ministral3", **MINISTRAL),
    "mistral4": lambda folder: save_checkpoint(folder, "Mistral4", **MISTRAL4),
    "olmo2": lambda folder: save_checkpoint(folder, "Olmo2"),
    "qwen3-next": save_qwen3_next,
    "qwen3.5": lambda folder: save_qwen3_next(folder, family="Qwen3_5Moe"),
    "qwen3.5-fp8": save_qwen3_5_fp8,
    "deepseek-v2": lambda folder: save_deepseek(folder, "DeepseekV2", **V2),
    "deepseek-v3-strong": lambda folder: save_deepseek(folder, "DeepseekV3"),
    "glm-5": lambda folder: save_predictable(folder, family="GlmMoeDsa"),
    "glm": lambda folder: save_predictable(folder, family="Glm4Moe"),
    "deepseek-v3": lambda folder: save_predictable(folder, num_modules=2),
    "eagle": save_eagle,
    "other-tokenizer": write_draft_with_another_tokenizer,
    "eagle3": lambda folder: write_tiny_eagle3(folder, num_captured=2, **HEAD),
    "eagle3-latent": lambda folder: write_tiny_eagle3(folder, num_captured=2, latent=True, **HEAD),
    "dflash": lambda folder: write_tiny_dflash(folder, mask_token=127, sizes=SIZES),
    "dflash2": lambda folder: write_tiny_dflash(
        folder,
        mask_token=127,
        sizes=SIZES,
        selector={
            "conv_kernel_size": 2,
            "conv_group_size": 8,
            "selector_rank": 6,
            "selector_top_k": 5,
        },
    ),
    "dspark": lambda folder: write_tiny_dflash(
        folder,
        mask_token=127,
        sizes=SIZES,
        markov="gated",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
    ),
}


def save_tiny(folder: Path, name: str) -> None:
    """Nothing if it has been saved before."""
    if not (folder / name).exists():
        (folder / name).mkdir()
        SAVERS[name](folder / name)
