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

from tllm_spec.attention.interface import default_capture_layers
from tllm_spec.models.eagle3_config import Eagle3Config

# Layers of draft heads for training, in plain torch.


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


NUM_CAPTURED = 3


class Cache(NamedTuple):
    """Keys and values of `S` chains after the first step and `k` further ones."""

    keys: Tensor
    """`[B, KV, S, D]`: entry j is from the target's states of token j."""
    values: Tensor
    own_keys: Tensor
    """`[B, KV, S, k, D]`: each chain's entries from its own outputs."""
    own_values: Tensor


class ChainLayer(Layer):
    """Over the entries of parallel chains."""

    def forward(
        self, hidden: Tensor, embeddings: Tensor, cos_sin: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Cache]:
        """`[B, S, H]` -> `[B, S, H]`, and the cache with this step's entries."""
        inputs, residual = self.inputs(hidden, embeddings)
        mixed, cache = attend_in_chains(*self.self_attn.project(inputs, cos_sin), cache)
        return self.outputs(residual, mixed), cache


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
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_norm = RMSNorm(NUM_CAPTURED * size, eps) if shape.norm_before_fc else None
        num_norms = NUM_CAPTURED if shape.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(num_norms))
        self.fc = nn.Linear(NUM_CAPTURED * size, size, bias=False)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, shape.output_size, bias=False)
        in_draft = torch.zeros(shape.vocab_size, dtype=torch.bool)
        in_draft[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(shape.output_size))
        self.register_buffer("t2d", in_draft)

    @property
    def draft_ids(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, features: Tensor) -> Tensor:
        """`[..., 3H]` of the target -> `[..., H]`, in fp32 also under autocast."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.config.fc_norm:
            states = features.chunk(NUM_CAPTURED, -1)
            normed = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
            features = torch.cat(normed, -1)
        hidden: Tensor = self.fc(features).float()
        return hidden

    def recurrent(self, hidden: Tensor) -> Tensor:
        """What the next step reads of the last layer's output `[..., H]`."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., H]`, from `recurrent`, -> `[..., draft_vocab_size]`."""
        normed = hidden if self.config.norm_output else self.norm(hidden)
        logits: Tensor = self.lm_head(normed)
        return logits


class Eagle3Head(FeatureHead):
    """An EAGLE-3 head."""

    def __init__(self, shape: Eagle3Config, draft_ids: Tensor) -> None:
        super().__init__(shape, draft_ids)
        self.layers = nn.ModuleList(ChainLayer(shape, index) for index in range(shape.num_layers))

    def forward(
        self, hidden: Tensor, embeddings: Tensor, caches: list[Cache] | None = None
    ) -> tuple[Tensor, list[Cache]]:
        """The next step of all chains.

        Args:
            hidden: `[B, S, H]`: at the first step `fuse` of the target's states, then the output
                of the previous step.
            embeddings: `[B, S, H]` of the token at `s + k + 1`, for chain s at step k.
            caches: of the layers, from the previous step.

        Returns:
            `[B, S, H]`, for `logits` and the next step, and the caches with this step's entries.
        """
        step = 0 if caches is None else caches[0].own_keys.shape[-2] + 1
        positions = torch.arange(step, step + hidden.shape[1], device=hidden.device)
        cos_sin = rotary_rows(self.config, positions)
        extended_caches = []
        before = [None] * len(self.layers) if caches is None else caches
        for layer, cache in zip(self.layers, before, strict=True):
            hidden, own = layer(hidden, embeddings, cos_sin, cache)
            extended_caches.append(own)
        return self.recurrent(hidden), extended_caches


def attend_in_chains(
    query: Tensor, key: Tensor, value: Tensor, cache: Cache | None
) -> tuple[Tensor, Cache]:
    """A step of all chains: `[B, heads, S, D]`, and the cache with its entries."""
    cache = extended(cache, key, value)
    if cache.own_keys.shape[-2]:
        return attend(query, cache), cache
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True), cache


