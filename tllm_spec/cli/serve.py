"""`tllm-serve [serve] MODEL`: options of the command line and a YAML file, then the HTTP server."""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from tllm_spec.cli.trtllm_options import trtllm_options
from tllm_spec.config import LlmArgs


def _model_of(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> str:
    """The word `serve` may stand before MODEL, as with `trtllm-serve`."""
    *command, model = words
    if command not in ([], ["serve"]):
        raise click.BadParameter(f"one model is needed, not {' '.join(words)}")
    return model


@click.command(context_settings={"show_default": True})
@click.argument("model", nargs=-1, required=True, metavar="[serve] MODEL", callback=_model_of)
@click.option("--tokenizer", help="Folder of the tokenizer, if it is not the model's.")
@click.option("--host", default="localhost", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0 takes a free port.")
@click.option(
    "--served_model_name", help="Name in requests. [default: MODEL, or its folder's name]"
)
@click.option("--max_batch_size", type=int, help="Requests decoded together.")
@click.option("--max_num_tokens", type=int, help="Tokens computed in one round.")
@click.option("--max_seq_len", type=int, help="Longest prompt and answer together.")
@click.option(
    "--kv_cache_free_gpu_memory_fraction",
    "--free_gpu_memory_fraction",
    type=float,
    help="Share of the free device memory for the KV cache.",
)
@click.option(
    "--enable_chunked_prefill", is_flag=True, help="Spread long prompts over several rounds."
)
@click.option(
    "--extra_llm_api_options",
    "--config",
    type=click.Path(dir_okay=False),
    help="YAML file with any LLM arguments (speculative_config, ...); it overrides the options above.",
)
@trtllm_options
@click.option(
    "--log_level",
    type=click.Choice(["debug", "info", "warning", "error", "critical"]),
    default="info",
)
def main(
    model: str,
    host: str,
    port: int,
    served_model_name: str | None,
    extra_llm_api_options: str | None,
    log_level: str,
    **options: Any,
) -> None:
    """Serve MODEL (a local folder, or a zoo name such as zoo:llama) over OpenAI's HTTP
    interface."""
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        args = read_args(model, options, extra_llm_api_options)
        with _listen(host, port) as listener:
            serve(args, listener, served_model_name or _name_of(args.model), log_level)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def serve(args: LlmArgs, listener: socket.socket, served_model_name: str, log_level: str) -> None:
    """Loads the model and serves it until interrupted. Raises ValueError for one that cannot be
    served."""
    import uvicorn  # heavy imports only where a server really starts

    from tllm_spec.llm import LLM
    from tllm_spec.server.app import OpenAIServer

    app = OpenAIServer(LLM.from_args(args), served_model_name).app()
    host, port = listener.getsockname()[:2]
    logging.getLogger(__name__).info("serving %s on http://%s:%d", served_model_name, host, port)
    with (
        _settled_heap(),
        suppress(KeyboardInterrupt),
    ):  # uvicorn ends in good order, then raises it once more
        uvicorn.Server(uvicorn.Config(app, log_level=log_level)).run(sockets=[listener])


@contextmanager
def _settled_heap() -> Iterator[None]:
    """What lives now lives as long as the server. Python's collector would look through all of
    these hundreds of thousands of objects whenever requests have left enough behind, and every
    request would wait for that."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _listen(host: str, port: int) -> socket.socket:
    """The server's socket: taken before the model is loaded, so that a taken port is known at
    once."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise ValueError(f"cannot listen on --host {host} --port {port}: {error}") from error


def read_args(model: str, flags: dict[str, Any], yaml_path: str | None) -> LlmArgs:
    """LLM's arguments; what is in the YAML file wins over the flags."""
    given = {
        name: value for name, value in flags.items() if value is not None and value is not False
    }
    fraction = given.pop("kv_cache_free_gpu_memory_fraction", None)
    if fraction is not None:
        given["kv_cache_config"] = {"free_gpu_memory_fraction": fraction}
    if yaml_path is None:
        return LlmArgs.from_kwargs(model, **given)
    return LlmArgs.from_yaml(yaml_path, model=model, **given)


def _name_of(model: str) -> str:
    """A folder is served under its own name, anything else as it was written."""
    return Path(model).resolve().name if Path(model).is_dir() else model


if __name__ == "__main__":
    main()
