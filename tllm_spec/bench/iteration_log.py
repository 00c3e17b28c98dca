"""The file of `--iteration_log`: the statistics of every round, one JSON object a line."""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

# Arguments of LLM. The log is read at the end of the run, so no round may be dropped before.
COLLECT_ROUNDS: Mapping[str, Any] = {"enable_iter_perf_stats": True, "max_stats_len": sys.maxsize}


def as_lines(rounds: Iterable[Mapping[str, Any]]) -> str:
    """rounds: what `LLM.get_stats` has returned."""
    return "".join(json.dumps(each) + "\n" for each in rounds)
