"""`tllm-serve [serve] MODEL`: reads the command line and a YAML file, then runs the HTTP server."""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from tllm_spec.cli.trtllm_options import (
    ENGINE_OPTIONS,
    SERVER_OPTIONS,
    either_spelling,
    log_level_option,
    refused_together,
    split_trtllm_options,
    trtllm_options,
)
from tllm_spec.config import LlmArgs, overlay
from tllm_spec.distributed.mpirun import mpirun_rank


def _model_of(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> str:
    """The word `serve` may precede MODEL, as with `trtllm-serve`."""
    *command, model = words
    if command not in ([], ["serve"]):
        raise click.BadParameter(f"one model is needed, not {' '.join(words)}")
    return model


@click.command(
    context_settings={"show_default": True, "token_normalize_func": either_spelling},
    epilog="Options may be spelled with - or _. TensorRT-LLM's other options are accepted with the "
    "values that this server supports, and refused with the reason otherwise.",
)
@click.argument("model", nargs=-1, required=True, metavar="[serve] MODEL", callback=_model_of)
@click.option("--tokenizer", help="Folder of the tokenizer. [default: the model's]")
@click.option("--host", default="localhost", help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen on; 0: any free."
)
@click.option(
    "--served_model_name",
    help="Model name that requests must give. [default: MODEL, or the name of its folder]",
)
@click.option("--max_batch_size", type=int, help="Maximum number of requests in a batch.")
@click.option("--max_num_tokens", type=int, help="Maximum number of tokens in one forward pass.")
@click.option(
    "--max_seq_len", type=int, help="Maximum length of a prompt and its output, in tokens."
)
@click.option(
    "--kv_cache_free_gpu_memory_fraction",
    "--free_gpu_memory_fraction",
    type=float,
    help="Fraction of the free device memory that the KV cache takes.",
)
@click.option(
    "--enable_chunked_prefill", is_flag=True, help="Split long prompts over several forward passes."
)
@click.option(
    "--extra_llm_api_options",
    "--config",
    type=click.Path(dir_okay=False),
    help="YAML file with arguments of LLM, such as speculative_config. "
    "It takes precedence over the options of the command line.",
)
@trtllm_options(*ENGINE_OPTIONS, *SERVER_OPTIONS)
@log_level_option("info")
def main(
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
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        args = read_args(model, options, extra_llm_api_options)
        if args.tensor_parallel_size > 1 and mpirun_rank():
            from tllm_spec.ranks import join_ranks  # heavy, so not at the top

            join_ranks(args)  # this process serves rank 0, and ends with it
        with _listen(host, port) as listener:
            serve(args, listener, served_model_name or _name_of(args.model), log_level)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def serve(args: LlmArgs, listener: socket.socket, served_model_name: str, log_level: str) -> None:
    """Loads the model and serves it until interrupted. Raises ValueError when it cannot be
    served."""
    import uvicorn  # heavy, so not at the top: --help must not load it

    from tllm_spec.llm import LLM
    from tllm_spec.server.app import OpenAIServer

    app = OpenAIServer(LLM.from_args(args), served_model_name).app()
    host, port = listener.getsockname()[:2]
    logging.getLogger(__name__).info("serving %s on http://%s:%d", served_model_name, host, port)
    # uvicorn shuts down cleanly on Ctrl-C and then raises KeyboardInterrupt again.
    with _frozen_heap(), suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, log_level=log_level)).run(sockets=[listener])


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Excludes the objects made at start-up from garbage collection. There are hundreds of
    thousands, they live as long as the server, and a full collection would delay requests."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _listen(host: str, port: int) -> socket.socket:
    """The listening socket. It is opened before the model is loaded, so that a port in use is
    reported at once."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise ValueError(f"cannot listen on --host {host} --port {port}: {error}") from error


def read_args(model: str, flags: dict[str, Any], yaml_path: str | None) -> LlmArgs:
    """LLM's arguments; the YAML file takes precedence over the flags. Raises ValueError with every
    flag and key that is refused."""
    flags, arguments, refusals = split_trtllm_options(flags)
    given = {
        name: value for name, value in flags.items() if value is not None and value is not False
    }
    fraction = given.pop("kv_cache_free_gpu_memory_fraction", None)
    if fraction is not None:
        given["kv_cache_config"] = {"free_gpu_memory_fraction": fraction}
    given = overlay(arguments, given)
    with refused_together(refusals):
        if yaml_path is None:
            return LlmArgs.from_kwargs(model, **given)
        return LlmArgs.from_yaml(yaml_path, model=model, **given)


def _name_of(model: str) -> str:
    """A folder is served under its own name, a zoo model under the name as given."""
    return Path(model).resolve().name if Path(model).is_dir() else model


if __name__ == "__main__":
    main()
