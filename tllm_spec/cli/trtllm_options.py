"""TensorRT-LLM's command-line options that have at most one useful value here.

A command line written for trtllm-serve or trtllm-bench works when it asks for that value; any other
value is refused with the reason. `--help` hides these options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

import click

from tllm_spec.cli.version import version_line
from tllm_spec.config.config_base import ConfigError
from tllm_spec.config.llm_args import LlmArgs, overlay
from tllm_spec.config.option_checks import NotServed, shown

Command = Callable[..., Any]
Values = dict[str, Any]

# Python's level for each of TensorRT-LLM's names and for Python's own.
LOG_LEVELS = {
    "internal_error": "critical",
    "critical": "critical",
    "error": "error",
    "warning": "warning",
    "info": "info",
    "verbose": "debug",
    "debug": "debug",
    "trace": "debug",
}

ONE_SERVER = "prefill and decoding run in one server"
ONLY_TEXT = "only text is served"
NO_LORA = "LoRA is not served"


class PeerOption(NamedTuple):
    """An option: its flags, its type (bool: a flag without a value), and what decides about it.

    `target` is the argument of `LLM` that receives the value and accepts or refuses it (dotted when
    it is nested), or the values that the command itself accepts and why it refuses all others.
    `argument` turns the flag's value into the argument's; None: they are the same."""

    flags: str
    type: Any
    target: str | NotServed
    argument: Callable[[Any], object] | None = None

    @property
    def name(self) -> str:
        return self.flags.split()[0].partition("/")[0].removeprefix("--")


def _kv_cache_dtype(dtype: str) -> str:
    """vLLM and SGLang call the same type `fp8_e4m3`."""
    return "fp8" if dtype == "fp8_e4m3" else dtype


ENGINE_OPTIONS = (
    PeerOption("--backend", str, "backend"),
    PeerOption("--tensor_parallel_size --tp_size --tp", int, "tensor_parallel_size"),
    PeerOption("--pipeline_parallel_size --pp_size --pp", int, "pipeline_parallel_size"),
    PeerOption("--context_parallel_size --cp_size --cp", int, "context_parallel_size"),
    PeerOption("--moe_expert_parallel_size --ep_size --ep", int, "moe_expert_parallel_size"),
    PeerOption("--moe_cluster_parallel_size --cluster_size", int, "moe_cluster_parallel_size"),
    PeerOption("--gpus_per_node", int, "gpus_per_node"),
    PeerOption("--enable_attention_dp", bool, "enable_attention_dp"),
    PeerOption("--max_beam_width --beam_width", int, "max_beam_width"),
    PeerOption("--kv_cache_dtype", str, "kv_cache_config.dtype", _kv_cache_dtype),
    PeerOption("--moe_backend", str, "moe_config.backend"),
    PeerOption("--num_postprocess_workers", int, "num_postprocess_workers"),
    PeerOption("--trust_remote_code", bool, "trust_remote_code"),
    PeerOption(
        "--hf_revision --revision",
        str,
        NotServed(("main",), "models are local folders; nothing is downloaded"),
    ),
    PeerOption(
        "--custom_module_dirs", str, NotServed((), "no Python code is imported from folders")
    ),
    PeerOption("--generation_config", str, "generation_config"),
    PeerOption(
        "--telemetry/--no-telemetry", bool, NotServed((False,), "no usage data is collected")
    ),
)
SERVER_OPTIONS = (
    PeerOption(
        "--custom_tokenizer",
        str,
        NotServed((), "--tokenizer takes a folder in Hugging Face's format"),
    ),
    PeerOption(
        "--chat_template",
        str,
        NotServed((), "the chat template is the one in the tokenizer's folder"),
    ),
    PeerOption(
        "--allow_request_chat_template",
        bool,
        NotServed((), "the chat template is the one in the tokenizer's folder"),
    ),
    PeerOption("--metadata_server_config_file", str, NotServed((), ONE_SERVER)),
    PeerOption("--server_role", str, NotServed((), ONE_SERVER)),
    PeerOption("--disagg_cluster_uri", str, NotServed((), ONE_SERVER)),
    PeerOption(
        "--fail_fast_on_attention_window_too_large", bool, "fail_fast_on_attention_window_too_large"
    ),
    PeerOption("--media_io_kwargs", str, NotServed((), ONLY_TEXT)),
    PeerOption("--video_pruning_rate", float, NotServed((), ONLY_TEXT)),
    PeerOption("--visual_gen_args --extra_visual_gen_options", str, NotServed((), ONLY_TEXT)),
    PeerOption("--enable_visual_gen", bool, NotServed((), ONLY_TEXT)),
    PeerOption("--grpc", bool, NotServed((), "the server speaks HTTP")),
    PeerOption(
        "--set", str, NotServed((), "arguments of LLM belong into the YAML file of --config")
    ),
)
BENCH_OPTIONS = (
    PeerOption("--engine_dir", str, NotServed((), "there are no compiled engines to load")),
    PeerOption("--data_type --dtype", str, "dtype"),
    PeerOption("--modality", str, NotServed((), ONLY_TEXT)),
    PeerOption("--medusa_choices", str, NotServed((), "Medusa is not served")),
    PeerOption(
        "--target_input_len",
        int,
        NotServed((), "limits are not tuned to a length; prompts have those of the data set"),
    ),
)
DATASET_OPTIONS = (
    PeerOption("--task_id", int, NotServed((-1,), NO_LORA)),
    PeerOption("--rand_task_id", (int, int), NotServed((), NO_LORA)),
    PeerOption("--lora_dir", str, NotServed((), NO_LORA)),
)
BY_NAME = {
    option.name: option
    for option in (*ENGINE_OPTIONS, *SERVER_OPTIONS, *BENCH_OPTIONS, *DATASET_OPTIONS)
}


def either_spelling(name: str) -> str:
    """For click's `token_normalize_func`: `--max-batch-size` means `--max_batch_size`."""
    return name.replace("-", "_")


