"""The training loop of all models: AdamW, a cosine schedule over a budget, checkpoints to resume
from, and the best weights are saved.

The caller passes loss, validation and a function that saves the weights."""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from tllm_spec.progress import progress as shown_progress

# A training run's state in a file, from which it is resumed.


FILE, METRICS = "checkpoint.pt", "metrics.json"


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    seconds: float = 0.0
    best: float = math.inf
    """The lowest loss of a validation."""
    history: list[dict[str, float]] = field(default_factory=list)


def save_checkpoint(
    progress: Progress, output: Path, model: Any, optimizer: torch.optim.Optimizer
) -> None:
    """Writes the file in the folder `output`. An interrupted run leaves the file before."""
    state = {
        "progress": asdict(progress),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    written = (output / FILE).with_suffix(".new")
    torch.save(state, written)
    written.replace(output / FILE)


def load_checkpoint(output: Path, model: Any, optimizer: torch.optim.Optimizer) -> Progress:
    """Raises ValueError if there is no file, or one of another model."""
    if not (file := output / FILE).is_file():
        raise ValueError(f"there is no {file} to resume from")
    state = torch.load(file, map_location="cpu", weights_only=True)
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise ValueError(f"{file} is of another model: {error}") from error
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


# The processes of a training run, started by `torchrun`: each has a device and a share of every
# batch.


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: str) -> "tuple[Ranks, torch.device]":
        """This process's place, and its own device of the kind `device`."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return ALONE, torch.device(device)
        own = torch.device(device)
        if own.type == "cuda":
            own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(own)
        dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
        return cls(dist.get_rank(), size), own

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def share(self) -> slice:
        """This rank's sequences of a batch."""
        return slice(self.rank, None, self.size)

    def add_up(self, loss: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        """The sum of the ranks' losses; gradients become their sums, in place."""
        if self.size == 1:
            return loss
        flat = torch.cat([loss.reshape(1), *(each.flatten() for each in gradients)])
        dist.all_reduce(flat)
        sizes = [each.numel() for each in gradients]
        for gradient, total in zip(gradients, torch.split(flat[1:], sizes), strict=True):
            gradient.copy_(total.view_as(gradient))
        return flat[0]

    def of_first(self, value: float, device: torch.device) -> float:
        """The first rank's value."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.broadcast(shared, 0)
        return shared.item()

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


ALONE = Ranks()


SHOWN_EVERY = 2.0  # seconds; reading the loss waits for the device
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
    weight_decay: float = 0.1
    dropout: float = 0.0
    warmup_steps: int = 200
    compile: bool = False
    checkpoint_steps: int = 500
    """Steps from one validation and checkpoint to the next."""
    seed: int = 0
    num_checkpoints: int = 0
    """Further ones, evenly over the budget."""
    resume: bool = False


def add_dropout(layer: Any, probability: float) -> None:
    """On both outputs that a layer adds to the residual stream."""
    for part in (layer.self_attn.o_proj, layer.mlp):
        part.register_forward_hook(
            lambda module, _, output: F.dropout(output, probability, module.training)
        )


def train(
    model: Any,
    loss_of: Callable[[int, int], Tensor],
    validate: Callable[[], dict[str, float]],
    settings: Settings,
    output: Path,
    save_weights: Callable[[Any], None],
    ranks: Ranks = ALONE,
) -> None:
    """Before the first step and at each checkpoint, the weights are saved by
    `save_weights(model)` if `validate()` has the lowest `loss` so far.

    Args:
        loss_of: `loss_of(windows, length)` samples a batch; the losses of several ranks add up.
            Random numbers depend on the seed and the step only, so a run can be resumed.
        output: folder of `metrics.json` and the checkpoint.
    """
    output.mkdir(parents=True, exist_ok=True)
    optimizer = _optimizer(model, settings)
    progress = load_checkpoint(output, model, optimizer) if settings.resume else Progress()
    start = time.monotonic() - progress.seconds
    done = _done(progress, settings)
    if ranks.is_first and not progress.step:
        _note(_validation(model, validate), progress, output, lambda: save_weights(model))
    shown, shown_at, num_tokens = 0, time.monotonic(), 0
    with shown_progress("training", 100, "%", every=5, is_shown=ranks.is_first) as bar:
        while done < 1.0:
            torch.manual_seed((settings.seed << 32) + progress.step)
            _set_learning_rate(optimizer, settings, progress.step, done)
            sizes = _sizes(model, settings, done)
            loss = loss_of(*sizes)
            torch.autograd.backward(loss)
            loss = _update(model, loss.detach(), optimizer, ranks)
            progress.step += 1
            if progress.step % 10 == 0 and loss.is_cuda:
                torch.cuda.synchronize()  # otherwise the host's clock runs ahead of the device
            now, before = time.monotonic(), done
            progress.seconds = now - start
            done = ranks.of_first(_done(progress, settings), loss.device)
            num_tokens += sizes[0] * sizes[1]
            if now - shown_at >= SHOWN_EVERY:
                speed = num_tokens / (now - shown_at)
                note = f"step {progress.step}, {speed:.0f} tokens/s, loss {loss.item():.3f}"
                percent = int(100 * min(done, 1.0))
                bar.advance(percent - shown, note)
                shown, shown_at, num_tokens = percent, now, 0
            if _is_due(progress, settings, before, done) and ranks.is_first:
                figures = {"train_loss": round(loss.item(), 4), **_validation(model, validate)}
                _note(figures, progress, output, lambda: save_weights(model))
                save_checkpoint(progress, output, model, optimizer)


def _is_due(progress: Progress, settings: Settings, before: float, done: float) -> bool:
    """Whether a validation and a checkpoint come now. before: what was done before the step."""
    of_budget = settings.num_checkpoints
    is_next = int(of_budget * before) < int(of_budget * done)
    return done >= 1.0 or progress.step % settings.checkpoint_steps == 0 or is_next


def _done(progress: Progress, settings: Settings) -> float:
    """The used part of the budget."""
    return max(progress.seconds / (60 * settings.minutes), progress.step / settings.steps)


def _sizes(model: Any, settings: Settings, done: float) -> tuple[int, int]:
    """Sequences of a batch, and their length."""
    is_long = (
        done >= LONG_WINDOWS_FROM and model.config.max_position_embeddings >= 2 * settings.length
    )
    scale = 2 if is_long else 1
    return max(1, settings.windows // scale), settings.length * scale


def _update(model: Any, loss: Tensor, optimizer: torch.optim.Optimizer, ranks: Ranks) -> Tensor:
    """One step of the optimizer; the loss of all ranks together."""
    parameters = _trained(model)
    loss = ranks.add_up(loss, [each.grad for each in parameters])
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def _note(
    figures: dict[str, float], progress: Progress, output: Path, save: Callable[[], None]
) -> None:
    """Adds a validation's figures to the history, and saves the best weights so far."""
    row = {"step": progress.step, "seconds": round(progress.seconds, 1), **figures}
    progress.history.append(row)
    tqdm.write(json.dumps(row))
    if figures["loss"] < progress.best:
        progress.best = figures["loss"]
        save()
        metrics = json.dumps({**row, "history": progress.history}, indent=1)
        (output / METRICS).write_text(metrics + "\n", encoding="utf-8")


def _validation(model: Any, validate: Callable[[], dict[str, float]]) -> dict[str, float]:
    """In eager mode, since a compilation would take longer than it saves."""
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        figures = {name: round(value, 5) for name, value in validate().items()}
    model.train()
    return figures


def _trained(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _optimizer(model: Any, settings: Settings) -> torch.optim.AdamW:
    matrices = [parameter for parameter in _trained(model) if parameter.dim() > 1]
    norms = [parameter for parameter in _trained(model) if parameter.dim() == 1]
    decay = settings.weight_decay
    groups = [{"params": matrices, "weight_decay": decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=matrices[0].is_cuda
    )


def _set_learning_rate(
    optimizer: torch.optim.Optimizer, settings: Settings, step: int, done: float
) -> None:
    """Linear warm-up over steps, or a twentieth of the budget if that is shorter, then cosine decay
    to 2% of the peak over the budget."""
    warmup = min(1.0, max((step + 1) / settings.warmup_steps, 20 * done))
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * warmup * cosine
