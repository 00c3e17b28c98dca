"""An EAGLE-1/2 head in plain torch, transcribed from the papers: the reference of
`tllm_spec/models/eagle.py`, without its modules, kernels or cache."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.models.eagle3_reference import Eagle3Reference
from tllm_spec.models.llama import CausalLM


class EagleReference(Eagle3Reference):
    """The head of arXiv 2401.15077 on the checkpoint's own tensors, over a whole text without a
    cache. Norm, attention and rotary embedding are those of the EAGLE-3 reference."""

    def __init__(self, folder: Path, target: CausalLM) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())
        weights = target.state_dict()
        self.embedding = self.tensors.get(
            "embed_tokens.weight", weights["model.embed_tokens.weight"]
        )
        self.output = self.tensors.get("lm_head.weight", weights["lm_head.weight"])

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        return captured

    def forward(self, tokens: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and the states that the next step reads, for every position."""
        hidden = self.linear("fc", torch.cat((self.embedding[torch.tensor(tokens)], hidden), -1))
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            has_norm = f"{name}.input_layernorm.weight" in self.tensors
            x = self.norm(f"{name}.input_layernorm", hidden) if has_norm else hidden
            hidden = hidden + self.attention(f"{name}.self_attn", x)
            x = self.norm(f"{name}.post_attention_layernorm", hidden)
            gate = F.silu(self.linear(f"{name}.mlp.gate_proj", x))
            hidden = hidden + self.linear(
                f"{name}.mlp.down_proj", gate * self.linear(f"{name}.mlp.up_proj", x)
            )
        return F.linear(hidden, self.output), hidden