def trtllm_options(*options: PeerOption) -> Callable[[Command], Command]:
    """A decorator that adds the options to a command, each under its `name`."""
    return lambda command: reduce(
        lambda wrapped, option: _click_option(option)(wrapped), reversed(options), command
    )


def _click_option(option: PeerOption) -> Callable[[Command], Command]:
    kind = {"is_flag": True} if option.type is bool else {"type": option.type}
    return click.option(
        *option.flags.split(), option.name, default=None, hidden=True, help=_help(option), **kind
    )


def _help(option: PeerOption) -> str:
    decides = option.target
    if isinstance(decides, str):
        head, _, nested = decides.partition(".")
        field = LlmArgs.model_fields.get(head)
        table = field.annotation if nested and field is not None else LlmArgs
        row = getattr(table, "not_served", {}).get(nested if table is not LlmArgs else head)
        if row is None:
            return f"The argument {decides} of LLM."
        decides = row
    assert isinstance(decides, NotServed)
    accepted = " or ".join(str(value) for value in decides.accepted if value is not None)
    values = f"Only {accepted} is accepted" if accepted and option.type is not bool else "Refused"
    if True in decides.accepted:
        values = "Accepted without effect"
    return f"{values}: {decides.reason}."


def split_trtllm_options(
    values: Mapping[str, Any], known: Mapping[str, PeerOption] = BY_NAME
) -> tuple[Values, Values, list[str]]:
    """Separates a command's values: (all other options, arguments of LLM, refusals as
    sentences)."""
    others: Values = {}
    arguments: Values = {}
    refusals: list[str] = []
    for name, value in values.items():
        option = known.get(name)
        if option is None:
            others[name] = value
        elif value is None:
            continue
        elif isinstance(option.target, str):
            given = value if option.argument is None else option.argument(value)
            arguments = overlay(arguments, _nested(option.target, given))
        elif value not in option.target.accepted:
            refusals.append(_refusal(option, value, option.target))
    return others, arguments, refusals


def _nested(path: str, value: object) -> Values:
    head, _, rest = path.partition(".")
    return {head: _nested(rest, value) if rest else value}


def _refusal(option: PeerOption, value: object, not_served: NotServed) -> str:
    given = f"--{option.name}" if option.type is bool else f"--{option.name} {shown(value)}"
    accepted = " or ".join(map(repr, not_served.accepted)) if option.type is not bool else ""
    return f"{given} is refused: {not_served.reason}; " + (
        f"accepted: {accepted}" if accepted else "leave it out"
    )


@contextmanager
def refused_together(refusals: list[str]) -> Iterator[None]:
    """Raises one ConfigError for `refusals` and for what a ConfigError inside refuses."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([*refusals, *error.lines]) from None
    if refusals:
        raise ConfigError(refusals)


def _python_level(context: click.Context, option: click.Parameter, value: str) -> str:
    return LOG_LEVELS[value]


def log_level_option(default: str) -> Callable[[Command], Command]:
    """`--log_level`; its value is one of Python's levels in lower case."""
    return click.option(
        "--log_level",
        type=click.Choice(list(LOG_LEVELS)),
        default=default,
        callback=_python_level,
        help="The least severe messages to log. verbose and trace mean debug.",
    )


def version_option(command: str) -> Callable[[Command], Command]:
    """`--version` of a command."""

    def show(context: click.Context, option: click.Parameter, is_given: bool) -> None:
        if is_given and not context.resilient_parsing:
            click.echo(version_line(command))
            context.exit()

    return click.option(
        "--version",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=show,
        help="Show the version, the commit and the installed extras, and exit.",
    )
