"""The engine's process: loads the models, runs rounds, and talks to the front processes.

    python -m tllm_spec.server.engine_process CONTROL LISTENER     # started by the supervisor

Both are file descriptors: of the connection to the supervisor, and of the Unix socket to which the
fronts connect."""

from __future__ import annotations

import gc
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from tllm_spec.config.engine_config import KVEventsConfig
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.faults import described
from tllm_spec.server.child import FAILED, Control, freeze_heap
from tllm_spec.server.draft_in_force import DraftInForce
from tllm_spec.server.host_limits import memory_note
from tllm_spec.server.link import Link

if TYPE_CHECKING:
    from tllm_spec.executor.resources.kv_events import Sink

logger = logging.getLogger(__name__)


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
        from tllm_spec.models.registry import check_config
        from tllm_spec.ranks import build_together, join_ranks
        from tllm_spec.server.engine_loop import EngineLoop
        from tllm_spec.server.engine_port import EnginePort
        from tllm_spec.server.logs import adopt_transformers_logs
        from tllm_spec.text.tokenizer import load_tokenizer
        from tllm_spec.zoo.registry import resolve_model

        adopt_transformers_logs()
        check_config(resolve_model(args.model))  # before its tokenizer is read
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
        self._grammars.close()
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
