"""The engine's side of the connections to the front processes.

The executor's thread packs and sends, once a round and front. This process's main thread reads
what the fronts send, and makes requests of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tllm_spec.executor.request import Response
from tllm_spec.executor.request_wire import unpack_requests
from tllm_spec.grammar.guided_decoding import GrammarSource
from tllm_spec.grammars import Grammars
from tllm_spec.request_errors import described
from tllm_spec.server.wire import Link, pack_response

if TYPE_CHECKING:
    from tllm_spec.executor.build import BuiltExecutor

logger = logging.getLogger(__name__)

MAX_COMPILING = 64  # grammars at a time


@dataclass(eq=False, slots=True)
class Entry:
    """An unfinished request: its front, its id there, its tokens of prompt and output, at most, and
    whether it has been responded to."""

    link: Link
    front_id: int
    num_tokens: int
    is_first: bool = True


class EnginePort:
    """calls: functions that `["call", …]` runs between two rounds, by their names. `["compile", …]`
    compiles a grammar, and `["step", …]` runs one of `steps`, by part and name. What they return or
    raise is the answer."""

    def __init__(
        self,
        built: BuiltExecutor,
        grammars: Grammars,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        calls: Mapping[str, Callable[[], Any]],
        steps: Mapping[tuple[str, str], Callable[..., Any]],
    ) -> None:
        """submit: has the executor's thread call a function between two rounds."""
        self._limits, self._queue, self._kv_events = built.limits, built.queue, built.kv_events
        self._grammars = grammars
        self._run, self._calls, self._steps = submit, calls, steps
        self._stepping = ThreadPoolExecutor(1, thread_name_prefix="tllm-steps")  # one at a time
        self._entries: dict[int, Entry] = {}  # by the request's id here
        self._num_tokens, self._counting = 0, threading.Lock()  # of them; both threads count
        self._own_ids: dict[Link, dict[int, int]] = {}  # by connected front, then by its own id
        # Ids of requests that are being made, which compiles their grammar. They leave when they
        # are queued, and when they are cancelled before.
        self._unmade: set[int] = set()
        self._queueing = threading.Lock()
        self.num_submitted = 0  # requests since the start: the latest one's id
        self._down: str | None = None
        self._pause_mode: str | None = None
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
        self._tell_all("down", reason)

    def report_worse(self, folder: str) -> None:
        """These draft weights have fewer tokens a round than those before."""
        self._tell_all("worse", folder)

    def set_pause(self, mode: str | None) -> None:
        """mode: of a pause that begins; None: it has ended."""
        self._pause_mode = mode
        self._tell_all("paused", mode)

    def cancel_all(self) -> None:
        """Cancels all requests, of all fronts."""
        for request_id in list(self._entries):
            self._queue.cancel(request_id)

    def _tell_all(self, *message: Any) -> None:
        for link in list(self._own_ids):
            link.send(message)

    # Everything else runs in the main thread.

    def add(self, link: Link) -> None:
        """Adds a front that has connected."""
        self._own_ids[link] = {}
        link.send(["hello", asdict(self._limits)])
        link.send(["paused", self._pause_mode])
        self._between_rounds("add_sink", link)
        if self._down is not None:
            link.send(["down", self._down])

    def remove(self, link: Link) -> None:
        """Removes a front that has gone, and cancels its requests."""
        own = list(self._own_ids.pop(link).values())
        self._between_rounds("remove_sink", link)
        link.close()
        self._take_unmade(own)
        for request_id in own:
            self._drop(request_id)
            self._queue.cancel(request_id)
        if own:
            logger.warning("a front process has gone; %d requests are cancelled", len(own))

    def send_load(self) -> None:
        """Tells every front how many requests there are."""
        self._tell_all("load", len(self._entries), self._num_tokens)

    def _between_rounds(self, method: str, link: Link) -> None:
        """Begins or ends to send KV events to a front."""
        if self._kv_events is not None:
            with suppress(RuntimeError):  # the executor has ended
                self._run(partial(getattr(self._kv_events, method), link.send_kv_events))

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
            _, question_id, name = message
            try:
                self._answer_later(link, question_id, self._run(self._calls[name]))
            except RuntimeError as error:  # the executor has ended
                link.send(["answer", question_id, None, str(error), False])
        elif kind == "compile":
            _, question_id, *source = message
            compiling = self._compiling.submit(self._grammars.states_of, GrammarSource(*source), 0)
            self._answer_later(link, question_id, compiling)
        elif kind == "step":
            _, question_id, part, step, *arguments = message
            stepping = self._stepping.submit(self._steps[part, step], *arguments)
            self._answer_later(link, question_id, stepping)
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
        ids, (_, _, _, tokens, _, (max_tokens, *_), grammar) = [], message
        num_tokens = len(tokens) + int(max_tokens)
        for front_id in message[1]:
            self.num_submitted = request_id = self.num_submitted + 1
            ids.append(request_id)
            self._entries[request_id] = Entry(link, front_id, num_tokens)
            self._own_ids[link][front_id] = request_id
        with self._counting:
            self._num_tokens += num_tokens * len(ids)
        source = None if grammar is None else GrammarSource(*grammar)
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
            requests = unpack_requests(message[1:6], ids, self._limits, states)
        except Exception as error:  # noqa: BLE001 # a process border: other requests go on
            self._fail(self._take_unmade(ids), _reason(error))
            return
        with self._queueing:
            wanted = [each for each in requests if each.request_id in self._unmade]
            if not self._queue.put(wanted):
                reason = self._down or "the executor has ended"
                self._fail([each.request_id for each in wanted], reason)
            self._unmade.difference_update(ids)

    def _fail(self, ids: Iterable[int], error: str) -> None:
        self.respond(
            [Response(request_id, [], finish_reason="error", error=error) for request_id in ids]
        )

    def _answer_later(self, link: Link, question_id: int, result: Future[Any]) -> None:
        result.add_done_callback(partial(_send_result, link, question_id))


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
