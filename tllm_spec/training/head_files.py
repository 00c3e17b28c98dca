"""Heads that are trained: new ones, and the folders that they are read from and written to.

The engine's code reads all published formats. Two are written: that of EAGLE's authors, and that of
speculators (vllm-project/speculators)."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from tllm_spec.attention.interface import default_capture_layers
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.eagle3 import eagle3_tensors, target_ids
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.training.draft_head import NUM_CAPTURED, DraftHead
from tllm_spec.training.language_model import TokenData
from tllm_spec.training.trainer import Settings, add_dropout

Format = Literal["eagle", "speculators"]
# By their keys in config.json and in `Eagle3Config`.
NORMS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
# The only values that can be trained here, by their names in `Eagle3Config`.
_TRAINED = {
    "architecture": "LlamaForCausalLM",
    "hidden_act": "silu",
    **dict.fromkeys(("bias", "qkv_bias", "o_bias", "mlp_bias", "tie_word_embeddings"), False),
}


def read_shape(folder: Path, target: ModelConfig) -> Eagle3Config:
    """The configuration of a head for the target. Raises ValueError if the folder has none, or one
    that cannot be trained here."""
    shape = Eagle3Config.from_pretrained(folder)
    for key, only in _TRAINED.items():
        if (found := getattr(shape, key)) != only:
            raise ValueError(f"{key} of the head in {folder} is {found!r}; {only!r} is trained")
    if shape.rope.kind != "default":
        raise ValueError(f"rope_type of the head in {folder} is {shape.rope.kind!r}: not trained")
    if shape.hidden_size != target.hidden_size:
        raise ValueError(
            f"hidden_size of the head in {folder} is {shape.hidden_size}; the target's "
            f"{target.hidden_size} is trained"
        )
    return shape.for_target(target, NUM_CAPTURED)


def load_head(folder: Path, target: ModelConfig) -> DraftHead:
    """A trained head in fp32, on the CPU. Raises ValueError as `read_shape` does."""
    shape = read_shape(folder, target)
    tensors = eagle3_tensors(folder)
    ids = target_ids(tensors.pop("d2t", None), tensors.pop("t2d", None), shape)
    head = DraftHead(shape, torch.arange(shape.output_size) if ids is None else ids.cpu())
    lacking = head.load_state_dict(tensors, strict=False).missing_keys
    if missing := sorted({*lacking} - {"d2t", "t2d"}):
        raise ValueError(f"the head in {folder} lacks {', '.join(missing)}")
    return head


def build_head(
    shape: Eagle3Config,
    target: Any,
    draft_ids: Tensor,
    run: Settings,
    start: DraftHead | None = None,
) -> DraftHead:
    """A new fp32 head with the target's output layer and final norm, or with all that it has in
    common with the trained head `start`."""
    head = DraftHead(shape, draft_ids.cpu())
    for matrix in (parameter for parameter in head.parameters() if parameter.dim() > 1):
        torch.nn.init.normal_(matrix, std=0.02)
    ones = torch.ones(shape.hidden_size, dtype=target.dtype, device=target.device)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[draft_ids])
        head.norm.weight.copy_(target.get_decoder().norm(ones))  # some norms add 1 to the weight
    if start is not None:
        head.load_state_dict(start.state_dict(), strict=False)
    for layer in head.layers:
        add_dropout(layer, run.dropout)
        if run.compile:  # dynamic: otherwise each step and sequence length is compiled separately
            layer.compile(dynamic=True)
    return head.to(target.device)


def draft_vocabulary(texts: list[TokenData], shape: Eagle3Config) -> tuple[Tensor, float]:
    """The most frequent token ids, ascending, `[draft_vocab_size]`, and their share of the texts.
    Every text has the same weight, regardless of its size."""
    counts = [
        torch.bincount(text.tokens.int(), minlength=shape.vocab_size).double() for text in texts
    ]
    shares = torch.stack([count / count.sum() for count in counts]).mean(0)
    ids = shares.argsort(descending=True, stable=True)[: shape.output_size].sort().values
    return ids, shares[ids].sum().item()


def new_shape(
    target: ModelConfig,
    draft_vocab_size: int,
    num_layers: int,
    mask_token: int | None,
    norms: tuple[str, ...],
    window: int | None = None,
) -> Eagle3Config:
    """A head whose layers have the sizes of the target's. norms: those of `NORMS` that it has.
    window: tokens that it sees of longer texts; None: all."""
    sizes = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_sizes(target),
        "draft_vocab_size": draft_vocab_size,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": target.max_positions,
        "mask_token_id": mask_token,
        **_windows(window, num_layers),
        **dict.fromkeys(norms, True),
    }
    return Eagle3Config.from_dict(sizes)


def config_json(shape: Eagle3Config, target: ModelConfig, form: Format) -> str:
    """The head's config.json. Raises ValueError for a P-EAGLE head in the authors' format."""
    layer = {
        "model_type": "llama",
        **_sizes(shape),
        "num_hidden_layers": shape.num_layers,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        **_windows(shape.sliding_window, shape.num_layers),
    }
    outer = {
        "draft_vocab_size": shape.output_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **{norm: True for norm in NORMS if getattr(shape, norm)},
    }
    if form == "eagle":
        config = _authors(shape, layer | outer)
    else:
        config = _speculators(shape, target, outer | {"transformer_layer_config": layer})
    return json.dumps(config, indent=2) + "\n"


def _sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope.theta,
        "rms_norm_eps": config.rms_norm_eps,
    }


def _windows(size: int | None, num_layers: int) -> dict[str, Any]:
    if size is None:
        return {}
    return {"sliding_window": size, "layer_types": ["sliding_attention"] * num_layers}


def _authors(shape: Eagle3Config, config: dict[str, Any]) -> dict[str, Any]:
    if shape.mask_token is not None:
        raise ValueError("--format eagle has no P-EAGLE heads; --format speculators has")
    layers = shape.capture_layers
    own = {} if layers is None else {"eagle_aux_hidden_state_layer_ids": list(layers)}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **config,
        **({"eagle_config": own} if own else {}),
    }


def _speculators(
    shape: Eagle3Config, target: ModelConfig, config: dict[str, Any]
) -> dict[str, Any]:
    kind = "eagle3" if shape.mask_token is None else "peagle"
    layers = shape.capture_layers or default_capture_layers(target.num_layers)
    names = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}
    greedy = {"proposal_type": "greedy", "speculative_tokens": 4}
    return {
        "architectures": [names[kind]],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        # The states that enter these layers.
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": None,
        **({} if shape.mask_token is None else {"mask_token_id": shape.mask_token}),
        **config,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"architectures": [target.architecture], "name_or_path": None},
        },
    }


def save_head(head: DraftHead, config: str, output: Path) -> None:
    """Write the weights in bf16, the draft vocabulary (int64 offsets, bool) and config.json."""
    is_speculators = "speculators_model_type" in json.loads(config)
    tensors = {
        name if is_speculators else name.replace("layers.0.", "midlayer."): (
            tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        )
        .cpu()
        .contiguous()
        for name, tensor in head.state_dict().items()
    }
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(config, encoding="utf-8")
