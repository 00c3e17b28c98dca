"""Options of TensorRT-LLM's command lines that have one served value: whoever brings a command line
along reads why.

They only carry names of LLM's arguments; what is served, and why not more, stands in
`tllm_spec.config`."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import click

Command = Callable[..., Any]

NUMBERS = {
    "tensor_parallel_size": ("--tp_size", "--tp"),
    "pipeline_parallel_size": ("--pp_size", "--pp"),
    "context_parallel_size": ("--cp_size", "--cp"),
    "moe_expert_parallel_size": ("--ep_size", "--ep"),
    "moe_cluster_parallel_size": ("--cluster_size",),
    "max_beam_width": ("--beam_width",),
    "num_postprocess_workers": (),
}
TEXTS = ("backend", "reasoning_parser", "revision")


def trtllm_options(command: Command) -> Command:
    """Adds the options to a command, each under its argument's name; `--help` does not show
    them."""
    numbers = [
        click.option(f"--{name}", *others, name, type=int, hidden=True)
        for name, others in NUMBERS.items()
    ]
    texts = [click.option(f"--{name}", hidden=True) for name in TEXTS]
    trust = click.option("--trust_remote_code", is_flag=True, default=None, hidden=True)
    return reduce(lambda wrapped, option: option(wrapped), [*numbers, *texts, trust], command)
