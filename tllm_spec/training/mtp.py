"""MTP modules (arXiv 2412.19437, section 2.2) for training, in plain torch, with the tensor names
of published checkpoints. The engine has its own implementation for inference.

As in `eagle3.py`, entry `j` of a module reads (the target's hidden state of token j after the final
norm, embedding of token j+1) and predicts token j+2, and all chains of a text run in parallel.
Later entries of a chain read the output of the step before. EAGLE-style, one module makes every
step; "vanilla", step k is module k's. Each module has entries of its own."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    apply_rotary_pos_emb_interleave,
)

from tllm_spec.training.deepseek import save_model, stacked, with_dense_experts
from tllm_spec.training.eagle3 import Cache, attend, extended
from tllm_spec.training.head_loss import aligned_chains, weighted
from tllm_spec.training.language_model import distillation_loss
from tllm_spec.training.trainer import Settings, add_dropout

_OUTER = ("enorm", "hnorm", "eh_proj", "shared_head")


class NextnModule(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = DeepseekV3RMSNorm(size, eps)
        self.hnorm = DeepseekV3RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer: Any = with_dense_experts(
            DeepseekV3DecoderLayer(config, config.num_hidden_layers - 1)
        )
        self.shared_head = nn.ModuleDict({"norm": DeepseekV3RMSNorm(size, eps)})

    def read(
        self, hidden: Tensor, embeddings: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None
    ) -> tuple[Tensor, Tensor, Cache]:
        """The next step of all chains up to its entries: the residual `[B, S, H]`, queries, and
        the cache with the entries. Arguments as in `forward`."""
        x = self.eh_proj(torch.cat((self.enorm(embeddings), self.hnorm(hidden)), -1)).float()
        layer = self.layer
        query, key, value = entries(layer.self_attn, layer.input_layernorm(x), rotary)
        return x, query, extended(cache, key, value)

    def forward(
        self,
        hidden: Tensor,
        embeddings: Tensor,
        rotary: tuple[Tensor, Tensor],
        starts: Tensor,
        cache: Cache | None,
    ) -> tuple[Tensor, Cache]:
        """The next step of all chains: `[B, S, H]` after the final norm, and the entries.

        Args:
            hidden: `[B, S, H]`: the target's after its final norm, then the step before's result.
            embeddings: `[B, S, H]` of the token after.
            rotary: cosines and sines of the entries' positions.
            starts: `[S]`, the chains' numbers.
            cache: of the steps before; None: this is the first.
        """
        x, query, cache = self.read(hidden, embeddings, rotary, cache)
        mixed, layer = attend(query, cache, starts), self.layer
        x = x + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        output: Tensor = self.shared_head["norm"](x)
        return output, cache


class NextnModules(nn.Module):
    """The modules of a checkpoint with their target, which is not trained."""

    target: Any

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.config = target.config
        count = target.config.num_nextn_predict_layers
        self.steps = nn.ModuleList(NextnModule(target.config) for _ in range(count))
        self.__dict__["target"] = target

    @classmethod
    def from_pretrained(cls, folder: Path, target: Any) -> "NextnModules":
        """In fp32, on the target's device, without gradients."""
        modules = cls(target)
        stored = load_file(folder / "model.safetensors")
        for index, module in enumerate(modules.steps):
            prefix = f"model.layers.{target.config.num_hidden_layers + index}."
            own = {
                name.removeprefix(prefix): tensor.float()
                for name, tensor in stored.items()
                if name.startswith(prefix)
            }
            module.load_state_dict(
                {
                    name if name.startswith(_OUTER) else f"layer.{name}": tensor
                    for name, tensor in stacked(own).items()
                }
            )
        return modules.to(target.device).eval().requires_grad_(False)

    def checkpoint(self) -> dict[str, Tensor]:
        """The tensors by their names in a checkpoint, experts stacked. The target's embedding and
        output layer are not repeated."""
        first = self.config.num_hidden_layers
        return {
            f"model.layers.{first + index}.{name.removeprefix('layer.')}": tensor
            for index, module in enumerate(self.steps)
            for name, tensor in module.state_dict().items()
        }

    def chain(
        self, hidden: Tensor, embeddings: Iterable[Tensor], num_steps: int, *, is_vanilla: bool
    ) -> Iterator[Tensor]:
        """The states `[B, S, H]` of each step of the chains from all rows of the target's states
        `[B, S, H]`, after its final norm. Row s of step k predicts the token at `s + k + 2`.

        embeddings: of each step, `[B, S, H]` of the tokens after each row's. With one module it
        makes every step; with several, module k makes step k, and the later ones only note what
        they read."""
        modules: list[Any] = list(self.steps[:num_steps]) if is_vanilla else [self.steps[0]]
        caches: list[Cache | None] = [None] * len(modules)
        starts = torch.arange(hidden.shape[1], device=hidden.device)
        for step, tokens in enumerate(embeddings):
            now = step if len(modules) > 1 else 0
            inputs = hidden, tokens, self.target.model.rotary_emb(hidden, (starts + step)[None])
            for later in range(now + 1, len(modules)):
                caches[later] = modules[later].read(*inputs, caches[later])[-1]
            hidden, caches[now] = modules[now](*inputs, starts, caches[now])
            yield hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.target.lm_head(hidden)
        return logits


