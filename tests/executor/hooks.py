"""Where tests look on while an executor runs. Only this file knows how its loop is made."""

from collections.abc import Callable
from typing import Any

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.py_executor import PyExecutor
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.rounds.round_reader import LaunchedRound


def before_launch(executor: PyExecutor, look: Callable[[ScheduledBatch], None]) -> None:
    """Calls `look` with each batch before its round is launched."""
    runner: Any = executor.parts.runner
    launch = runner.launch

    def watched(batch: ScheduledBatch) -> LaunchedRound:
        look(batch)
        launched: LaunchedRound = launch(batch)
        return launched

    runner.launch = watched


def around_reads(
    executor: PyExecutor, look: Callable[[LaunchedRound], Callable[[], None] | None]
) -> None:
    """Calls `look` with each round before the host reads it, and what that returns afterwards."""
    loop: Any = executor
    update = loop._update_requests

    def watched(launched: LaunchedRound) -> Any:
        afterwards = look(launched)
        responding = update(launched)
        if afterwards is not None:
            afterwards()
        return responding

    loop._update_requests = watched


def before_preemptions(executor: PyExecutor, look: Callable[[LlmRequest], None]) -> None:
    """Calls `look` with each request before it is preempted."""
    scheduler: Any = executor.scheduler
    preempt = scheduler._preempt

    def watched(victim: LlmRequest, *others: Any) -> None:
        look(victim)
        preempt(victim, *others)

    scheduler._preempt = watched


def rounds_in_flight(executor: PyExecutor) -> list[LaunchedRound]:
    """The oldest first."""
    return list(executor._in_flight)
