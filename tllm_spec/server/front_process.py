"""A front process: HTTP, checks, tokens and text, in front of the engine's process.

    python -m tllm_spec.server.front_process CONTROL LISTENER     # started by the supervisor

Both are file descriptors: of the connection to the supervisor, and of the listening socket."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.server.child import FAILED, ChildSettings, Control, freeze_heap
from tllm_spec.server.histograms import Histograms
from tllm_spec.server.http_server import HttpServer, Tls
from tllm_spec.server.options import ServerOptions
from tllm_spec.zoo.registry import is_gguf

if TYPE_CHECKING:
    from tllm_spec.server.engine_client import EngineClient
    from tllm_spec.server.fleet import FleetAdapters
    from tllm_spec.server.replicas import Replicas

LOST_SECONDS = 3.0  # that a front without an engine goes on answering 503


async def serve(settings: ChildSettings, control: Control, listener: socket.socket) -> None:
    """Serves until the supervisor closes its connection. Raises ValueError for a tokenizer, a
    certificate or a socket that cannot be used, ConnectionError when the engine could not start."""
    args = LlmArgs(**settings.llm)
    tokenizer_source = args.tokenizer or args.model
    if not is_gguf(Path(tokenizer_source)):  # transformers reads these with torch
        _leave_torch_out()
    from tllm_spec.server.app import OpenAIServer
    from tllm_spec.server.child import adopt_transformers_logs
    from tllm_spec.server.traces import Traces, otlp_exporter

    loop, stop, draining = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    adopt_transformers_logs()
    options = ServerOptions(**settings.server)
    client = await _client(args, settings.engine_paths, options.engine_timeout, stop)
    adapters = None
    if args.lora_config is not None:
        adapters = await _adapters(client, settings.engine_paths)
    histograms = Histograms(Path(settings.engine_paths[0]).parent)
    model, endpoint = settings.served_model_name, options.otlp_traces_endpoint
    traces = Traces(otlp_exporter(endpoint)) if endpoint else None
    server = OpenAIServer(client, model, options, histograms, traces, draining, adapters=adapters)
    http = HttpServer(server.app(), options, Tls(**settings.tls) if settings.tls else None)
    freeze_heap()
    control.loaded(
        partial(loop.call_soon_threadsafe, stop.set),
        partial(loop.call_soon_threadsafe, draining.set),
    )
    await http.serve(listener, stop, client.shutdown, lambda: control.send("ready"))
    server.close()
    gc.unfreeze()  # or libraries report what is never freed


async def _client(
    args: LlmArgs, paths: Sequence[str], timeout: float, stop: asyncio.Event
) -> EngineClient | Replicas:
    """stop: set some time after the only engine has ended."""
    from tllm_spec.server.engine_client import EngineClient, EngineConnection
    from tllm_spec.server.replicas import Replicas
    from tllm_spec.text.tokenizer import load_tokenizer

    loop = asyncio.get_running_loop()
    try:
        _, connection = await loop.create_unix_connection(EngineConnection, paths[0])
    except FileNotFoundError as error:
        raise ValueError(f"the engine's socket has been removed: {paths[0]}") from error
    try:
        tokenizer = load_tokenizer(args.tokenizer or args.model)
    except ValueError:
        await connection.limits  # an engine that fails, too, knows more of the reason
        raise
    if len(paths) > 1:
        connection.close()
        return await Replicas.connected(args, tokenizer, paths, timeout)
    # With an engine that lives, the supervisor starts another front then.
    connection.closed.add_done_callback(lambda _: loop.call_later(LOST_SECONDS, stop.set))
    return EngineClient(args, tokenizer, connection, await connection.limits, timeout)


async def _adapters(client: EngineClient | Replicas, paths: Sequence[str]) -> FleetAdapters:
    from tllm_spec.server.fleet import FleetAdapters
    from tllm_spec.server.replicas import Replicas

    if isinstance(client, Replicas):
        return client.adapters
    adapters = FleetAdapters(paths[0], lambda: [client])
    await asyncio.to_thread(adapters.settle, client)
    return adapters


def _leave_torch_out() -> None:
    """transformers loads torch where it finds it: 340 MiB that tokenizers do not need. Without it,
    it would log that there are no models."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # for Python: it cannot be imported
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def main() -> int:
    control = Control(int(sys.argv[1]))
    listener = socket.socket(fileno=int(sys.argv[2]))
    try:
        settings = control.settings()
        control.watch()
        asyncio.run(serve(settings, control, listener))
    except ValueError as error:
        control.send("failed", str(error))
        return FAILED
    except ConnectionError:
        return FAILED  # the supervisor knows why
    return 0


if __name__ == "__main__":
    sys.exit(main())
