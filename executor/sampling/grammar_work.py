"""Runs the host's work on requests' grammars, which is xgrammar's, in threads: masks and drafts.

All requests of a round wait for it, and xgrammar cannot be interrupted. So work that takes too long
is given up: the requests of the grammar that took most of the time fail, and a thread that is still
busy with one goes on with the lowest priority, and nobody waits for it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.executor.request import LlmRequest
from tllm_spec.request_errors import SLOW_GRAMMAR, GrammarTooSlow

# The masks of a round may take this much processor time, and as much again for each of its requests
# as the second number says; so may its drafts. A limit on wall time would fail quick grammars where
# other processes take the processors.
MAX_SECONDS, SECONDS_PER_REQUEST = 0.15, 0.002
NUM_THREADS = 4
MIN_FOR_THREADS = 16  # requests; the work for fewer takes less time than a forward
LOWEST_PRIORITY = 19
SHORT = 0.001  # seconds

Job = tuple[LlmRequest, Callable[[], None]]


class GrammarWork:
    """xgrammar works without Python's lock, so many jobs run in several threads. With several ranks
    rank 0 decides what takes too long."""

    def __init__(self, communicator: Communicator = SINGLE) -> None:
        self._communicator = communicator
        self._queue: SimpleQueue[_Jobs | None] = SimpleQueue()
        self._num_threads = 0
        self._culprits: list[LlmRequest] = []

    def run(self, jobs: Sequence[Job]) -> None:
        """Runs the jobs, at most one of each request. Raises what a job raises, and
        GrammarTooSlow."""
        number = min(NUM_THREADS, len(jobs)) if len(jobs) >= MIN_FOR_THREADS else 1
        groups = [_Jobs(jobs[i::number]) for i in range(number)]
        for group in groups:
            self._queue.put(group)
        self._start_threads(number)
        is_first = self._communicator.mapping.rank == 0
        slow = set(self._communicator.share(_slow_requests(groups) if is_first else []))
        for group in groups:
            if slow:
                group.stop()
            if group.running.request_id not in slow:
                group.is_done.wait()  # no thread uses a grammar that is not given up
        if slow:
            self._give_up(groups, slow)
        for group in groups:
            if group.error is not None:
                self._culprits = [group.running]
                raise group.error

    def blame(self) -> list[LlmRequest] | None:
        """After an exception: the requests whose grammars caused it; None if it was not raised
        here."""
        culprits, self._culprits = self._culprits, []
        return culprits or None

    def _start_threads(self, number: int) -> None:
        while self._num_threads < number:
            self._num_threads += 1
            threading.Thread(
                target=_work, args=(self._queue,), name="tllm-grammars", daemon=True
            ).start()
            weakref.finalize(self, self._queue.put, None)  # ends it

    def _give_up(self, groups: Sequence[_Jobs], slow: set[int]) -> None:
        """slow: request ids."""
        requests = [request for group in groups for request, _ in group.jobs]
        self._culprits = [request for request in requests if request.request_id in slow]
        for request in self._culprits:
            assert request.grammar is not None
            request.grammar.refuse(SLOW_GRAMMAR)
        # Idle threads end now, busy ones when their work returns.
        for group in groups:
            group.lower_priority()
        for _ in range(self._num_threads):
            self._queue.put(None)
        self._queue, self._num_threads = SimpleQueue(), 0
        raise GrammarTooSlow(SLOW_GRAMMAR)


class _Jobs:
    """Jobs that one thread runs in turn. `running`: the request of the latest job."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.running = jobs[0][0]
        self.error: BaseException | None = None
        self.is_done = threading.Event()
        self._lock = threading.Lock()  # no job begins after `stop`
        self._is_stopped = False
        self._seconds: dict[int, float] = {}  # processor time by request id
        self._began = 0.0
        self._thread: threading.Thread | None = None

    def work(self) -> None:
        """Runs the jobs, in the thread that calls it."""
        self._thread = threading.current_thread()
        try:
            for request, job in self.jobs:
                with self._lock:
                    if self._is_stopped:
                        break
                    self.running, self._began = request, time.thread_time()
                job()
                self._seconds[request.request_id] = time.thread_time() - self._began
        except BaseException as error:  # noqa: BLE001 # a thread's border: `run` raises it
            self.error = error
        self.is_done.set()

    def stop(self) -> None:
        """Lets no further job begin."""
        with self._lock:
            self._is_stopped = True

    def wait(self, limits: int = 1) -> bool:
        """Waits until all jobs are done, or have used `limits` times their limit. Returns whether
        they are done."""
        seconds = limits * (MAX_SECONDS + SECONDS_PER_REQUEST * len(self.jobs))
        while not self.is_done.is_set() and (left := seconds - sum(self.seconds().values())) > 0:
            self.is_done.wait(max(left, SHORT))
        return self.is_done.is_set()

    def seconds(self) -> dict[int, float]:
        """Seconds of processor time by request id, the running job included."""
        found = dict(self._seconds)
        if self._thread is not None and not self.is_done.is_set():
            assert self._thread.ident is not None
            clock = time.pthread_getcpuclockid(self._thread.ident)
            found[self.running.request_id] = time.clock_gettime(clock) - self._began
        return found

    def lower_priority(self) -> None:
        """Lowers the priority of the thread, if it is still busy."""
        if self._thread is not None and not self.is_done.is_set():
            assert self._thread.native_id is not None
            with suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id, LOWEST_PRIORITY)


def _work(queue: SimpleQueue[_Jobs | None]) -> None:
    while (group := queue.get()) is not None:
        group.work()
        del group  # a waiting thread keeps no engine alive


def _slow_requests(groups: Sequence[_Jobs]) -> list[int]:
    """Waits for the groups. Returns the ids of the requests to give up; none if all are done in
    time."""
    if all(group.wait() for group in groups):
        return []
    for group in groups:
        group.stop()
    seconds = sum((Counter(group.seconds()) for group in groups), Counter[int]())
    requests = [request for group in groups for request, _ in group.jobs]
    of_grammar = defaultdict[int, list[int]](list)
    for request in requests:
        of_grammar[_grammar(request)].append(request.request_id)
    slow = max(of_grammar.values(), key=lambda ids: sum(seconds[i] for i in ids))
    for group in groups:
        if group.running.request_id not in slow and not group.wait(2):
            slow = slow + of_grammar[_grammar(group.running)]
    return slow


def _grammar(request: LlmRequest) -> int:
    """The same number for all requests of a grammar."""
    assert request.grammar is not None
    return id(request.grammar.compiled or request.grammar)
