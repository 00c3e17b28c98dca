"""`tllm-serve [serve] MODEL`: reads the command line and a YAML file, then runs the server."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from tllm_spec.cli.llm_flags import (
    LlmCommand,
    LlmFlags,
    either_spelling,
    llm_lines,
    llm_options,
    read_flags,
    refused_together,
    server_lines,
)
from tllm_spec.cli.serve_options import COMMON, SERVER_NAMES, options_of, server_options, tls_of
from tllm_spec.cli.version import flag, log_level_option, option, version_option
from tllm_spec.config.config_base import ConfigError
from tllm_spec.config.llm_args import LlmArgs, with_yaml
from tllm_spec.config.option_checks import read_yaml
from tllm_spec.distributed.mpirun import end_mpirun, mpirun_rank, mpirun_size, undo_default_binding
from tllm_spec.models.automatic import with_drafter
from tllm_spec.models.draft_kind import check_folders
from tllm_spec.server.child import ChildSettings, configure_logs, raise_file_limit
from tllm_spec.server.options import ANY, ServerOptions, hosts_of
from tllm_spec.server.supervisor import ServeError, Supervisor

logger = logging.getLogger(__name__)

AUTO_LOADED = 4  # times max_loras: adapters in host memory where requests may load them

GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
SERVE_NAMES = ("model", "host", "port", "served_model_name", "log_level")
FLAGS_ONLY = {*SERVE_NAMES, *SERVER_NAMES} - LlmArgs.model_fields.keys()


def _model_of(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> str:
    """The word `serve` may precede MODEL, as with `trtllm-serve`."""
    *command, model = words
    if command not in ([], ["serve"]):
        raise click.BadParameter(f"one model is needed, not {' '.join(words)}")
    return model


class ServeCommand(LlmCommand):
    """`--help` shows the common options only."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        common = [
            each
            for each in self.get_params(ctx)
            if each.name in COMMON or not each.expose_value  # --version and --help
        ]
        records = [each.get_help_record(ctx) for each in common]
        with formatter.section("Options"):
            formatter.write_dl([record for record in records if record is not None])


