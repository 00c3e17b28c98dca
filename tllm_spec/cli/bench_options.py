"""Command-line options that several commands of `tllm-bench` share, under trtllm-bench's names."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from tllm_spec.cli.llm_flags import LlmCommand, llm_options
from tllm_spec.cli.version import flag, option, together

Item = TypeVar("Item")


class OutputFile(click.Path):
    """A file to write when the work is done. Its folder is checked before the work starts, and the
    suffix of a picture, which names the format."""

    def __init__(self, *, is_plot: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._is_plot = is_plot

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"Folder {str(path.parent)!r} does not exist.", param, ctx)
        if self._is_plot:
            from tllm_spec.bench.plot import check_format

            try:
                check_format(path)
            except ValueError as error:
                self.fail(str(error), param, ctx)
        return path


EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
DATASET = click.Path(exists=True, path_type=Path)
EXISTING_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
OUTPUT_FILE, PLOT_FILE = OutputFile(), OutputFile(is_plot=True)
POSITIVE = click.IntRange(min=1)
NOT_NEGATIVE = click.IntRange(min=0)


@dataclass(frozen=True)
class Model:
    """The benchmarked model: the name for reports, and the checkpoint's folder or zoo name."""

    name: str
    path: str


class ModelCommand(click.Command):
    """A command that needs the group's `--model`. Its `--help` works without a model."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError:
            self._need_model(ctx)  # report the missing group option before the command's own error
            raise
        self._need_model(ctx)
        return rest

    def _need_model(self, context: click.Context) -> None:
        # Shell completion parses the command line, too (resilient_parsing).
        if context.find_object(Model) is None and not context.resilient_parsing:
            root = context.find_root()
            command = context.command_path.removeprefix(root.command_path).strip()
            place = f"It stands before the command: tllm-bench -m MODEL {command}"
            raise click.UsageError(f"Missing option '--model' / '-m'. {place}", root)


class EngineCommand(ModelCommand, LlmCommand):
    """A command that starts `LLM`."""


def _scheduler_config(
    context: click.Context, option: click.Parameter, value: str | None
) -> dict[str, str] | None:
    return None if value is None else {"capacity_scheduler_policy": value.upper()}


def several(
    read: Callable[[str], Item], what: str
) -> Callable[[click.Context, click.Parameter, str | None], list[Item] | None]:
    """A callback that reads values separated by commas. read: raises ValueError for a mistake.
    what: of them the list is, with an example."""

    def callback(
        context: click.Context, option: click.Parameter, text: str | None
    ) -> list[Item] | None:
        try:
            return None if text is None else [read(part) for part in text.split(",")]
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a list of {what}") from None

    return callback


def positive(text: str) -> float:
    """Raises ValueError for what is no number above 0."""
    if not 0 < (number := float(text)) < float("inf"):
        raise ValueError(text)
    return number


def count(text: str) -> int:
    """Raises ValueError for what is no integer above 0."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def write_text(path: Path, text: str) -> None:
    """Raises ValueError, as for a full disk."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Raises ValueError, as for a full disk."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ValueError(f"{str(path)!r} was not written: {error.strerror}") from error


def write_json(path: Path | None, content: object) -> None:
    """Raises ValueError, as for a full disk."""
    if path is not None:
        write_text(path, json.dumps(content, indent=2) + "\n")


workload_options = together(
    option(
        "--dataset",
        DATASET,
        "Requests as JSON lines, as written by prepare-dataset or with messages of a chat, or "
        "a folder of recorded traffic.",
        required=True,
    ),
    option(
        "--num_requests",
        NOT_NEGATIVE,
        "Number of requests to take from the top of the data set, or the latest of recorded "
        "traffic; 0: all.",
        default=0,
    ),
    option(
        "--target_output_len",
        POSITIVE,
        "Output length of every request, instead of the data set's output_tokens.",
    ),
    option(
        "--eos_id",
        int,
        "Token id that ends an output; -1: outputs have exactly output_tokens tokens, and "
        "those of messages end at the model's end tokens.",
        default=-1,
    ),
    option(
        "--sampler_options",
        EXISTING_FILE,
        "YAML file with SamplingParams, without max_tokens. "
        "[default: greedy decoding that ignores EOS]",
    ),
)
engine_options = together(
    llm_options(
        *("--max_num_tokens", "--max_seq_len", "--max_input_len"),
        "--kv_cache_free_gpu_mem_fraction kv_cache_free_gpu_memory_fraction",
        "--enable_chunked_context enable_chunked_prefill",
    ),
    option(
        "--scheduler_policy scheduler_config",
        click.Choice(["guaranteed_no_evict", "max_utilization"]),
        "max_utilization admits more requests and may pause one when KV pages run out.",
        callback=_scheduler_config,
    ),
)
max_batch_size_option = llm_options("--max_batch_size")
yaml_option = option(
    "--extra_llm_api_options --config yaml_path",
    EXISTING_FILE,
    "YAML file with arguments of LLM, such as speculative_config. "
    "It takes precedence over the options of the command line.",
)
warmup_option = option(
    "--warmup -w",
    NOT_NEGATIVE,
    "Number of requests, from the top of the data set, to run before measuring. "
    "Their prompts may then be in the prefix cache.",
    default=2,
)
streaming_option = flag(
    "--streaming", "Stream the tokens, and report times to the first token and between tokens."
)
report_json_option = option("--report_json", OUTPUT_FILE, "File to write the report to, as JSON.")
plot_option = option(
    "--plot",
    PLOT_FILE,
    "File to draw throughput against latency to; its suffix is the format: .png, .svg, .pdf. "
    "Needs tllm_spec[plot].",
)
record_options = together(
    report_json_option,
    option(
        "--output_json",
        OUTPUT_FILE,
        "File to write the text and tokens of every request to, as JSON.",
    ),
    option(
        "--request_json",
        OUTPUT_FILE,
        "File to write the lengths, times and draft counts of every request to, as JSON. "
        "Its ttft_ms is null without streaming.",
    ),
    option(
        "--iteration_log",
        OUTPUT_FILE,
        "File to write the statistics of every round to, as JSON lines.",
    ),
)
