"""Command-line options that several commands of `tllm-bench` share, under trtllm-bench's names."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import click

from tllm_spec.cli.trtllm_options import trtllm_options

Command = Callable[..., None]
Decorator = Callable[[Command], Command]


class OutputFile(click.Path):
    """A file that can be written once the work is done: where that cannot be, it is known
    before."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"Folder {str(path.parent)!r} does not exist.", param, ctx)
        return path


EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT_FILE = OutputFile(dir_okay=False, writable=True, path_type=Path)
POSITIVE = click.IntRange(min=1)
NOT_NEGATIVE = click.IntRange(min=0)
SHARE = click.FloatRange(0, 1, min_open=True)


@dataclass(frozen=True)
class Model:
    """What is measured: the name that reports show, and the checkpoint's folder or zoo name."""

    name: str
    path: str


class ModelCommand(click.Command):
    """A command that needs `--model` of the command line before it. Its `--help` ends before
    anybody asks for one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError:
            self._need_model(ctx)  # what stands first on the command line is said first
            raise
        self._need_model(ctx)
        return rest

    def _need_model(self, context: click.Context) -> None:
        # A shell that wants to know how the line may go on parses it, too (resilient_parsing).
        if context.find_object(Model) is None and not context.resilient_parsing:
            raise click.UsageError("Missing option '--model' / '-m'.", context.find_root())


def upper_case(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    return value and value.upper()


def together(*decorators: Decorator) -> Decorator:
    """Several options as one decorator, shown by `--help` in this order."""
    return lambda command: reduce(
        lambda wrapped, decorator: decorator(wrapped), reversed(decorators), command
    )


def write_json(path: Path | None, content: object) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


workload_options = together(
    click.option(
        "--dataset",
        type=EXISTING_FILE,
        required=True,
        help="JSON lines, as prepare-dataset writes.",
    ),
    click.option(
        "--num_requests",
        type=NOT_NEGATIVE,
        default=0,
        help="How many of them, from the top; 0 = all.",
    ),
    click.option(
        "--target_output_len", type=POSITIVE, help="Replaces the data set's output_tokens."
    ),
    click.option(
        "--eos_id", type=int, default=-1, help="The token that ends a text; -1 = none does."
    ),
    click.option(
        "--sampler_options",
        type=EXISTING_FILE,
        help="YAML of SamplingParams, without max_tokens. Without the file decoding is greedy and EOS is ignored.",
    ),
)
engine_options = together(
    trtllm_options,
    click.option("--max_num_tokens", type=POSITIVE, help="Tokens of one forward."),
    click.option("--max_seq_len", type=POSITIVE, help="Prompt and output of one request together."),
    click.option("--max_input_len", type=POSITIVE, help="Longer prompts are refused."),
    click.option(
        "--kv_cache_free_gpu_mem_fraction",
        type=SHARE,
        help="Of the memory that is free at the start.",
    ),
    click.option("--enable_chunked_context", is_flag=True, help="Prefill long prompts in pieces."),
    click.option(
        "--scheduler_policy",
        type=click.Choice(["guaranteed_no_evict", "max_utilization"]),
        callback=upper_case,
    ),
)
max_batch_size_option = click.option(
    "--max_batch_size", type=POSITIVE, help="Requests that decode together."
)
yaml_option = click.option(
    "--extra_llm_api_options",
    "--config",
    "yaml_path",
    type=EXISTING_FILE,
    help="YAML of LLM arguments; where an option says otherwise, the file wins.",
)
warmup_option = click.option(
    "--warmup",
    type=NOT_NEGATIVE,
    default=2,
    help="Requests, from the top, that run beforehand; their prompts may then be in the prefix cache.",
)
report_json_option = click.option(
    "--report_json", type=OUTPUT_FILE, help="Receives the report's figures."
)
record_options = together(
    report_json_option,
    click.option(
        "--output_json", type=OUTPUT_FILE, help="Receives every request's text and tokens."
    ),
    click.option(
        "--request_json",
        type=OUTPUT_FILE,
        help="Receives every request's lengths, times and drafts.",
    ),
)
