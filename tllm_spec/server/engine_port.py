"""The engine's side of the connections to the front processes.

The executor's thread packs and sends, once a round and front. This process's main thread reads
what the fronts send, and makes requests of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from tllm_spec.executor.request import LlmRequest, Response
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.grammar.guided_decoding import GrammarSource
from tllm_spec.grammars import Grammars
from tllm_spec.request_errors import described
from tllm_spec.server.wire import Link, pack_limits, pack_response, requests_of, tokens_wanted

logger = logging.getLogger(__name__)

MAX_COMPILING = 64  # grammars at a time


@dataclass(eq=False, slots=True)
class Entry:
    """An unfinished request: its front, its id there, its tokens (see `tokens_wanted`), and whether
    it has been responded to."""

    link: Link
    front_id: int
    num_tokens: int
    is_first: bool = True


class EnginePort:
    """`call` runs a function, by its name in `["call", …]`, between two rounds. `["compile", …]`
    compiles a grammar, and `["swap", …]` runs a step of a swap of draft weights. What they return
    or raise is the answer."""

    def __init__(
        self,
        limits: RequestLimits,
        queue: RequestQueue,
        grammars: Grammars,
        call: Callable[[str], Future[Any]],
        swap: Callable[..., dict[str, Any]],
        watch: Callable[[Link], object] = lambda link: None,
        unwatch: Callable[[Link], object] = lambda link: None,
    ) -> None:
        """watch, unwatch: begin and end to send KV events to a front."""
        self._limits = limits
        self._queue = queue
        self._grammars = grammars
        self._call, self._swap = call, swap
        self._swapping = ThreadPoolExecutor(1, thread_name_prefix="tllm-swap")  # one at a time
        self._watch, self._unwatch = watch, unwatch
        self._links: list[Link] = []
        self._entries: dict[int, Entry] = {}  # by the request's id here
        self._num_tokens, self._counting = 0, threading.Lock()  # of them; both threads count
        self._own_ids: dict[Link, dict[int, int]] = {}  # by front, then by its own id
        # Ids of requests that are being made, which compiles their grammar. They leave when they
        # are queued, and when they are cancelled before.
        self._unmade: set[int] = set()
        self._queueing = threading.Lock()
        self._ids = count(1)
        self._down: str | None = None
        # Compiling a grammar may take seconds. Fronts ask for one of each client at a time.
        self._compiling = ThreadPoolExecutor(MAX_COMPILING, thread_name_prefix="tllm-grammars")

    @property
    def num_unfinished(self) -> int:
        return len(self._entries)

    # The executor's thread calls these three.

    def respond(self, responses: list[Response]) -> None:
        """Sends what a round has brought, one message for each front."""
        by_link: dict[Link, list[list[Any]]] = {}
        entries = self._entries
        for response in responses:
            entry = entries.get(response.request_id)
            if entry is None:
                continue  # its front has gone
            if response.finish_reason is not None:
                self._drop(response.request_id)
                self._own_ids[entry.link].pop(entry.front_id, None)
            packed = pack_response(response, entry.front_id, is_first=entry.is_first)
            entry.is_first = False
            by_link.setdefault(entry.link, []).append(packed)
        for link, packed_responses in by_link.items():
            link.send(["responses", len(entries), self._num_tokens, packed_responses])

    def fail_all(self, reason: str) -> None:
        """Called when the executor has ended."""
        self._down = reason
        for link in list(self._links):
            link.send(["down", reason])

    def report_worse(self, folder: str) -> None:
        """These draft weights have fewer tokens a round than those before."""
        for link in list(self._links):
            link.send(["worse", folder])

    # Everything else runs in the main thread.

    def add(self, link: Link) -> None:
        """Adds a front that has connected."""
        self._links.append(link)
        self._own_ids[link] = {}
        link.send(["hello", pack_limits(self._limits)])
        self._watch(link)
        if self._down is not None:
            link.send(["down", self._down])

    def remove(self, link: Link) -> None:
        """Removes a front that has gone, and cancels its requests."""
        self._links.remove(link)
        self._unwatch(link)
        link.close()
        own = list(self._own_ids[link].values())
        self._take_unmade(own)
        for request_id in own:
            self._drop(request_id)
            self._queue.cancel(request_id)
        if own:
            logger.warning("a front process has gone; %d requests are cancelled", len(own))

    def send_load(self) -> None:
        """Tells every front how many requests there are."""
        for link in self._links:
            link.send(["load", len(self._entries), self._num_tokens])

    def _drop(self, request_id: int) -> None:
        if (entry := self._entries.pop(request_id, None)) is not None:
            with self._counting:
                self._num_tokens -= entry.num_tokens

    def receive(self, link: Link, message: Sequence[Any]) -> None:
        """Raises ValueError, TypeError or LookupError for what no front sends."""
        kind = message[0]
        if kind == "submit":
            self._submit(link, message)
        elif kind == "cancel":
            _, front_ids, reason = message
            for front_id in front_ids:
                self._cancel(self._own_ids[link].get(front_id), reason)
        elif kind == "call":
            self._answer(link, *message[1:])
        elif kind == "compile":
            _, question_id, *source = message
            checked = self._compiling.submit(self._check_grammar, source)
            checked.add_done_callback(partial(_send_result, link, question_id))
        elif kind == "swap":
            _, question_id, *step = message
            swapped = self._swapping.submit(self._swap, *step)
            swapped.add_done_callback(partial(_send_result, link, question_id))
        else:
            raise ValueError(f"unknown message {kind!r}")

    def _cancel(self, request_id: int | None, reason: str) -> None:
        if request_id is None:
            return
        if self._take_unmade([request_id]):
            self.respond([Response(request_id, [], finish_reason=reason)])
        else:
            self._queue.cancel(request_id, reason)

    def _take_unmade(self, ids: Sequence[int]) -> set[int]:
        with self._queueing:
            waiting = self._unmade.intersection(ids)
            self._unmade -= waiting
            return waiting

    def _submit(self, link: Link, message: Sequence[Any]) -> None:
        ids, num_tokens = [], tokens_wanted(message)
        for front_id in message[1]:
            ids.append(request_id := next(self._ids))
            self._entries[request_id] = Entry(link, front_id, num_tokens)
            self._own_ids[link][front_id] = request_id
        with self._counting:
            self._num_tokens += num_tokens * len(ids)
        source = None if message[6] is None else GrammarSource(*message[6])
        with self._queueing:
            self._unmade |= set(ids)
        if source is None or self._grammars.keeps(source):
            self._make_and_put(message, ids, source)
        else:
            self._compiling.submit(self._make_and_put, message, ids, source)

    def _make_and_put(
        self, message: Sequence[Any], ids: list[int], source: GrammarSource | None
    ) -> None:
        """The front has checked the request, so no mistake is expected here."""
        try:
            none = [None] * len(ids)
            states = none if source is None else self._grammars.states_of(source, len(ids))
            requests = requests_of(message, ids, self._limits, states)
        except Exception as error:  # noqa: BLE001 # a process border: other requests go on
            self._fail(self._take_unmade(ids), _reason(error))
            return
        with self._queueing:
            self._put([each for each in requests if each.request_id in self._unmade])
            self._unmade.difference_update(ids)

    def _check_grammar(self, source: Sequence[Any]) -> None:
        self._grammars.states_of(GrammarSource(*source), 1)

    def _put(self, requests: list[LlmRequest]) -> None:
        if not self._queue.put(requests):
            error = self._down or "the executor has ended"
            self._fail([each.request_id for each in requests], error)

    def _fail(self, ids: Iterable[int], error: str) -> None:
        self.respond(
            [Response(request_id, [], finish_reason="error", error=error) for request_id in ids]
        )

    def _answer(self, link: Link, call_id: int, name: str) -> None:
        try:
            self._call(name).add_done_callback(partial(_send_result, link, call_id))
        except RuntimeError as error:  # the executor has ended
            link.send(["answer", call_id, None, str(error), False])


def _send_result(link: Link, question_id: int, result: Future[Any]) -> None:
    error = result.exception()
    if error is None:
        link.send(["answer", question_id, result.result(), None, False])
    else:
        is_mistake = isinstance(error, (ValueError, OSError))
        link.send(["answer", question_id, None, _reason(error), is_mistake])


def _reason(error: BaseException) -> str:
    """What the client is told. An error that is not expected is logged, too."""
    if isinstance(error, (ValueError, OSError, RuntimeError)):
        return str(error)
    logger.error("a request has failed: %s", described(error), exc_info=error)
    return described(error)
