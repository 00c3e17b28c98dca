"""An EAGLE-3 head (arXiv 2503.01840) for training, in plain torch, with the tensor names of the
speculators format. The engine has its own implementation for inference.

Entry `j` of the head reads (hidden states of the target at token j, embedding of token j+1) at
rotary position j and predicts token j+2. For tokens that the target has not read, the head's output
for the previous entry replaces the target's states.

All chains of a text run in parallel. Chain `s` starts with the target's states of the tokens up to
s; its entry at step k has position s+k. It attends to the entries j <= s from the target's states,
which are the same for every step, and to its own entries of steps 1..k, which no other chain
reads."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tllm_spec.attention.spec_metadata import default_capture_layers
from tllm_spec.models.eagle3_config import Eagle3Config

NUM_CAPTURED = 3


class Cache(NamedTuple):
    """Keys and values of `S` chains after the first step and `k` further ones."""

    keys: Tensor
    """`[B, KV, S, D]`: entry j is from the target's states of token j."""
    values: Tensor
    own_keys: Tensor
    """`[B, KV, S, k, D]`: each chain's entries from its own outputs."""
    own_values: Tensor


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


class ChainAttention(Attention):
    """Over the entries of parallel chains."""

    def forward(self, both: Tensor, cos_sin: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """`[B, S, 2H]` -> `[B, S, H]`; `cos_sin` is `[2, S, D]`."""
        query, key, value = self.project(both, cos_sin)
        if cache is None:
            none = key.unsqueeze(-2)[..., :0, :]
            cache = Cache(key, value, none, none)
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
        else:
            own_keys = torch.cat((cache.own_keys, key.unsqueeze(-2)), -2)
            own_values = torch.cat((cache.own_values, value.unsqueeze(-2)), -2)
            cache = cache._replace(own_keys=own_keys, own_values=own_values)
            mixed = attend(query, cache)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), cache


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
    """A Llama layer whose attention reads the embedding and the hidden state."""

    def __init__(self, shape: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = ChainAttention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self, hidden: Tensor, embeddings: Tensor, cos_sin: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Cache]:
        both = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(hidden)), -1)
        attended, cache = self.self_attn(both, cos_sin, cache)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), cache


class FeatureHead(nn.Module):
    """What heads on the target's hidden states have in common. The `state_dict` is a checkpoint in
    the speculators format. `d2t` holds offsets: the target's id is `draft id + d2t[draft id]`."""

    config: Eagle3Config
    layers: nn.ModuleList
    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: Eagle3Config, draft_ids: Tensor) -> None:
        """`draft_ids`: `[draft_vocab_size]`, the target's id of each token of the head,
        ascending."""
        super().__init__()
        self.config = shape
        self.fc = nn.Linear(NUM_CAPTURED * shape.hidden_size, shape.hidden_size, bias=False)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.output_size, bias=False)
        in_draft = torch.zeros(shape.vocab_size, dtype=torch.bool)
        in_draft[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(shape.output_size))
        self.register_buffer("t2d", in_draft)

    @property
    def draft_ids(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, features: Tensor) -> Tensor:
        """`[..., 3H]` of the target -> `[..., H]`, in fp32 also under autocast."""
        hidden: Tensor = self.fc(features).float()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., H]` -> `[..., draft_vocab_size]`."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


class Eagle3Head(FeatureHead):
    """An EAGLE-3 head."""

    def __init__(self, shape: Eagle3Config, draft_ids: Tensor) -> None:
        super().__init__(shape, draft_ids)
        self.layers = nn.ModuleList([Layer(shape)])

    def forward(
        self, hidden: Tensor, embeddings: Tensor, cache: Cache | None = None
    ) -> tuple[Tensor, Cache]:
        """The next step of all chains.

        Args:
            hidden: `[B, S, H]`: at the first step `fuse` of the target's states, then the output
                of the previous step.
            embeddings: `[B, S, H]` of the token at `s + k + 1`, for chain s at step k.
            cache: from the previous step.

        Returns:
            `[B, S, H]` before the final norm, and the cache with this step's entries.
        """
        step = 0 if cache is None else cache.own_keys.shape[-2] + 1
        positions = torch.arange(step, step + hidden.shape[1], device=hidden.device)
        output: tuple[Tensor, Cache] = self.layers[0](
            hidden, embeddings, rotary_rows(self.config, positions), cache
        )
        return output


def attend(query: Tensor, cache: Cache) -> Tensor:
    """`[B, heads, S, D]`: chain s attends to the entries j <= s and to its own. No fused kernel has
    this mask."""
    batch, heads, chains, head_dim = query.shape
    kv_heads = cache.keys.shape[1]
    grouped = (batch, kv_heads, heads // kv_heads, chains, -1)
    # The query heads of a KV head are further rows of one GEMM: [B, KV, G*S, D] @ [B, KV, D, S].
    rows = (query * head_dim**-0.5).reshape(batch, kv_heads, -1, head_dim)
    future = torch.ones(chains, chains, dtype=torch.bool, device=query.device).triu(1)
    shared = (rows @ cache.keys.mT).view(grouped).masked_fill(future, -torch.inf)
    own = torch.einsum("bngsd,bnskd->bngsk", rows.view(grouped), cache.own_keys)
    weights = torch.cat((shared, own), -1).softmax(-1)
    # Converted after slicing, which packs the rows: a GEMM over rows of S + k would be unaligned.
    on_shared, on_own = weights[..., :chains].to(query.dtype), weights[..., chains:].to(query.dtype)
    mixed = (on_shared.flatten(2, 3) @ cache.values).view(grouped)
    mixed = mixed + torch.einsum("bngsk,bnskd->bngsd", on_own, cache.own_values)
    return mixed.flatten(1, 2)


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


def target_states(
    target: Any, tokens: Tensor, layers: tuple[int, ...] | None
) -> tuple[Tensor, Tensor]:
    """`[B, T]` tokens -> the states `[B, T, 3H]` that the head reads, by default those of the
    engine's default layers, and the logits `[B, T, V]` from one forward of the target."""
    output = target(input_ids=tokens, output_hidden_states=True, use_cache=False)
    if layers is None:
        layers = default_capture_layers(target.config.get_text_config().num_hidden_layers)
    # `hidden_states[0]` is the embedding: the output of layer i is `hidden_states[i + 1]`.
    return torch.cat([output.hidden_states[layer + 1] for layer in layers], -1), output.logits
