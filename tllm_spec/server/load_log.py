"""One line a second about what the engine does, while it does something."""

from __future__ import annotations

import logging
from time import monotonic

from tllm_spec.executor.py_executor import Load

logger = logging.getLogger("tllm_spec.load")


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
        logger.info(
            "%(tokens_per_second).0f tokens/s, %(running)d running, %(waiting)d waiting, "
            "acceptance length %(acceptance_length)s, draft length %(draft_len)s",
            {name: "-" if value is None else value for name, value in fields.items()},
            extra={"fields": fields},
        )
