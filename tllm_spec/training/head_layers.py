"""Layers of draft heads for training, in plain torch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tllm_spec.models.eagle3_config import Eagle3Config


class RMSNorm(nn.Module):
    """In fp32, also under autocast."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.float()
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Eagle3Config, input_size: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        width, kv_width = (
            count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads)
        )
        self.q_proj = nn.Linear(input_size, width, bias=False)
        self.k_proj = nn.Linear(input_size, kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def project(self, inputs: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[B, S, input_size]` -> rotated queries and keys, and values, `[B, heads, S, D]`;
        `cos_sin` is `[2, S, D]`."""
        query, key, value = (
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(query, cos_sin), rotate(key, cos_sin), value


class MLP(nn.Module):
    def __init__(self, shape: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class Layer(nn.Module):
    """What the Llama layers of heads have in common. A head's first layer reads embeddings and
    hidden states, the others hidden states only."""

    def __init__(self, shape: Eagle3Config, index: int) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = None if index else RMSNorm(size, eps)
        self.self_attn = Attention(shape, size if index else 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(shape)
        self.norm_before_residual = shape.norm_before_residual

    def inputs(self, hidden: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, `[B, S, H]` or `[B, S, 2H]`, and the residual `[B, S, H]`."""
        if self.hidden_norm is None:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.input_layernorm(embeddings), normed), -1)
        return both, normed if self.norm_before_residual else hidden

    def outputs(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream `[B, S, H]` after the layer; mixed: attention's result, `[B, heads,
        S, D]`."""
        hidden = residual + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


def rotary_rows(shape: Eagle3Config, positions: Tensor) -> Tensor:
    """Cosines and sines `[2, S, D]` (RoFormer, arXiv 2104.09864), repeated for both halves of D as
    in Llama."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions.device).float() / shape.head_dim
    angles = torch.outer(positions.float(), shape.rope.theta**-exponents).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """`[B, heads, S, D]`, in the dtype of `heads`."""
    low, high = heads.chunk(2, -1)
    return (heads * cos_sin[0] + torch.cat((-high, low), -1) * cos_sin[1]).to(heads.dtype)
