"""The zoo's models, their files, and its commands run on a CPU."""

import json
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaForCausalLM

from tllm_spec.zoo.registry import resolve_model

NAMES = ("zoo:llama", "zoo:llama-draft")
ZOO = resolve_model("zoo:llama").parent
Models = tuple[LlamaForCausalLM, LlamaForCausalLM]


def call(command: click.Command, *arguments: object) -> None:
    CliRunner().invoke(command, [*map(str, arguments), "--device", "cpu"], catch_exceptions=False)


def read_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8")))


def read_weights(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}
