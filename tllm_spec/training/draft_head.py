"""EAGLE-3 (arXiv 2503.01840) and P-EAGLE heads for training, in plain torch, with the tensor names
of the speculators format. The engine has its own implementation for inference.

Entry `j` of the head reads (hidden states of the target at token j, embedding of token j+1) at
rotary position j and predicts token j+2. For tokens that the target has not read, the head's output
for the previous entry replaces the target's states. A P-EAGLE head drafts all tokens at once: there
`mask_hidden` replaces the states, and the mask token the tokens.

All chains of a text run in parallel. Chain `s` starts with the target's states of the tokens up to
s; its entry at step k has position s+k. It attends to the entries j <= s from the target's states,
which are the same for every step, and to its own entries of steps 1..k, which no other chain
reads."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tllm_spec.attention.interface import default_capture_layers
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.training.language_model import ARGMAX_SHARE

NUM_CAPTURED = 3
Head = Any  # a `DraftHead`, or MTP modules (`deepseek.py`) with the same methods


class Cache(NamedTuple):
    """Keys and values of `S` chains after the first step, and of those of them that go on."""

    keys: Tensor
    """`[B, KV, S, D]`: entry j is from the target's states of token j."""
    values: Tensor
    own: tuple[tuple[Tensor, Tensor], ...] = ()
    """Keys and values `[B, KV, A, D]` of each further step: the chains' own entries."""


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


class Layer(nn.Module):
    """A Llama layer over the entries of parallel chains. A head's first layer reads embeddings and
    hidden states, the others hidden states only."""

    def __init__(self, shape: Eagle3Config, index: int) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_norm = None if index else LlamaRMSNorm(size, eps)
        self.self_attn = Attention(shape, size if index else 2 * size)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = LlamaMLP(shape)
        self.norm_before_residual = shape.norm_before_residual

    def forward(
        self,
        hidden: Tensor,
        embeddings: Tensor,
        cos_sin: Tensor,
        starts: Tensor,
        cache: Cache | None,
    ) -> tuple[Tensor, Cache]:
        """`[B, A, H]` -> `[B, A, H]`, and the cache with this step's entries."""
        if self.hidden_norm is None:
            inputs = self.input_layernorm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            inputs = torch.cat((self.input_layernorm(embeddings), normed), -1)
            hidden = normed if self.norm_before_residual else hidden
        query, key, value = self.self_attn.project(inputs, cos_sin)
        cache = extended(cache, key, value)
        mixed = attend(query, cache, starts)
        hidden = hidden + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), cache


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


class DraftHead(nn.Module):
    """An EAGLE-3 or P-EAGLE head. mask_token: that it reads instead of its own drafts; None: it
    reads these. The `state_dict` is a checkpoint in the speculators format. `d2t`
    holds offsets: the target's id is `draft id + d2t[draft id]`."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: Eagle3Config, draft_ids: Tensor) -> None:
        """`draft_ids`: `[draft_vocab_size]`, the target's id of each token of the head,
        ascending."""
        super().__init__()
        self.config = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_norm = LlamaRMSNorm(NUM_CAPTURED * size, eps) if shape.norm_before_fc else None
        num_norms = NUM_CAPTURED if shape.fc_norm else 0
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(size, eps) for _ in range(num_norms))
        self.fc = nn.Linear(NUM_CAPTURED * size, size, bias=False)
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head = nn.Linear(size, shape.output_size, bias=False)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.num_layers))
        self.mask_token = shape.mask_token
        if shape.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, NUM_CAPTURED * size))
        in_draft = torch.zeros(shape.vocab_size, dtype=torch.bool)
        in_draft[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(shape.output_size))
        self.register_buffer("t2d", in_draft)

    @property
    def draft_ids(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def target_states(self, target: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """As the function of this name."""
        return target_states(target, tokens, self.config.capture_layers)

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

    def forward(
        self, hidden: Tensor, embeddings: Tensor, starts: Tensor, caches: list[Cache] | None = None
    ) -> tuple[Tensor, list[Cache]]:
        """The next step of A chains; at the first step all S chains of a text.

        Args:
            hidden: `[B, A, H]`: at the first step `fuse` of the target's states, then the output
                of the previous step, or `fuse` of `mask_hidden`.
            embeddings: `[B, A, H]` of the token at `s + k + 1`, for chain s at step k.
            starts: `[A]`: which chains.
            caches: from the previous step.

        Returns:
            `[B, A, H]`, for `logits` and the next step, and the caches with this step's entries.
        """
        step = 0 if caches is None else len(caches[0].own) + 1
        cos_sin = rotary_rows(self.config, starts + step)
        extended_caches = []
        before = [None] * len(self.layers) if caches is None else caches
        for layer, cache in zip(self.layers, before, strict=True):
            hidden, own = layer(hidden, embeddings, cos_sin, starts, cache)
            extended_caches.append(own)
        return self.norm(hidden) if self.config.norm_output else hidden, extended_caches

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., H]`, from `forward`, -> `[..., draft_vocab_size]`."""
        normed = hidden if self.config.norm_output else self.norm(hidden)
        logits: Tensor = self.lm_head(normed)
        return logits


