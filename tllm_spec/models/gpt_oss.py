"""gpt-oss: attention with sinks, in every second layer with a sliding window, and experts with
biases and a clamped SwiGLU.

Experts become tensors of single experts, with the names that other models have. Checkpoints have
one tensor for all experts of a layer, below `mlp.experts.`:

| | gates and ups | downs |
|---|---|---|
| 16 bits | `gate_up_proj` `[E, H, 2I]` | `down_proj` `[E, I, H]` |
| MXFP4 | `gate_up_proj_blocks` `[E, 2I, H / 32, 16]` | `down_proj_blocks` `[E, H, I / 32, 16]` |
| its scales | `gate_up_proj_scales` `[E, 2I, H / 32]` | `down_proj_scales` `[E, H, I / 32]` |
| biases | `gate_up_proj_bias` `[E, 2I]` | `down_proj_bias` `[E, H]` |

Blocks and scales are uint8. Of gates and ups the even outputs are gates."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tllm_spec.models.checkpoint import checkpoint_names, checkpoint_tensors, listed
from tllm_spec.models.config import FULL, SLIDING, ModelConfig, decoder_config
from tllm_spec.models.config_file import required, with_defaults
from tllm_spec.models.formats.four_bit_packings import FourBitTensor, four_bits, mxfp4_scales
from tllm_spec.models.layers import StoredWeight
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.moe_config import MoENames, moe_config, sparse_layers

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


_NAMES = MoENames(router="router")
GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"
_FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_bias|_blocks|_scales|)\Z")


def read_gpt_oss(raw: dict[str, Any]) -> ModelConfig:
    """Raises ValueError for another activation than the published models'."""
    flat = with_defaults(raw, _DEFAULTS)
    alpha = _DEFAULTS["swiglu_alpha"]
    if flat["swiglu_alpha"] != alpha:
        raise ValueError(f"swiglu_alpha is {flat['swiglu_alpha']}; only {alpha} is served.")
    if not flat.get("layer_types"):
        kinds = SLIDING, FULL
        flat["layer_types"] = [
            kinds[layer % 2] for layer in range(required(flat, "num_hidden_layers"))
        ]
    if not (flat.get("rope_parameters") or flat.get("rope_scaling")):
        flat["rope_parameters"] = _YARN
    flat |= {"use_sliding_window": None}
    limit = float(flat["swiglu_limit"])
    flat |= {"moe_intermediate_size": flat["intermediate_size"], "norm_topk_prob": True}
    moe = replace(moe_config(flat), has_bias=True, swiglu_limit=limit, names=_NAMES)
    config = replace(decoder_config(flat, reads_bias=True), has_sinks=True)
    return replace(config, moe=moe, sparse_layers=sparse_layers(flat))


class GptOssForCausalLM(CausalLM):
    @classmethod
    def check_weights(cls, config: ModelConfig) -> None:
        form = config.quantisation
        if not form.is_plain and form.packing != "mxfp4_experts":
            raise ValueError(
                "GptOssForCausalLM has other quantised weights than MXFP4 experts (quant_method "
                "'mxfp4'), which are served, as are weights of 16 or 32 bits."
            )

    @classmethod
    def stored_tensors(
        cls, path: Path, config: ModelConfig, wants: Callable[[str], bool]
    ) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        in_mxfp4 = not config.quantisation.is_plain
        return gpt_oss_tensors(path, config.num_layers, wants, in_mxfp4=in_mxfp4)


def gpt_oss_tensors(
    path: Path, num_layers: int, wants: Callable[[str], bool], *, in_mxfp4: bool
) -> Iterator[tuple[str, torch.Tensor | FourBitTensor]]:
    """As `checkpoint_tensors`. Raises ValueError if a tensor of experts is missing, or of a wrong
    shape or type."""
    suffixes = (BLOCKS, SCALES, "_bias") if in_mxfp4 else ("", "_bias")
    names = {
        f"model.layers.{layer}.mlp.experts.{kind}_proj{suffix}"
        for layer in range(num_layers)
        for kind in ("gate_up", "down")
        for suffix in suffixes
    }
    if absent := {name for name in names if wants(name)} - set(checkpoint_names(path)):
        raise ValueError(f"The checkpoint in {path} has no {listed(absent)}.")
    scale_names = {name for name in names if name.endswith(SCALES)}
    # They may be in another file than the blocks. They are mapped, not read.
    scales = dict(checkpoint_tensors(path, lambda name: name in scale_names and wants(name)))
    for name, tensor in checkpoint_tensors(
        path, lambda name: name not in scale_names and wants(name)
    ):
        if name not in names:
            yield name, tensor
        elif name.endswith(BLOCKS):
            yield from _mxfp4_experts(name, tensor, scales[name.removesuffix(BLOCKS) + SCALES])
        else:
            yield from _experts(name, tensor)


def _experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and biases."""
    found = _FUSED.match(name)
    assert found is not None
    is_bias = found[3] == "_bias"
    if tensor.dim() != (2 if is_bias else 3):
        raise ValueError(
            f"{name} has the shape {list(tensor.shape)}; it must have a row an expert."
        )
    for expert, own in enumerate(tensor):
        by_outputs, kind = own if is_bias else own.t(), "bias" if is_bias else "weight"
        for part, rows in _parts(found[2]):
            yield f"{found[1]}.{expert}.{part}.{kind}", by_outputs[rows]


def _mxfp4_experts(
    name: str, blocks: torch.Tensor, scales: torch.Tensor
) -> Iterator[tuple[str, FourBitTensor]]:
    found = _FUSED.match(name)
    assert found is not None
    shape = (*scales.shape, GROUP // 2)
    if not blocks.dtype == scales.dtype == torch.uint8 or shape != tuple(blocks.shape):
        raise ValueError(
            f"{name} is {blocks.dtype} of the shape {list(blocks.shape)}, and its scales are "
            f"{scales.dtype} of the shape {list(scales.shape)}; both must be uint8, with "
            f"{GROUP // 2} bytes for a scale."
        )
    for expert, (own, own_scales) in enumerate(zip(blocks, scales, strict=True)):
        for part, rows in _parts(found[2]):
            codes = four_bits(own[rows].flatten(1))
            words = mxfp4_scales(own_scales[rows])
            yield f"{found[1]}.{expert}.{part}.weight", FourBitTensor(codes, words, GROUP)


def _parts(kind: str) -> list[tuple[str, slice]]:
    """The layers of an expert in a tensor, and their outputs."""
    if kind == "down":
        return [("down_proj", slice(None))]
    return [("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))]