@click.command(
    cls=ServeCommand,
    context_settings={"show_default": True, "token_normalize_func": either_spelling},
    epilog="docs/options.md has all other options: of limits, proxies, TLS, traces and weight "
    "updates. Every argument of LLM is a flag, too, such as --kv_cache_config.dtype fp8. Options "
    "may be spelled with - or _. Those of TensorRT-LLM, vLLM and SGLang are accepted where they "
    "mean the same here, and refused with the reason otherwise.",
)
@click.argument("model", nargs=-1, required=True, metavar="[serve] MODEL", callback=_model_of)
@option("--host", str, "Address to listen on.", default="localhost")
@option("--port", click.IntRange(0, 65535), "Port to listen on; 0: any free.", default=8000)
@option(
    "--served_model_name",
    str,
    "Model name that requests must give. [default: MODEL, or the name of its folder or file]",
)
@llm_options(
    *("--tokenizer", "--tensor_parallel_size", "--max_batch_size", "--max_num_tokens"),
    "--max_seq_len",
    "--kv_cache_free_gpu_memory_fraction --free_gpu_memory_fraction",
    *("--enable_chunked_prefill", "--record_traffic", "--record_traffic_mib"),
    "--record_hidden_states",
)
@flag(
    "--speculate",
    "Draft tokens with what there is: MTP modules of the model, --speculative_model, matches in "
    "the text. The log says which configuration this is. The text does not change.",
)
@option("--speculative_model", str, "Folder of a draft model or head of any kind, or a GGUF file.")
@option(
    "--extra_llm_api_options --config",
    click.Path(dir_okay=False),
    "YAML file with arguments of LLM, such as speculative_config. "
    "It takes precedence over the options of the command line.",
)
@server_options
@log_level_option("info")
@version_option("tllm-serve")
@click.pass_context
def main(
    context: click.Context,
    /,
    model: str,
    host: str,
    port: int,
    served_model_name: str | None,
    extra_llm_api_options: str | None,
    log_level: str,
    **options: Any,
) -> None:
    """Serve MODEL (a local folder, or a zoo name such as zoo:llama) over an OpenAI-compatible HTTP
    API."""
    server, llm_flags = _split(options)
    try:
        if not server["print_config"]:
            configure_logs(log_level, server["log_format"])
        flags = read_flags(llm_flags)
        args = read_args(model, flags, extra_llm_api_options)
        checked = options_of(server, host)
        name = served_model_name or _name_of(args.model)
        args = _with_bounded_lora(args, checked, name)
        if server["print_config"]:
            return _print_config(context, [*SERVE_NAMES, *server], args, flags.arguments)
        _check_mpirun(args.tensor_parallel_size)
        if checked.dp_size > 1 and args.tensor_parallel_size > 1:
            raise ValueError(
                f"dp_size = {checked.dp_size} is not served with tensor_parallel_size = "
                f"{args.tensor_parallel_size}: start a server for each group of devices, and a "
                "proxy in front of them (docs/deploying.md)"
            )
        if args.tensor_parallel_size > 1:
            undo_default_binding()
        if args.tensor_parallel_size > 1 and mpirun_rank():
            from tllm_spec.ranks import join_ranks  # heavy, so not at the top

            join_ranks(args)  # this process follows rank 0's engine, and ends with it
        with _ending_mpirun():
            settings = ChildSettings(
                llm=args.as_options(),
                served_model_name=name,
                engine_paths=[],
                log_level=log_level,
                log_format=server["log_format"],
                server=asdict(checked),
                tls=tls_of(server),
            )
            raise_file_limit()
            spec = args.speculative_config  # what is wrong is told before a process is started
            draft = getattr(spec, "speculative_model", None)
            check_folders(args.model, draft, getattr(spec, "decoding_type", ""))
            with _bound(host, port) as listener:
                status = serve(settings, listener, server["frontends"])
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:  # before the supervisor handles signals
        status = 128 + signal.SIGINT
    raise SystemExit(status)


class ServeCommandLine(NamedTuple):
    """What a command line of `tllm-serve` says, for a server that something else starts."""

    args: LlmArgs
    server: ServerOptions
    served_model_name: str


def read_command_line(words: Sequence[str], not_served: Sequence[str]) -> ServeCommandLine:
    """words: those after `tllm-serve`. not_served: options that are refused. The server takes every
    Host name. Raises ValueError for what `tllm-serve` refuses."""
    try:
        context = main.make_context("tllm-serve", list(words))
    except click.ClickException as error:
        raise ValueError(error.format_message()) from error
    params = dict(context.params)
    given = [name for name in not_served if context.get_parameter_source(name) in GIVEN]
    if given:
        raise ValueError(f"{', '.join(f'--{name}' for name in given)}: not served here")
    model, yaml_path = params.pop("model"), params.pop("extra_llm_api_options")
    name = params.pop("served_model_name")
    configure_logs(params.pop("log_level"), params["log_format"])
    for each in ("host", "port"):
        del params[each]
    server, llm_flags = _split(params)
    args = read_args(model, read_flags(llm_flags), yaml_path)
    return ServeCommandLine(args, options_of(server, ANY), name or _name_of(args.model))


def serve(settings: ChildSettings, listener: socket.socket, num_fronts: int) -> int:
    """Serves until a signal and returns the exit status. Raises ValueError when the model cannot be
    served, and when its engine dies."""
    is_local = hosts_of(listener.getsockname()[0]) is not None
    if not is_local and settings.server["api_key"] is None:
        logger.warning(
            "anybody who reaches %s may use this server: --api_key is not set",
            listener.getsockname()[0],
        )
    timeout = settings.server["shutdown_timeout"]
    supervisor = Supervisor(settings, listener, num_fronts, timeout)
    supervisor.catch_signals()
    logger.info("loading %s", settings.served_model_name)
    return asyncio.run(supervisor.run())