def extended(cache: Cache | None, key: Tensor, value: Tensor) -> Cache:
    """`cache` with a step's keys and values `[B, heads, A, D]`."""
    if cache is None:
        return Cache(key, value)
    return cache._replace(own=(*cache.own, (key, value)))


def attend(query: Tensor, cache: Cache, starts: Tensor) -> Tensor:
    """`[B, heads, A, D]`: each chain attends to the entries up to its start `[A]` and to its own.
    No fused kernel has this mask."""
    if not cache.own:
        return F.scaled_dot_product_attention(
            query, cache.keys, cache.values, is_causal=True, enable_gqa=True
        )
    own_keys, own_values = (torch.stack(parts, -2) for parts in zip(*cache.own, strict=True))
    batch, heads, chains, head_dim = query.shape
    kv_heads, num_shared = cache.keys.shape[1:3]
    grouped = (batch, kv_heads, heads // kv_heads, chains, -1)
    # The query heads of a KV head are further rows of one GEMM: [B, KV, G*A, D] @ [B, KV, D, S].
    rows = (query * head_dim**-0.5).reshape(batch, kv_heads, -1, head_dim)
    future = torch.arange(num_shared, device=query.device) > starts.unsqueeze(1)
    shared = (rows @ cache.keys.mT).view(grouped).masked_fill(future, -torch.inf)
    own = torch.einsum("bngsd,bnskd->bngsk", rows.view(grouped), own_keys)
    weights = torch.cat((shared, own), -1).softmax(-1)
    # Converted after slicing, which packs the rows: a GEMM over rows of S + k would be unaligned.
    on_shared = weights[..., :num_shared].to(query.dtype)
    on_own = weights[..., num_shared:].to(query.dtype)
    mixed = (on_shared.flatten(2, 3) @ cache.values).view(grouped)
    mixed = mixed + torch.einsum("bngsk,bnskd->bngsd", on_own, own_values)
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


# Loss and validation of an EAGLE-3 or P-EAGLE head: every step of its chains of drafts is compared
# with the target's distribution.
#
# An EAGLE-3 head is trained on its own outputs, as in drafting ("training-time test" of the
# EAGLE-3 paper, arXiv 2503.01840): a chain of `unroll` steps along the text starts at every
# position.


STEP_DECAY = 0.9
"""Ratio of a step's weight in the loss to the previous step's: a late draft matters only if the
earlier ones were right."""
ALIGNMENT = 8
"""The number of chains of a sequence is a multiple of this, so that GEMMs use the tensor cores."""


class Labels(NamedTuple):
    """The labels at positions of a text, in the head's vocabulary."""

    wanted: Tensor
    """`[..., D]`: weights of the draft tokens' log probabilities in the loss."""
    floor: Tensor
    """`[...]`: the constant that makes the KL part of a perfect head zero."""
    best: Tensor
    """`[...]`: the target's best token, in the target's ids."""


def labels(target_logits: Tensor, draft_ids: Tensor) -> Labels:
    """From logits `[..., V]`. With p the target's distribution, D the draft vocabulary and
    a = ARGMAX_SHARE, a position's loss is

        (1 - a) * sum over D of p(v) * (log p(v)/p(D) - log draft(v))  +  a * (-log draft(best))

    The first part is the KL of the renormalised p, weighted by p(D): tokens outside D do not
    contribute. The second part is zero if the target's best token is outside D."""
    best, logits = target_logits.argmax(-1), target_logits.float()
    restricted = logits[..., draft_ids]
    wanted = (restricted - logits.logsumexp(-1, keepdim=True)).exp_()  # p so far
    floor = (wanted * restricted.log_softmax(-1)).sum(-1)
    is_best = draft_ids == best.unsqueeze(-1)
    wanted.mul_(1 - ARGMAX_SHARE).add_(is_best, alpha=ARGMAX_SHARE)
    return Labels(wanted, (1 - ARGMAX_SHARE) * floor, best)


def step_states(
    head: Head, target: Any, features: Tensor, tokens: Tensor, unroll: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """What `head.logits` reads at steps 0..unroll-1 along the text, `[B, n, H]`, and for each of
    the n rows the index `[n]`, on the CPU, of the target's logits that predict the same token.

    `features` `[B, T, 3H]` and `tokens` `[B, T]` are of the same text. The chains are those that
    end within it; chain s predicts the token at `s + k + 2` at step k. In training a third of a
    P-EAGLE head's chains, drawn by chance, goes on after the first step, as there are many."""
    embed, mask_token = target.get_input_embeddings(), head.mask_token
    embeddings, count = embed(tokens), features.shape[1] - unroll
    chains = torch.arange(count)
    starts, caches = to_device(chains, features.device), None
    inputs: tuple[Tensor, ...] = head.fuse(features[:, :count]), embeddings[:, 1 : 1 + count]
    for step in range(unroll):
        hidden, caches = head(*inputs, starts, caches)
        yield hidden, chains + step + 1
        if mask_token is None:
            inputs = hidden, embeddings[:, step + 2 : step + 2 + count]
        elif step == 0:
            if head.training:
                chains = torch.randperm(count)[: max(1, count // 3 // ALIGNMENT) * ALIGNMENT]
            starts = to_device(chains, features.device)
            masks = head.fuse(head.mask_hidden), embed(tokens.new_tensor(mask_token))
            inputs = tuple(each.expand(len(tokens), len(chains), -1) for each in masks)


class Batch(NamedTuple):
    """Sequences of a step of training."""

    tokens: Tensor
    """`[b, T]`, of this rank."""
    counts: Tensor
    """`[B, T]` bool, of all ranks, on the CPU: whether the target's choice after the token is
    trained."""
    share: slice = slice(None)
    """This rank's rows of all B."""
    states: tuple[Tensor, Tensor] | None = None
    """`[b, T, 3H]` and, after the final norm, `[b, T, H]` of the target; None: it runs."""

    @classmethod
    def whole(
        cls, tokens: Tensor, unroll: int, states: tuple[Tensor, Tensor] | None = None
    ) -> "Batch":
        """All of `[B, T]` tokens, but for a few at the end where the chains are not aligned."""
        length = aligned_chains(tokens.shape[1], unroll) + unroll
        if states is not None:
            states = states[0][:, :length], states[1][:, :length]
        return cls(
            tokens[:, :length], torch.ones(len(tokens), length, dtype=torch.bool), states=states
        )


class Step(NamedTuple):
    """One step of the chains of a text; rows as in `step_states`."""

    losses: Tensor
    """`[M]`: of the `[B, n]` rows that count, in their order."""
    is_best: Tensor
    """`[M]`: whether the head's best token is the target's."""
    rows: Tensor
    """`[n]`."""


def steps_along(
    head: Head,
    target: Any,
    tokens: Tensor,
    unroll: int,
    states: tuple[Tensor, Tensor] | None = None,
    counts: Tensor | None = None,
) -> Iterator[Step]:
    """Every step of the chains along `[B, T]` tokens. GEMMs are in the target's type, or in bf16
    under autocast. states: as in
    `Batch`; counts: of these tokens, None: all. Logits are computed of what counts only."""
    device = tokens.device
    is_bf16 = target.dtype == torch.bfloat16 or torch.is_autocast_enabled(device.type)
    counted = torch.ones(tokens.numel(), dtype=torch.bool) if counts is None else counts.flatten()
    number_of = counted.cumsum(0) - 1  # of a token, among those that count
    first = torch.arange(len(tokens)).unsqueeze(1) * tokens.shape[1]
    with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
        with torch.no_grad():
            if states is None:
                features, target_logits = head.target_states(target, tokens)
            else:
                # They have the type of the engine that recorded them.
                features, last = states if is_bf16 else [each.to(target.dtype) for each in states]
                target_logits = target.get_output_embeddings()(last)
            chosen = to_device(counted.nonzero().squeeze(1), device)
            goal = labels(target_logits.flatten(0, 1)[chosen], head.draft_ids)
        for hidden, rows in step_states(head, target, features, tokens, unroll):
            predicting = (first + rows).flatten()
            own = counted[predicting].nonzero().squeeze(1)
            logits = head.logits(hidden.flatten(0, 1)[to_device(own, device)])
            numbers = to_device(number_of[predicting[own]], device)
            wanted, floor, best = (part[numbers] for part in goal)
            log_probs = F.log_softmax(logits, -1, dtype=torch.float32)
            losses = floor - (wanted * log_probs).sum(-1)
            yield Step(losses, head.draft_ids[logits.argmax(-1)] == best, rows)


def unrolled(head: Head, target: Any, batch: Batch, unroll: int) -> tuple[Tensor, Tensor]:
    """Loss and agreement with the target's best tokens, each `[unroll]`: this rank's part of the
    mean over the batch. The ranks' parts add up to the mean."""
    losses, agreements = [], []
    own = batch.counts[batch.share]
    for step in steps_along(head, target, batch.tokens, unroll, batch.states, own):
        number = max(1, int(batch.counts[:, step.rows].sum()))
        losses.append(step.losses.sum() / number)
        agreements.append(step.is_best.sum() / number)
    return torch.stack(losses), torch.stack(agreements)


def aligned_chains(length: int, unroll: int) -> int:
    """The number of chains of a sequence of `length` tokens. Raises ValueError if it is 0."""
    chains = (length - unroll) // ALIGNMENT * ALIGNMENT
    if chains < 1:
        raise ValueError(
            f"--length is {length}; with --unroll {unroll} it must be {unroll + ALIGNMENT} or more"
        )
    return chains


def weighted(losses: Tensor) -> Tensor:
    """The mean of `[unroll]` losses with weights 1, STEP_DECAY, STEP_DECAY^2, ..."""
    weights = STEP_DECAY ** torch.arange(len(losses), device=losses.device)
    return (weights * losses).sum() / weights.sum()


def head_figures(head: Head, target: Any, unroll: int, tokens: Tensor) -> dict[str, Tensor]:
    """The loss along `[B, T]` tokens, and `agreement` `[unroll]`: how often each draft is the
    target's best token."""
    losses, agreements = unrolled(head, target, Batch.whole(tokens, unroll), unroll)
    return {"loss": weighted(losses), "agreement": agreements}
