"""What the cost model of `benchmarks.harness.cost_model` says of one and several H200. It needs no
GPU; `docs/scaling.md` explains it.

    python -m benchmarks.scaling_model [check] [plain] [eagle3]

check    next to the rounds measured in benchmarks/results: on one H200, on one and two H100
plain    milliseconds of a plain round on 1 to 16 devices
eagle3   tokens per second of one request with EAGLE-3, and its best draft length
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness.cost_model import H100, H200
from benchmarks.harness.report import table
from benchmarks.harness.scaling_shapes import (
    LLAMA_8B,
    LLAMA_70B_HALF,
    QWEN3_30B,
    SHAPES,
    V3_STYLE,
    Shape,
)

RESULTS = Path(__file__).parent / "results"

ACCEPTANCE = 0.7  # of a draft, after accepted ones


@dataclass(frozen=True)
class Checked:
    """A measured round, in milliseconds, and what the model says."""

    what: str
    batch: int
    measured: float
    predicted: float
    devices: int = 1

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


ON_H100 = {  # by the name of a job
    "llama-8b": LLAMA_8B,
    "llama-70b of 40 layers": LLAMA_70B_HALF,
    "V3-style": V3_STYLE,
}
CHECK_CONTEXT = 1150  # prompts of 1,024 tokens, in the middle of the timed rounds


def checked() -> Iterator[Checked]:
    yield from _checked_llama()
    yield from _checked_table()
    yield from _checked_experts("qwen3", QWEN3_30B, 0)
    yield from _checked_experts("v3", V3_STYLE, 1)


def _checked_llama() -> Iterator[Checked]:
    """Of the 8B shape, from `benchmarks.h200`: plain rounds, and one-model EAGLE-3."""
    for figure in _results("h200")["figures"]:
        found = re.match(r"(plain|EAGLE-3 K=(\d)) round, batch (\d+)", figure["name"])
        if found:
            draft_len, batch = int(found[2] or 0), int(found[3])
            context = figure["details"]["context"]
            seconds = H200.eagle3_seconds(LLAMA_8B, batch, draft_len, context, 1)
            yield Checked(f"{LLAMA_8B.name}, {found[1]}", batch, figure["value"], 1e3 * seconds)


def _checked_table() -> Iterator[Checked]:
    """The means of the tables of `benchmarks.rounds`."""
    for name in ("zero_drafts", "sampling_params", "deterministic"):
        found: dict[tuple[str, int], list[float]] = {}
        for row in _results("rounds")[name]["rows"]:
            path = "plain" if name == "zero_drafts" else row["path"]
            found.setdefault((path, row["batch_size"]), []).append(row["ms"])
        for (path, batch), ms in found.items():
            draft_len = 0 if path == "plain" else 3
            seconds = H200.eagle3_seconds(LLAMA_8B, batch, draft_len, CHECK_CONTEXT, 1)
            what = f"{LLAMA_8B.name}, {path}, {name.replace('_', ' ')}"
            yield Checked(what, batch, mean(ms), 1e3 * seconds)


def _checked_experts(subject: str, shape: Shape, shared: int) -> Iterator[Checked]:
    """With the experts that were really hit, of which `shared` are the shared one."""
    for row in _results("experts")[subject]["rows"]:
        if found := re.match(r"batch (\d+)(.*)", row["what"]):
            batch, hit = int(found[1]), row["hit"] - shared
            seconds = H200.round_seconds(shape, batch, 1, CHECK_CONTEXT, 1, hit=hit)
            yield Checked(f"{shape.name}{found[2]}", batch, row["value"], 1e3 * seconds)


def checked_on_h100() -> Iterator[Checked]:
    """Of `benchmarks.several_devices`, without the rounds whose sums were not chosen by size."""
    found = _results("several_devices")
    rows = [row for subject in found.values() for row in subject["rows"] if "ms" in row]
    for row in rows:
        model, kind, *fixed = row["job"].split(", ")
        if fixed or model not in ON_H100:
            continue
        shape, batch, context, devices = ON_H100[model], row["batch"], row["context"], row["ranks"]
        draft_len = int(kind.partition("K=")[2] or 0)
        parts = devices if kind == "ep" else 1
        seconds = H100.eagle3_seconds(shape, batch, draft_len, context, devices, parts)
        yield Checked(f"{shape.name}, {kind}, H100", batch, row["ms"], 1e3 * seconds, devices)


def _results(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{file}.json").read_text())
    return found


def check_lines() -> list[str]:
    cells = [
        [
            each.what,
            str(each.devices),
            str(each.batch),
            f"{each.measured:.2f}",
            f"{each.predicted:.2f}",
            f"{each.error:+.0%}",
        ]
        for each in (*checked(), *checked_on_h100())
    ]
    return table(("round", "devices", "batch", "measured, ms", "model, ms", "error"), cells)


CONTEXT = 2048
DEVICES = (1, 2, 4, 8, 16)
BATCHES = (1, 32, 128)


def _fitting_parts(shape: Shape, devices: int, batch: int) -> tuple[int, ...]:
    """Ways of dividing the experts that fit the memory."""
    kv = batch * CONTEXT * shape.layers * shape.kv_bytes / min(devices, shape.kv_parts)
    ways = {1, devices} if shape.experts else {1}
    return tuple(
        parts
        for parts in sorted(ways)
        if shape.total_bytes(devices // parts) / devices + kv < H200.memory
    )


def plain_lines() -> list[str]:
    """Milliseconds; with experts, the better of slices (tp) and parts (ep)."""
    cells = []
    for shape in SHAPES:
        for batch in BATCHES:
            row = [shape.name, str(batch)]
            for devices in DEVICES:
                row.append(_plain_cell(shape, batch, devices))
            cells.append(row)
    return table(("model", "batch", *map(str, DEVICES)), cells)


def _plain_cell(shape: Shape, batch: int, devices: int) -> str:
    found = {
        parts: 1e3 * H200.round_seconds(shape, batch, 1, CONTEXT, devices, parts)
        for parts in _fitting_parts(shape, devices, batch)
    }
    if not found:
        return "–"
    best = min(found, key=lambda parts: found[parts])
    kind = f" {'tp' if best == 1 else 'ep'}" if shape.experts and devices > 1 else ""
    return f"{found[best]:.2f}{kind}"


def tokens_per_round(draft_len: int) -> float:
    return float(sum(ACCEPTANCE**length for length in range(draft_len + 1)))


def best_draft_len(shape: Shape, batch: int, devices: int) -> tuple[int, float] | None:
    """Draft length of at most 8 with the most tokens per second, and these for each request; None:
    the weights do not fit."""
    speeds = {
        (draft_len, parts): tokens_per_round(draft_len)
        / H200.eagle3_seconds(shape, batch, draft_len, CONTEXT, devices, parts)
        for draft_len in range(9)
        for parts in _fitting_parts(shape, devices, batch)
    }
    best = max(speeds, key=lambda key: speeds[key], default=None)
    return None if best is None else (best[0], speeds[best])


def eagle3_lines() -> list[str]:
    """Tokens per second and request, and the draft length."""
    cells = []
    for shape in SHAPES:
        for batch in BATCHES:
            row = [shape.name, str(batch)]
            for devices in DEVICES:
                best = best_draft_len(shape, batch, devices)
                row.append("–" if best is None else f"{best[1]:.0f} (K={best[0]})")
            cells.append(row)
    return table(("model", "batch", *map(str, DEVICES)), cells)


SUBJECTS = {"check": check_lines, "plain": plain_lines, "eagle3": eagle3_lines}


def main(names: list[str]) -> int:
    if unknown := set(names) - SUBJECTS.keys():
        print(f"{min(unknown)} is not one of {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    for name in names or SUBJECTS:
        print(f"{name}\n", *SUBJECTS[name](), "", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