def extended(cache: Cache | None, key: Tensor, value: Tensor) -> Cache:
    """`cache` with a step's keys and values `[B, heads, S, D]`."""
    if cache is None:
        return Cache(key, value, key.unsqueeze(-2)[..., :0, :], value.unsqueeze(-2)[..., :0, :])
    return cache._replace(
        own_keys=torch.cat((cache.own_keys, key.unsqueeze(-2)), -2),
        own_values=torch.cat((cache.own_values, value.unsqueeze(-2)), -2),
    )


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


# A P-EAGLE head for training, in plain torch, with the tensor names of the speculators format. The
# engine has its own implementation for inference.
#
# The head reads what an EAGLE-3 head does (`eagle3.py`), and drafts all tokens in one forward:
# after the last pair (hidden states at p, token p+1) come mask rows at positions p+1, p+2, ...,
# all with the embedding of the mask token and with `mask_hidden` instead of the target's states.
# The row at position i predicts token i+2.
#
# In training such mask rows follow many positions of a text, the anchors. A mask row sees the
# pairs up to its anchor, and the mask rows between the two.


class Rows(NamedTuple):
    """The rows of one forward over S pairs and the mask rows of A anchors, R in total: first the
    pairs, then the first mask rows after all anchors, then the second ones, and so on."""

    positions: Tensor
    """`[R]`: of the rotary embedding, also of the row's hidden state in the text."""
    sees: Tensor
    """`[R, R]` bool: which rows each row attends to."""
    sizes: list[int]
    """S, then A for each of the mask rows after an anchor."""

    @classmethod
    def of(cls, num_pairs: int, anchors: Tensor, num_masks: int) -> "Rows":
        """anchors `[A]`: positions of pairs that `num_masks` mask rows follow."""
        pairs = torch.arange(num_pairs, device=anchors.device)
        steps = torch.arange(1, num_masks + 1, device=anchors.device)
        steps = steps.repeat_interleave(len(anchors))
        of_masks = anchors.repeat(num_masks)
        chains = torch.arange(len(anchors), device=anchors.device).repeat(num_masks)
        last_pair = torch.cat((pairs, of_masks))
        sees_pairs = pairs <= last_pair.unsqueeze(1)
        own = (chains == chains.unsqueeze(1)) & (steps <= steps.unsqueeze(1))
        sees_masks = torch.cat((own.new_zeros(num_pairs, len(steps)), own))
        return cls(
            torch.cat((pairs, of_masks + steps)),
            torch.cat((sees_pairs, sees_masks), 1),
            [num_pairs, *[len(anchors)] * num_masks],
        )


class MaskedLayer(Layer):
    def forward(self, hidden: Tensor, embeddings: Tensor, cos_sin: Tensor, sees: Tensor) -> Tensor:
        """`[B, R, H]` -> `[B, R, H]`."""
        inputs, residual = self.inputs(hidden, embeddings)
        query, key, value = self.self_attn.project(inputs, cos_sin)
        each = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(each, 1) for heads in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=sees)
        return self.outputs(residual, mixed)


class PEagleHead(FeatureHead):
    """A P-EAGLE head."""

    def __init__(self, shape: Eagle3Config, draft_ids: Tensor) -> None:
        super().__init__(shape, draft_ids)
        self.layers = nn.ModuleList(MaskedLayer(shape, index) for index in range(shape.num_layers))
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, NUM_CAPTURED * shape.hidden_size))

    def forward(
        self, features: Tensor, embeddings: Tensor, mask_embedding: Tensor, rows: Rows
    ) -> Tensor:
        """The rows' states `[B, R, H]`, for `logits`.

        Args:
            features: `[B, S, 3H]` of the target.
            embeddings: `[B, S, H]` of the token after each.
            mask_embedding: `[H]` of the mask token.
            rows: S pairs and their mask rows.
        """
        batch, num_pairs = embeddings.shape[:2]
        num_masks = len(rows.positions) - num_pairs
        masks = self.fuse(self.mask_hidden).expand(batch, num_masks, -1)
        hidden = torch.cat((self.fuse(features), masks), 1)
        embeddings = torch.cat((embeddings, mask_embedding.expand(batch, num_masks, -1)), 1)
        cos_sin = rotary_rows(self.config, rows.positions)
        for layer in self.layers:
            hidden = layer(hidden, embeddings, cos_sin, rows.sees)
        return self.recurrent(hidden)
