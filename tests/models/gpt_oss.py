"""Random checkpoints of gpt-oss, in 32 or 16 bits or with experts in MXFP4."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models import helpers
from tests.models.published import GPT_OSS_20B
from tllm_spec.kernels.gemm.int4_weights import E2M1

WINDOW = 7
SIZES: dict[str, Any] = helpers.SIZES | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": WINDOW,
    "swiglu_limit": 1.5,
    "pad_token_id": 0,
    # The ramp of frequencies is within the pairs of a head.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}


def save_gpt_oss(folder: Path, **config: Any) -> Any:
    """Write a random model to `folder`; returns it. Sinks and biases are as large as scores and
    outputs, and gates and ups often exceed their limit."""
    settings = transformers.GptOssConfig(**(SIZES | config))
    settings._experts_implementation = "eager"
    model = transformers.GptOssForCausalLM(settings).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_stack = parameter.dim() == 3
            inputs = parameter.shape[-2] if is_stack else parameter.shape[-1]
            is_matrix = is_stack or (parameter.dim() == 2 and not name.endswith("bias"))
            scaled = noise * (inputs**-0.5 if is_matrix else 0.5)
            parameter.copy_(scaled + 1 if "norm" in name else scaled)
    model.save_pretrained(folder)
    return model


def in_mxfp4(folder: Path, model: Any) -> Any:
    """Replace the experts of the saved `model` by ones in MXFP4; returns the model with the
    numbers that they stand for."""
    file = folder / "model.safetensors"
    tensors, exact = load_file(file), dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        by_outputs = tensors.pop(name).transpose(1, 2)
        blocks, scales, numbers = quantised(by_outputs.float())
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        exact[name].data.copy_(numbers.transpose(1, 2))
    save_file(tensors, file)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = GPT_OSS_20B["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    return model


def quantised(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks and scales of weights `[E, N, K]`, and what they stand for."""
    groups = weights.unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    table = torch.tensor([*E2M1, *(-number for number in E2M1)])
    scaled = groups / exponents.exp2().unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)
    numbers = table[codes.long()] * exponents.exp2().unsqueeze(-1)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks, (exponents + 127).to(torch.uint8), numbers.flatten(2)
