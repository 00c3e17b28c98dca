"""Gradients of a head for a step of several processes, which `torchrun` starts."""

import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.training.eagle3_entries import settings
from tllm_spec.models.registry import model_config
from tllm_spec.training.head_files import build_head, new_shape
from tllm_spec.training.head_run import head_loss
from tllm_spec.training.language_model import load_language_model
from tllm_spec.training.texts import read_texts
from tllm_spec.training.trainer import Ranks

CPU = torch.device("cpu")


def gradients(model: Path, data: Path, ranks: Ranks) -> dict[str, Tensor]:
    """Gradients of this rank's share, by parameter; and `loss`."""
    texts = read_texts(data, str(model), 64, 3, (1, 2, 3))
    target = load_language_model(model, torch.float32, CPU)
    torch.manual_seed(0)
    shape = new_shape(model_config(model), 16, 1, None, ())
    head = build_head(shape, target, torch.arange(16), settings())
    loss = head_loss(head, target, texts, 3, ranks)(256, 1)
    torch.autograd.backward(loss)
    found = {name: each.grad for name, each in head.named_parameters() if each.grad is not None}
    return found | {"loss": loss.detach()}


def added_up(model: Path, data: Path) -> dict[str, Tensor]:
    """Gradients of all processes, one of which is this one."""
    ranks, _ = Ranks.join("cpu")
    found = gradients(model, data, ranks)
    found["loss"] = ranks.add_up(found.pop("loss"), list(found.values()))
    assert ranks.of_first(0.25 + ranks.rank, CPU) == 0.25
    ranks.leave()
    return found


if __name__ == "__main__":
    added_up(*map(Path, sys.argv[1:]))
