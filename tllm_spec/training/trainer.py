"""The training loop of all models of the zoo: AdamW, a cosine schedule over a budget, and the best
weights are saved.

The caller passes loss, validation and, for other models than those of transformers, a function that
saves the weights."""

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

VALIDATE_EVERY_SECONDS = 30.0
LONG_WINDOWS_FROM = 0.85
"""After this part of the budget, sequences are twice as long and a batch has half as many."""


@dataclass(frozen=True)
class Settings:
    """One training run. It ends after `minutes` or `steps`, whichever is first."""

    minutes: float
    steps: int
    windows: int
    length: int
    learning_rate: float
    weight_decay: float
    dropout: float
    warmup_steps: int
    compile: bool


def build_model(shape: Path, settings: Settings, device: torch.device) -> Any:
    """A new fp32 model with the shape in `shape/config.json`."""
    config = AutoConfig.from_pretrained(shape, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device)
    for layer in model.model.layers:
        add_dropout(layer, settings.dropout)
        if settings.compile:  # layer by layer: all layers share one compilation
            layer.compile(dynamic=False)
    return model


def add_dropout(layer: Any, probability: float) -> None:
    """On both outputs that a layer adds to the residual stream."""
    for part in (layer.self_attn.o_proj, layer.mlp):
        part.register_forward_hook(_dropout(probability))


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """`[B, T]` -> `[B, T, V]`, with bf16 autocast on a GPU and in fp32 on a CPU."""
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def save(model: Any, shape: Path, output: Path) -> None:
    """Write the weights in bf16 with transformers, and copy the configuration files of `shape`."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    del weights["lm_head.weight"]  # tied to the embedding; the conversion made a second tensor
    model.save_pretrained(output, state_dict=weights)
    # They replace the files just written, which have the spelling of the installed version.
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(shape / name, output / name)


def train(
    model: Any,
    loss_of: Callable[[int, int], Tensor],
    validate: Callable[[], dict[str, float]],
    settings: Settings,
    shape: Path,
    output: Path,
    save_weights: Callable[[Any, Path, Path], None] = save,
) -> None:
    """`loss_of(windows, length)` samples a batch. The weights with the lowest `loss` of
    `validate()` are saved by `save_weights(model, shape, output)`."""
    optimizer = _optimizer(model, settings)
    start = last_validation = time.monotonic()
    best, history, step, done = math.inf, [], 0, 0.0
    while done < 1.0:
        _set_learning_rate(optimizer, settings, step, done)
        is_long = (
            done >= LONG_WINDOWS_FROM
            and model.config.max_position_embeddings >= 2 * settings.length
        )
        scale = 2 if is_long else 1
        loss = loss_of(max(1, settings.windows // scale), settings.length * scale)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0 and loss.is_cuda:
            torch.cuda.synchronize()  # otherwise the host's clock runs ahead of the device
        now = time.monotonic()
        done = max((now - start) / (60 * settings.minutes), step / settings.steps)
        if done >= 1.0 or now - last_validation >= VALIDATE_EVERY_SECONDS:
            figures = _validation(model, validate)
            seconds, tokens = time.monotonic() - start, step * settings.windows * settings.length
            history.append(
                {"step": step, "tokens": tokens, "seconds": round(seconds, 1), **figures}
            )
            print({"train_loss": round(loss.item(), 4), **history[-1]}, flush=True)
            if figures["loss"] < best:
                best = figures["loss"]
                save_weights(model, shape, output)
                metrics = json.dumps({**history[-1], "history": history}, indent=1)
                (output / "metrics.json").write_text(metrics + "\n", encoding="utf-8")
            last_validation = time.monotonic()


def _validation(model: Any, validate: Callable[[], dict[str, float]]) -> dict[str, float]:
    """In eager mode, since a compilation would take longer than it saves."""
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        figures = {name: round(value, 5) for name, value in validate().items()}
    model.train()
    return figures


def _optimizer(model: Any, settings: Settings) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    decay = settings.weight_decay
    groups = [{"params": matrices, "weight_decay": decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=matrices[0].is_cuda
    )


def _set_learning_rate(
    optimizer: torch.optim.Optimizer, settings: Settings, step: int, done: float
) -> None:
    """Linear warm-up over steps, then cosine decay to 2% of the peak over the budget."""
    warmup = min(1.0, (step + 1) / settings.warmup_steps)
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * warmup * cosine


def _dropout(probability: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return F.dropout(output, probability, module.training)

    return hook
