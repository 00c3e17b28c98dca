"""Loss and validation of MTP modules: every step of their chains is compared with the target's
distribution.

The first module is trained on its own outputs, as it drafts EAGLE-style. The others are trained as
"vanilla" steps after it, on outputs that they do not change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tllm_spec.training.deepseek import balance, save_model
from tllm_spec.training.distill import (
    VALIDATION_LENGTH,
    VALIDATION_WINDOWS,
    distillation_loss,
    mixed,
)
from tllm_spec.training.head_loss import aligned_chains, weighted
from tllm_spec.training.mtp import NextnModule, NextnModules
from tllm_spec.training.token_data import TokenData
from tllm_spec.training.trainer import Settings, add_dropout


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
    chain = modules.chain(hidden, embeddings, num_steps, is_vanilla=is_vanilla)
    for step, states in enumerate(chain):
        goal = target_logits[:, step + 1 : step + 1 + states.shape[1]]
        logits = modules.logits(states)
        losses.append(distillation_loss(logits, goal))
        agreements.append((logits.argmax(-1) == goal.argmax(-1)).float().mean())
    return torch.stack(losses), torch.stack(agreements)


def both_ways(
    modules: NextnModules, tokens: Tensor, unroll: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and agreements by step: `agreement` with the first module for every step,
    `vanilla` with a module for each."""
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        rows = target_rows(modules.target, tokens)
        losses, agreements = compared(modules, rows, unroll, is_vanilla=False)
        loss, found = weighted(losses), {"agreement": agreements}
        if len(modules.steps) > 1:
            losses, agreements = compared(modules, rows, len(modules.steps), is_vanilla=True)
            # The first step is the same as above.
            loss, found["vanilla"] = loss + weighted(losses[1:]), agreements
    return loss, found


def mtp_loss(
    modules: NextnModules, data: TokenData, self_text: TokenData, unroll: int
) -> Callable[[int, int], Tensor]:
    """The loss of `mixed` sequences."""

    def loss(windows: int, length: int) -> Tensor:
        balance(modules)
        tokens = mixed(data, self_text, windows, length)
        return both_ways(modules, tokens, unroll)[0]

    return loss


def mtp_validation(
    modules: NextnModules, heldout: TokenData, unroll: int
) -> Callable[[], dict[str, float]]:
    """`agreement_k` and `vanilla_k`: how often draft k along held-out text is the target's best
    token."""

    def validate() -> dict[str, float]:
        figures = [
            both_ways(modules, tokens, unroll)
            for tokens in heldout.windows(VALIDATION_LENGTH, VALIDATION_WINDOWS)
        ]
        found = {"loss": torch.stack([loss for loss, _ in figures]).mean().item()}
        for name in figures[0][1]:
            rates = torch.stack([rates[name] for _, rates in figures]).mean(0).tolist()
            found |= {f"{name}_{step}": rate for step, rate in enumerate(rates, start=1)}
        return found

    return validate


def save_with_modules(modules: NextnModules, shape: Path, output: Path) -> None:
    """The target's checkpoint with the modules after its layers."""
    save_model(modules.target.state_dict() | modules.checkpoint(), shape, output)