def _with_bounded_lora(args: LlmArgs, options: ServerOptions, model_name: str) -> LlmArgs:
    """The arguments with a limit on the adapters that clients have loaded. Raises ValueError for
    adapters of an engine that has none, and for one with the name of the model."""
    given = {"--lora_root": options.lora_root, "--lora_clients": options.lora_clients}
    if (lora := args.lora_config) is None:
        if names := " and ".join(name for name, value in given.items() if value):
            raise ValueError(f"{names}: lora_config (--enable_lora) is needed")
    elif model_name in lora.lora_dir:
        raise ValueError(
            f"lora_dir: {model_name!r} is the model's own name; NAME=FOLDER gives another one"
        )
    elif options.lora_auto_load and lora.max_cpu_loras is None:
        most = max(AUTO_LOADED * lora.max_loras, lora.max_loras + len(lora.lora_dir))
        bounded = lora.model_copy(update={"max_cpu_loras": most})
        return args.model_copy(update={"lora_config": bounded})
    return args


def _check_mpirun(tensor_parallel_size: int) -> None:
    """Raises ValueError where mpirun has started several servers of one device, and ends all but
    the first."""
    if tensor_parallel_size == 1 and mpirun_size() > 1:
        if mpirun_rank():
            raise SystemExit(1)
        raise ValueError(
            f"mpirun has started {mpirun_size()} processes, and tensor_parallel_size is 1: give "
            f"--tp_size {mpirun_size()}, or start one process"
        )


@contextmanager
def _ending_mpirun() -> Iterator[None]:
    """An error before the engine has joined the other ranks ends these, too."""
    try:
        yield
    except ValueError as error:
        if mpirun_size() > 1 and not (isinstance(error, ServeError) and error.has_joined):
            click.echo(f"Error: {error}", err=True)
            end_mpirun()
            raise SystemExit(1) from error
        raise


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The server's options, and those of LLM."""
    server = {name: value for name, value in options.items() if name in SERVER_NAMES}
    shared = ("reasoning_parser",)
    return server, {
        name: value for name, value in options.items() if name not in server or name in shared
    }


def _print_config(
    context: click.Context, names: list[str], args: LlmArgs, flags: Mapping[str, Any]
) -> None:
    path = context.params["extra_llm_api_options"]
    file = {} if path is None else read_yaml(path)
    chosen = with_drafter(args.model, with_yaml(flags, path) if path else flags)
    lines = server_lines(context, names)
    click.echo("\n".join(["# tllm-serve", *lines, "# LLM"]))
    click.echo("\n".join(llm_lines(args, flags, file, chosen)))


def _bound(host: str, port: int) -> socket.socket:
    """The socket, not listening yet. It is bound before the model is loaded, so that a port in use
    is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        raise ValueError(f"cannot listen on --host {host} --port {port}: {error}") from error
    return bound


def read_args(model: str, flags: LlmFlags, yaml_path: str | None) -> LlmArgs:
    """LLM's arguments; the YAML file takes precedence over the flags. Raises ValueError with every
    flag and key that is refused."""
    given = {"model": model, **flags.arguments}
    with refused_together(flags.refusals):
        if yaml_path is not None:
            given = with_yaml(given, yaml_path)
        own = [name for name in given if either_spelling(name) in FLAGS_ONLY]
        told = f"{', '.join(own)}: flags of tllm-serve, not options of a YAML file"
        with refused_together([told] if own else []):
            given = {name: each for name, each in given.items() if name not in own}
            args = LlmArgs(**with_drafter(given["model"], given))
        if args.skip_tokenizer_init:
            raise ConfigError(
                ["skip_tokenizer_init = True cannot be served over HTTP: answers are text"]
            )
        return args


def _name_of(model: str) -> str:
    """A folder or a GGUF file is served under its own name, a zoo model under the name as given."""
    return Path(model).resolve().name.removesuffix(".gguf") if Path(model).exists() else model


if __name__ == "__main__":
    main()
