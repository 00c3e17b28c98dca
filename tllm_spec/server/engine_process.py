"""The engine's process: loads the models, runs rounds, and talks to the front processes.

    python -m tllm_spec.server.engine_process CONTROL LISTENER     # started by the supervisor

Both are file descriptors: of the connection to the supervisor, and of the Unix socket to which the
fronts connect."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import product
from time import monotonic
from typing import Any

import msgpack

from tllm_spec.config.engine_config import KVEventsConfig
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.py_executor import Load
from tllm_spec.outputs import FIRST_VERSION
from tllm_spec.request_errors import described
from tllm_spec.server.child import FAILED, Control, freeze_heap, memory_note
from tllm_spec.server.engine_port import EnginePort
from tllm_spec.server.fleet import FleetAdapters, FleetDraft, FleetTarget, ServedAdapters
from tllm_spec.server.wire import Link

logger = logging.getLogger(__name__)
load_logger = logging.getLogger("tllm_spec.load")

TICK_SECONDS = 1.0
LAST_SECONDS, POLL_SECONDS = 1.0, 0.01  # to send what is left at the end


def log_load(last: Load, load: Load, seconds: float) -> None:
    """Logs a line about what the engine has done since `last`, if it does something."""
    num_rounds = load.request_rounds - last.request_rounds
    num_tokens = load.emitted_tokens - last.emitted_tokens
    if not (num_rounds or load.num_running or load.num_waiting):
        return
    fields = {
        "tokens_per_second": round(num_tokens / seconds, 1),
        "running": load.num_running,
        "waiting": load.num_waiting,
        "acceptance_length": round(num_tokens / num_rounds, 2) if num_rounds else None,
        "draft_len": load.tier_name,
    }
    load_logger.info(
        "%(tokens_per_second).0f tokens/s, %(running)d running, %(waiting)d waiting, "
        "acceptance length %(acceptance_length)s, draft length %(draft_len)s",
        {name: "-" if value is None else value for name, value in fields.items()},
        extra={"fields": fields},
    )


class EngineLoop:
    """The main thread: connections of fronts, what they send, and once a second the load, for which
    `load` asks the executor."""

    def __init__(
        self, port: EnginePort, listener: socket.socket, load: Callable[[], Future[Load]]
    ) -> None:
        self._port, self._listener, self._load = port, listener, load
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._links: set[Link] = set()

    def stop(self) -> None:
        """Ends `run`. Thread-safe."""
        self._in_loop(self._stopped.set)

    def run(self) -> None:
        """Serves until `stop`, then sends what is left."""
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)
        reporting = asyncio.create_task(self._report_load())
        await self._stopped.wait()
        reporting.cancel()
        await asyncio.wait([reporting])
        deadline = monotonic() + LAST_SECONDS
        while any(link.has_backlog for link in self._links) and monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        link = Link(connection, lambda: self._in_loop(self._write, link))
        self._links.add(link)
        self._loop.add_reader(connection, self._read, link)
        self._port.add(link)

    def _write(self, link: Link) -> None:
        """Sends what the socket takes, and the rest once it takes more."""
        link.flush()
        if link.has_backlog:
            self._loop.add_writer(link.socket, self._write, link)
        elif link in self._links:
            self._loop.remove_writer(link.socket)

    def _read(self, link: Link) -> None:
        try:
            messages = link.read()
            for message in messages or ():
                self._port.receive(link, message)
        except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
            logger.warning("a front process is cut off, it sent nonsense: %s", described(error))
            messages = None
        if messages is None:
            self._links.discard(link)
            self._loop.remove_reader(link.socket)
            self._loop.remove_writer(link.socket)
            self._port.remove(link)

    def _in_loop(self, function: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    async def _report_load(self) -> None:
        """Once a second while there are requests: to the fronts, and a line of the log about what
        was asked for a second before."""
        last, time = Load(0, 0, None, 0, 0), monotonic()
        asked: Future[Load] | None = None
        asked_at = time
        num_seen, was_busy = 0, False
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if asked is not None and asked.done():
                if asked.exception() is None:
                    log_load(last, load := asked.result(), asked_at - time)
                    last, time = load, asked_at
                asked = None
            num_submitted = self._port.num_submitted
            is_busy = self._port.num_unfinished > 0 or num_submitted > num_seen
            if is_busy or was_busy:
                self._port.send_load()
                if asked is None:
                    with suppress(RuntimeError):  # the executor has ended; `stop` follows
                        asked, asked_at = self._load(), monotonic()
            else:
                time = monotonic()  # what comes next is not spread over the idle time
            num_seen, was_busy = num_submitted, is_busy


# What fronts ask the engine's parts for, and what may take long.
STEPS = (
    *product(("draft", "target", "adapters"), ("stage", "keep")),
    *(("draft", "whole"), ("target", "update"), ("adapters", "idle")),
    *product(("sleep",), ("keep", "sleep", "wake_up", "pause")),
)


class EngineProcess:
    """on_joining: called before it joins the other ranks. Of one of several engines draft_version
    is how often their draft weights have been swapped, and weight_version names the target's
    weights once they have been updated. Raises ValueError for models and options that
    cannot be served."""

    def __init__(
        self,
        args: LlmArgs,
        listener: socket.socket,
        on_joining: Callable[[], None],
        draft_version: int | None = None,
        weight_version: str | None = None,
    ) -> None:
        from tllm_spec.executor.worker import Worker
        from tllm_spec.grammars import Grammars
        from tllm_spec.models.registry import model_config
        from tllm_spec.ranks import build_together, join_ranks
        from tllm_spec.server.child import adopt_transformers_logs
        from tllm_spec.text.tokenizer import load_tokenizer
        from tllm_spec.zoo.registry import resolve_model

        adopt_transformers_logs()
        model_config(resolve_model(args.model))  # before its tokenizer is read
        tokenizer = load_tokenizer(args.tokenizer or args.model)
        on_joining()
        self._communicator = join_ranks(args)
        built = build_together(
            args, tokenizer, lambda responses: self._port.respond(responses), self._communicator
        )
        self._executor = built.executor
        self._grammars = Grammars.of(args, tokenizer, built.limits)
        self._worker = Worker(built.executor, built.queue, self._on_end)
        self.parts = self._parts(args)
        weights, stats = built.executor.parts.draft_weights, built.executor.parts.iteration_stats
        self._port = EnginePort(
            built,
            self._grammars,
            self._worker.submit,
            {
                "state": self._state,
                "stats": list if stats is None else stats.take,
                "ping": lambda: None,
                "is_sleeping": lambda: self.parts["sleep"].is_sleeping,
                "resume": self.parts["sleep"].resume_now,
            },
            {(part, step): getattr(self.parts[part], step) for part, step in STEPS},
        )
        if weights is not None and draft_version is not None:
            weights.version, weights.report_worse = draft_version, self._port.report_worse
        target = built.executor.parts.target_weights
        if target is not None and weight_version is not None:
            target.version = weight_version
        self._loop = EngineLoop(
            self._port, listener, lambda: self._worker.submit(self._executor.load)
        )

    def _parts(self, args: LlmArgs) -> dict[str, Any]:
        """What can be changed, by the names that fronts use."""
        from tllm_spec.adapter_loading import AdapterLoading
        from tllm_spec.draft_swap import DraftSwap
        from tllm_spec.rank_calls import Pausing, RankCalls
        from tllm_spec.target_update import TargetUpdate

        calls = RankCalls(self._executor, self._worker)
        draft, cancel_all = DraftSwap(args, calls), lambda: self._port.cancel_all()
        target = TargetUpdate(args, calls, draft.forced)
        return {
            "draft": draft,
            "target": target,
            "adapters": AdapterLoading(calls),
            "sleep": Pausing(
                calls, cancel_all, lambda mode: self._port.set_pause(mode), target.reload
            ),
        }

    def run(self) -> str | None:
        """Serves until `stop`. Returns why the engine has died, or None."""
        self._grammars.prepare()
        self._communicator.when_lost(self._worker.fail)
        self._worker.start()
        self._loop.run()
        failure = self._worker.failure
        if failure is None:  # or the worker may wait for a lost rank
            self._worker.stop()
            self._communicator.close()
        return failure

    def stop(self) -> None:
        self._loop.stop()

    def _on_end(self, reason: str) -> None:
        self._port.fail_all(reason)
        self._loop.stop()

    def _state(self) -> Any:
        from tllm_spec.server_info import plain

        return plain(self._executor.state())


def args_of_engine(args: LlmArgs, number: int, num_engines: int) -> LlmArgs:
    """The arguments of one of several engines on this machine. Raises ValueError if each cannot
    have a GPU of its own."""
    if num_engines == 1:
        return args
    import torch

    device = args.device
    if device.startswith("cuda:"):
        raise ValueError(
            f"device = {device!r} is one device and dp_size = {num_engines} needs more; 'cuda' is "
            "accepted, and CUDA_VISIBLE_DEVICES chooses"
        )
    if device != "cpu" and torch.cuda.is_available():
        if torch.cuda.device_count() < num_engines:
            raise ValueError(
                f"dp_size = {num_engines} needs as many GPUs, and torch sees "
                f"{torch.cuda.device_count()}"
            )
        device = f"cuda:{number}"
    cache = args.kv_cache_config
    events = cache.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        events = KVEventsConfig(publisher="null")
    cache = cache.model_copy(update={"kv_events_config": events.of_engine(number)})
    return args.model_copy(update={"device": device, "kv_cache_config": cache})


def with_served_draft(args: LlmArgs, engine_paths: Sequence[str]) -> tuple[LlmArgs, int | None]:
    """The arguments with the draft weights that the other engines have, and how often these have
    been swapped; None for an only engine."""
    if len(engine_paths) == 1:
        return args, None
    served = FleetDraft(engine_paths).read()
    if served is None:
        return args, 0
    from tllm_spec.draft_swap import with_draft_weights

    return with_draft_weights(args, served.folder), int(served.version)


def with_served_target(args: LlmArgs, engine_paths: Sequence[str]) -> tuple[LlmArgs, str | None]:
    """The arguments with the target's weights that the other engines have after an update, and
    their version; None before."""
    served = FleetTarget(engine_paths).read()
    if served is None or served.version == FIRST_VERSION:
        return args, None
    own = {"model": served.folder, "tokenizer": args.tokenizer or args.model, "load_format": "auto"}
    return args.model_copy(update=own), str(served.version)


def with_served_adapters(args: LlmArgs, served: ServedAdapters | None) -> LlmArgs:
    """The arguments with the adapters that the other engines have."""
    if served is None or args.lora_config is None:
        return args
    folders = {each.name: each.folder for each in served.values()}
    config = args.lora_config.model_copy(update={"lora_dir": folders})
    return args.model_copy(update={"lora_config": config})


def main() -> int:
    control = Control(int(sys.argv[1]))
    listener = socket.socket(fileno=int(sys.argv[2]))
    settings = control.settings()
    control.watch()
    try:
        args = LlmArgs(**settings.llm)
        args = args_of_engine(args, settings.number, len(settings.engine_paths))
        args, draft_version = with_served_draft(args, settings.engine_paths)
        args, weight_version = with_served_target(args, settings.engine_paths)
        adapters = FleetAdapters(settings.engine_paths[0])
        args = with_served_adapters(args, adapters.read())
        joining = partial(control.send, "joining")
        engine = EngineProcess(args, listener, joining, draft_version, weight_version)
        if args.lora_config is not None:
            adapters.publish(engine.parts["adapters"].infos)
    except ValueError as error:
        control.send("failed", str(error))
        return FAILED
    except Exception as error:  # a process border: loading can fail in any library
        logger.debug("the engine could not start", exc_info=True)
        note = memory_note() if isinstance(error, MemoryError) else ""
        control.send("failed", f"the engine could not start: {described(error)}{note}")
        return FAILED
    freeze_heap()
    control.loaded(engine.stop)
    control.send("ready")
    failure = engine.run()
    gc.unfreeze()  # or libraries report what is never freed
    if failure is not None:
        control.send("failed", f"the engine has died: {failure}")
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
