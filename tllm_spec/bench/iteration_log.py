"""The file of `--iteration_log`: the statistics of every round, one JSON object a line."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Arguments of LLM. The log is read at the end of the run, so no round may be dropped before.
COLLECT_ROUNDS: Mapping[str, Any] = {"enable_iter_perf_stats": True, "max_stats_len": sys.maxsize}


def write_rounds(path: Path, rounds: Iterable[Mapping[str, Any]]) -> None:
    """Writes what `LLM.get_stats` has returned."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rounds), encoding="utf-8")
