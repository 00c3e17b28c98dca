"""The engine's process: loads the models, runs rounds, and talks to the front processes.

    python -m tllm_spec.server.engine_process CONTROL LISTENER     # started by the supervisor

Both are file descriptors: of the connection to the supervisor, and of the Unix socket to which the
fronts connect."""

from __future__ import annotations

import gc
import logging
import os
import selectors
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgpack

from tllm_spec.config.engine_config import KVEventsConfig
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.faults import described
from tllm_spec.executor.py_executor import Load
from tllm_spec.server.child import FAILED, Control, freeze_heap, memory_note
from tllm_spec.server.draft_swaps import DraftInForce
from tllm_spec.server.engine_port import EnginePort
from tllm_spec.server.wire import Link

if TYPE_CHECKING:
    from tllm_spec.executor.resources.kv_events import Sink


# One line a second about what the engine does, while it does something.


load_logger = logging.getLogger("tllm_spec.load")


class LoadLog:
    """Call `add` about once a second."""

    def __init__(self) -> None:
        self._last: Load | None = None
        self._time = monotonic()

    def add(self, load: Load) -> None:
        """Logs the difference to the last call, if there is one."""
        last, self._last = self._last or Load(0, 0, None, 0, 0), load
        now = monotonic()
        seconds, self._time = now - self._time, now
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


# The engine process's main thread: connections of fronts, what they send, and once a second the
# load.


logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
LAST_SECONDS = 1.0  # to send what is left at the end


class EngineLoop:
    """`load` asks the executor for its load."""

    def __init__(
        self, port: EnginePort, listener: socket.socket, load: Callable[[], Future[Load]]
    ) -> None:
        self._port = port
        self._listener = listener
        self._load = load
        self._load_log = LoadLog()
        self._asked: Future[Load] | None = None
        self._next_tick = monotonic()
        self._was_busy = False
        self._stopped = False
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)

    def stop(self) -> None:
        """Ends `run`. Thread-safe."""
        self._stopped = True
        self._wake()

    def run(self) -> None:
        """Serves until `stop`, then sends what is left."""
        while not self._stopped:
            self._step(self._seconds_to_tick())
            self._tick()
        deadline = monotonic() + LAST_SECONDS
        while any(link.has_backlog for link in self._links()) and monotonic() < deadline:
            self._step(max(0.0, deadline - monotonic()))

    def _links(self) -> list[Link]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _step(self, seconds: float | None) -> None:
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data is None:
                os.read(self._wake_in, 1 << 12)
            else:
                self._serve(key.data, events)
        for link in self._links():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_backlog else 0)
            if self._selector.get_key(link.socket).events != wanted:
                self._selector.modify(link.socket, wanted, link)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        link = Link(connection, self._wake)
        self._selector.register(connection, selectors.EVENT_READ, link)
        self._port.add(link)

    def _serve(self, link: Link, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            link.flush()
        if not events & selectors.EVENT_READ:
            return
        try:
            messages = link.read()
            for message in messages or ():
                self._port.receive(link, message)
        except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
            logger.warning("a front process is cut off, it sent nonsense: %s", described(error))
            messages = None
        if messages is None:
            self._selector.unregister(link.socket)
            self._port.remove(link)

    def _wake(self) -> None:
        try:
            os.write(self._wake_out, b"w")
        except BlockingIOError:
            return  # it is full, so the loop wakes anyway

    def _seconds_to_tick(self) -> float | None:
        """None while there is nothing to report."""
        if not (self._port.num_unfinished or self._was_busy or self._asked):
            return None
        return max(0.0, self._next_tick - monotonic())

    def _tick(self) -> None:
        """Reports the load that was asked for a tick before, and asks for the present one."""
        if monotonic() < self._next_tick:
            return
        self._next_tick = monotonic() + TICK_SECONDS
        is_busy = self._port.num_unfinished > 0
        if is_busy or self._was_busy:
            self._port.send_load()
        if self._asked is not None and self._asked.done():
            if self._asked.exception() is None:
                self._load_log.add(self._asked.result())
            self._asked = None
        if (is_busy or self._was_busy) and self._asked is None and not self._stopped:
            try:
                self._asked = self._load()
            except RuntimeError:
                return  # the executor has ended; `stop` follows
        self._was_busy = is_busy


class EngineProcess:
    """on_joining: called before it joins the other ranks. draft_version: of one of several engines:
    how often their draft weights have been swapped. Raises ValueError for models and options that
    cannot be served."""

    def __init__(
        self,
        args: LlmArgs,
        listener: socket.socket,
        on_joining: Callable[[], None],
        draft_version: int | None = None,
    ) -> None:
        from tllm_spec.draft_swap import DraftSwap
        from tllm_spec.executor.worker import Worker
        from tllm_spec.grammars import Grammars
        from tllm_spec.models.registry import model_config
        from tllm_spec.ranks import build_together, join_ranks
        from tllm_spec.server.engine_port import EnginePort
        from tllm_spec.server.logs import adopt_transformers_logs
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
        self._events = built.kv_events
        self._sinks: dict[Link, Sink] = {}
        self._draft_swap = DraftSwap(args, built.executor, self._worker)
        self._port = EnginePort(
            built.limits,
            built.queue,
            self._grammars,
            self._call,
            self._swap,
            self._watch,
            self._unwatch,
        )
        weights = built.executor.parts.draft_weights
        if weights is not None and draft_version is not None:
            weights.version, weights.report_worse = draft_version, self._port.report_worse
        self._loop = EngineLoop(
            self._port, listener, lambda: self._worker.submit(self._executor.load)
        )

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

    def _watch(self, link: Link) -> None:
        """Begins to send KV events to a front."""
        if self._events is not None:
            sink = self._sinks[link] = partial(_send_events, link)
            with suppress(RuntimeError):  # the executor has ended
                self._worker.submit(partial(self._events.add_sink, sink))

    def _unwatch(self, link: Link) -> None:
        if self._events is not None:
            with suppress(RuntimeError):
                self._worker.submit(partial(self._events.remove_sink, self._sinks.pop(link)))

    def _call(self, name: str) -> Future[Any]:
        functions = {"state": self._state, "stats": self._take_stats, "ping": lambda: None}
        return self._worker.submit(functions[name])

    def _swap(self, step: str, *arguments: Any) -> dict[str, Any]:
        swap = self._draft_swap
        steps: dict[str, Callable[..., dict[str, Any]]] = {
            "whole": swap.whole,
            "stage": swap.stage,
            "commit": swap.commit,
            "keep": swap.keep,
        }
        return steps[step](*arguments)

    def _state(self) -> Any:
        from tllm_spec.server_info import plain

        return plain(self._executor.state())

    def _take_stats(self) -> list[dict[str, Any]]:
        stats = self._executor.parts.iteration_stats
        return [] if stats is None else stats.take()


def _send_events(link: Link, payload: bytes) -> None:
    link.send(["kv_events", payload])


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
    served = DraftInForce(engine_paths[0]).read()
    if served is None:
        return args, 0
    from tllm_spec.draft_swap import with_draft_weights

    return with_draft_weights(args, served.folder), served.version


def main() -> int:
    control = Control(int(sys.argv[1]))
    listener = socket.socket(fileno=int(sys.argv[2]))
    settings = control.settings()
    control.watch()
    try:
        args = LlmArgs(**settings.llm)
        args = args_of_engine(args, settings.number, len(settings.engine_paths))
        args, draft_version = with_served_draft(args, settings.engine_paths)
        joining = partial(control.send, "joining")
        engine = EngineProcess(args, listener, joining, draft_version)
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