def entries(
    attention: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of latent attention, expanded for all heads, `[B, heads, S, D]`."""
    config = attention.config
    nope, rope, value_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    query = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(hidden)))
    query = query.unflatten(-1, (-1, nope + rope)).transpose(1, 2)
    latent, shared = attention.kv_a_proj_with_mqa(hidden).split((config.kv_lora_rank, rope), -1)
    both = attention.kv_b_proj(attention.kv_a_layernorm(latent))
    key, value = (
        both.unflatten(-1, (-1, nope + value_dim)).transpose(1, 2).split((nope, value_dim), -1)
    )
    turned, shared = apply_rotary_pos_emb_interleave(
        query[..., nope:], shared.unsqueeze(1), *rotary
    )
    shared = shared.expand(-1, key.shape[1], -1, -1).to(key.dtype)
    query = torch.cat((query[..., :nope], turned.to(query.dtype)), -1)
    return query, torch.cat((key, shared), -1), value


# Loss and validation of MTP modules: every step of their chains is compared with the target's
# distribution.
#
# The first module is trained on its own outputs, as it drafts EAGLE-style. The others are trained
# as "vanilla" steps after it, on outputs that they do not change.


def build_modules(target: Any, run: Settings) -> NextnModules:
    """New modules that begin as copies of the target's last layer and pass on the mean of both
    inputs."""
    modules = NextnModules(target)
    last, norm = target.model.layers[-1].state_dict(), target.model.norm.state_dict()
    half = 0.5 * torch.eye(target.config.hidden_size)
    for module in modules.steps:
        assert isinstance(module, NextnModule)
        module.layer.load_state_dict(last)
        module.shared_head["norm"].load_state_dict(norm)
        with torch.no_grad():
            module.eh_proj.weight.copy_(torch.cat((half, half), 1))
            module.eh_proj.weight += 0.02 * torch.randn_like(module.eh_proj.weight)
        add_dropout(module.layer, run.dropout)
    return modules.to(target.device)


class TargetRows(NamedTuple):
    """What the target has for `[B, T]` tokens."""

    hidden: Tensor
    """`[B, T, H]`, after the final norm."""
    embeddings: Tensor
    """`[B, T, H]` of the tokens."""
    logits: Tensor
    """`[B, T, V]`."""


@torch.no_grad()
def target_rows(target: Any, tokens: Tensor) -> TargetRows:
    hidden = target.model(input_ids=tokens, use_cache=False)[0]
    return TargetRows(hidden, target.get_input_embeddings()(tokens), target.lm_head(hidden))


def compared(
    modules: NextnModules, rows: TargetRows, num_steps: int, *, is_vanilla: bool
) -> tuple[Tensor, Tensor]:
    """Loss and agreement with the target's best tokens, each `[num_steps]`."""
    length = aligned_chains(rows.hidden.shape[1], num_steps) + num_steps
    hidden, embeddings, target_logits = (part[:, :length] for part in rows)
    losses, agreements = [], []
    count = length - num_steps
    parts = (embeddings[:, step : step + count] for step in range(1, 1 + num_steps))
    chain = modules.chain(hidden[:, :count], parts, num_steps, is_vanilla=is_vanilla)
    for step, states in enumerate(chain, start=1):
        goal = target_logits[:, step : step + count]
        logits = modules.logits(states)
        losses.append(distillation_loss(logits, goal))
        agreements.append((logits.argmax(-1) == goal.argmax(-1)).float().mean())
    return torch.stack(losses), torch.stack(agreements)


def modules_figures(modules: NextnModules, unroll: int, tokens: Tensor) -> dict[str, Tensor]:
    """The loss along `[B, T]` tokens, and how often each draft is the target's best token:
    `agreement` with the first module for every step, `vanilla` with a module for each."""
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        rows = target_rows(modules.target, tokens)
        losses, agreements = compared(modules, rows, unroll, is_vanilla=False)
        found = {"loss": weighted(losses), "agreement": agreements}
        if len(modules.steps) > 1:
            losses, agreements = compared(modules, rows, len(modules.steps), is_vanilla=True)
            # The first step is the same as above.
            found |= {"loss": found["loss"] + weighted(losses[1:]), "vanilla": agreements}
    return found


def save_with_modules(modules: NextnModules, shape: Path, output: Path) -> None:
    """The target's checkpoint with the modules after its layers."""
    save_model(modules.target, shape, output, modules.checkpoint())
