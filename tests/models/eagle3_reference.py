"""An EAGLE-3 head in plain torch, transcribed from the papers and from what the published heads
name: the reference of `tllm_spec/models/eagle3.py`, without its modules, kernels or cache."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tllm_spec.models.llama import CausalLM


class Eagle3Reference:
    """The head of arXiv 2503.01840, with the norms of arXiv 2605.09992 (`fc_norm`, `norm_output`)
    and of speculators (`norm_before_fc`, `norm_before_residual`), on the checkpoint's own tensors,
    over a whole text without a cache."""

    def __init__(self, folder: Path, target: CausalLM) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.config = config | config.get("transformer_layer_config", {})
        self.first = "midlayer" if "midlayer.hidden_norm.weight" in self.tensors else "layers.0"
        weights = target.state_dict()
        own = {name.removeprefix("model."): tensor for name, tensor in self.tensors.items()}
        self.embedding = own.get("embed_tokens.weight", weights["model.embed_tokens.weight"])
        is_tied = self.config.get("tie_word_embeddings")
        self.output = self.embedding if is_tied else weights["lm_head.weight"]
        self.output = own.get("lm_head.weight", self.output)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """Captured states `[T, n * H]` to `[T, H]`."""
        if self.config["norm_before_fc"]:
            captured = self.norm("input_norm", captured)
        if self.config.get("fc_norm"):
            old_names = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
            is_old = "aux_norm_low.weight" in self.tensors
            size = self.config.get("target_hidden_size") or self.config["hidden_size"]
            states = captured.split(size, -1)
            names = [
                old_names[index] if is_old and index < 3 else f"fc_norm.{index}"
                for index in range(len(states))
            ]
            captured = torch.cat([self.norm(*pair) for pair in zip(names, states, strict=True)], -1)
        return self.linear("fc", captured)

    def forward(self, tokens: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and the states that the next step reads, for every position."""
        embeddings = self.embedding[torch.tensor(tokens)]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}" if layer else self.first
            x = self.norm(f"{name}.input_layernorm", hidden if layer else embeddings)
            if layer == 0:
                normed = self.norm(f"{name}.hidden_norm", hidden)
                x = torch.cat((x, normed), -1)
                if self.config["norm_before_residual"]:
                    hidden = normed
            hidden = hidden + self.attention(f"{name}.self_attn", x)
            x = self.norm(f"{name}.post_attention_layernorm", hidden)
            gate, up = (
                self.linear(f"{name}.mlp.gate_proj", x),
                self.linear(f"{name}.mlp.up_proj", x),
            )
            hidden = hidden + self.linear(f"{name}.mlp.down_proj", F.silu(gate) * up)
        normed = self.norm("norm", hidden)
        return F.linear(normed, self.output), normed if self.config.get("norm_output") else hidden

    def block(self, tokens: list[int], hidden: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """The logits of all drafts of a P-EAGLE head, `[K, V_draft]`, after a text."""
        num_masks = num_drafts - 1
        mask = self.fuse(self.tensors["mask_hidden"].flatten(0, 1))
        masked = [*tokens, *[self.config["mask_token_id"]] * num_masks]
        return self.forward(masked, torch.cat((hidden, *[mask] * num_masks)))[0][-num_drafts:]

    def attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        size, kv_heads = self.config["head_dim"], self.config["num_key_value_heads"]
        q, k, v = (self.linear(f"{name}.{kind}_proj", x).view(len(x), -1, size) for kind in "qkv")
        if f"{name}.q_norm.weight" in self.tensors:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        q, k = self.rotated(q), self.rotated(k)
        group = q.shape[1] // kv_heads
        outputs = []
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T * size**-0.5
            ones, size_of_window = torch.ones_like(scores), self.config.get("sliding_window")
            hidden = ones.triu(1).bool()
            if size_of_window is not None:
                hidden |= ones.tril(-size_of_window).bool()
            outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, head // group])
        return self.linear(f"{name}.o_proj", torch.cat(outputs, -1))

    def rotated(self, heads: torch.Tensor, first: int = 0) -> torch.Tensor:
        """RoPE as a product of complex numbers: dimension i is the real part, i + D/2 the
        imaginary. first: the position of the first row."""
        half = heads.shape[-1] // 2
        theta = self.config.get("rope_theta", 10000.0)
        factor = (self.config.get("rope_scaling") or {}).get("factor", 1.0)
        positions = torch.arange(first, first + len(heads)) / factor
        angles = torch.outer(positions, theta ** (-torch.arange(half) / half))
        pairs = torch.complex(heads[..., :half].contiguous(), heads[..., half:].contiguous())
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((turned.real, turned.imag), -1)
