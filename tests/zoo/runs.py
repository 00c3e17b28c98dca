"""The zoo's models, their files, and its commands run on a CPU."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.testing import CliRunner
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaForCausalLM

from tllm_spec.zoo.registry import resolve_model

NAMES = ("zoo:llama", "zoo:llama-draft")
ZOO = resolve_model("zoo:llama").parent
# Small runs of trainings that read text of the target.
SELF_TEXT = "--self-text-minutes 0 --self-text-batch 4 --self-text-tokens 16"
Models = tuple[LlamaForCausalLM, LlamaForCausalLM]


def call(command: click.Command, *arguments: object) -> None:
    """arguments: values, or several words of a command line in a string."""
    words = (each.split() if isinstance(each, str) else [str(each)] for each in arguments)
    line = [*chain.from_iterable(words), "--device", "cpu"]
    CliRunner().invoke(command, line, catch_exceptions=False)


def counting(root: Path, modulo: int) -> None:
    """Writes training and held-out text that counts up to a number, again and again."""
    tokens = np.arange(4096, dtype=np.uint16) % modulo
    for name in ("training", "heldout"):
        np.savez(root / f"{name}.npz", tokens=tokens, num_bytes=8192)


def write_shape(folder: Path, model: Path, **sizes: int) -> None:
    """A shape: the model's configuration with other sizes."""
    folder.mkdir()
    config = read_json(model / "config.json") | sizes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")


def read_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8")))


def read_weights(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}
