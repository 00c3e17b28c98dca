"""What the cost model of `benchmarks.harness.cost_model` says of one and several H200. It needs no
GPU; `docs/scaling.md` explains it.

    python -m benchmarks.scaling_model [check] [plain] [eagle3]

check    next to the rounds in benchmarks/results: on one, four and eight H200, and on one and two
          H100
plain    milliseconds of a plain round on 1 to 16 devices
eagle3   tokens per second of one request with EAGLE-3, and its best draft length
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import inf
from statistics import mean

from benchmarks.harness.cost_model import H100, H200, CostModel
from benchmarks.harness.report import Options, Row, Subject, load, main, numbers, table
from benchmarks.harness.scaling_shapes import (
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_70B_HALF,
    QWEN3_30B,
    QWEN3_235B_PART,
    SHAPES,
    V3_STYLE,
    Shape,
)

CONTEXT, DEVICES, BATCHES = 2048, (1, 2, 4, 8, 16), (1, 32, 128)
ACCEPTANCE = 0.7  # of a draft, after accepted ones


@dataclass(frozen=True)
class Checked:
    """A measured round, in milliseconds, and what the model says. `device`: the kind."""

    what: str
    batch: int
    measured: float
    predicted: float
    devices: int = 1
    device: str = "H200"

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


ON_SEVERAL = {  # by the name of a job
    "llama-8b": LLAMA_8B,
    "llama-70b": LLAMA_70B,
    "llama-70b of 40 layers": LLAMA_70B_HALF,
    "V3-style": V3_STYLE,
    "qwen3-235b of 61 layers": QWEN3_235B_PART,
}
OLDER_SUMS = ("e74b9bf", "ace7060", "79a355d", "c8e0333e")  # commits of measured rounds
KINDS = {"NVIDIA H100 80GB HBM3": ("H100", H100), "NVIDIA H200": ("H200", H200)}
CHECK_CONTEXT = 1150  # prompts of 1,024 tokens, in the middle of the timed rounds


def checked() -> Iterator[Checked]:
    yield from _checked_llama()
    yield from _checked_table()
    yield from _checked_experts("qwen3", QWEN3_30B, 0)
    yield from _checked_experts("v3", V3_STYLE, 1)


def _checked_llama() -> Iterator[Checked]:
    """Rounds of the 8B shape, from `benchmarks.h200`: plain rounds, and one-model EAGLE-3."""
    for figure in load("h200")["figures"]:
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
        for row in load("rounds")[name]["rows"]:
            path = "plain" if name == "zero_drafts" else row["path"]
            found.setdefault((path, row["batch_size"]), []).append(row["ms"])
        for (path, batch), ms in found.items():
            draft_len = 0 if path == "plain" else 3
            seconds = H200.eagle3_seconds(LLAMA_8B, batch, draft_len, CHECK_CONTEXT, 1)
            what = f"{LLAMA_8B.name}, {path}, {name.replace('_', ' ')}"
            yield Checked(what, batch, mean(ms), 1e3 * seconds)


def _checked_experts(subject: str, shape: Shape, shared: int) -> Iterator[Checked]:
    """With the experts that were really hit, of which `shared` are the shared one."""
    for row in load("experts")[subject]["rows"]:
        if found := re.match(r"batch (\d+)(.*)", row["what"]):
            batch, hit = int(found[1]), row["hit"] - shared
            seconds = H200.round_seconds(shape, batch, 1, CHECK_CONTEXT, 1, hit=hit)
            yield Checked(f"{shape.name}{found[2]}", batch, row["value"], 1e3 * seconds)


def checked_on_several() -> Iterator[Checked]:
    """Rounds of `benchmarks.several_devices` on one and two H100 and on four and eight H200, but
    for those whose sums were not chosen by size."""
    for file in ("several_devices", "several_devices_ranks_4", "several_devices_ranks_8"):
        for subject in load(file).values():
            about = subject["about"]
            for row in (row for row in subject["rows"] if "ms" in row):
                job, kind, *fixed_sums = row["job"].split(", ")
                name, model = KINDS[about["device"]]
                if row.get("commit", about["commit"]) in OLDER_SUMS:
                    model = replace(model, two_shot_seconds=inf, one_shot_hidden=0.0)
                if not fixed_sums:
                    yield _checked_on_several(row, ON_SEVERAL[job], kind, name, model)


def _checked_on_several(row: Row, shape: Shape, kind: str, name: str, model: CostModel) -> Checked:
    batch, devices = row["batch"], row["ranks"]
    draft_len = int(kind.partition("K=")[2] or 0)
    parts = devices if kind == "ep" else 1
    seconds = model.eagle3_seconds(shape, batch, draft_len, row["context"], devices, parts)
    return Checked(f"{shape.name}, {kind}", batch, row["ms"], 1e3 * seconds, devices, name)


def check(options: Options) -> Iterator[Row]:
    yield from map(asdict, (*checked(), *checked_on_several()))


def check_table(rows: Sequence[Row]) -> list[str]:
    """A line for the batch sizes of each kind of round."""
    kinds: dict[tuple[str, str], list[Checked]] = {}
    for each in (Checked(**row) for row in rows):
        kinds.setdefault((f"{each.devices} {each.device}", each.what), []).append(each)
    cells = [
        [
            *(what, devices, numbers(each.batch for each in found)),
            numbers(each.measured for each in found),
            numbers(each.predicted for each in found),
            " / ".join(f"{each.error:+.0%}" for each in found),
        ]
        for (devices, what), found in kinds.items()
    ]
    titles = ("round", "devices", "batch", "measured, ms", "model, ms", "error")
    return table(titles, cells)


def _fitting_parts(shape: Shape, devices: int, batch: int) -> tuple[int, ...]:
    """Ways of dividing the experts that fit the memory."""
    kv = batch * CONTEXT * shape.layers * shape.kv_bytes / min(devices, shape.kv_parts)
    ways = {1, devices} if shape.experts else {1}
    return tuple(
        parts
        for parts in sorted(ways)
        if shape.total_bytes(devices // parts) / devices + kv < H200.memory
    )


def plain_cell(shape: Shape, batch: int, devices: int) -> str:
    """Milliseconds; with experts, the better of slices (tp) and parts (ep)."""
    found = {
        parts: 1e3 * H200.round_seconds(shape, batch, 1, CONTEXT, devices, parts)
        for parts in _fitting_parts(shape, devices, batch)
    }
    if not found:
        return "–"
    best = min(found, key=lambda parts: found[parts])
    kind = f" {'tp' if best == 1 else 'ep'}" if shape.experts and devices > 1 else ""
    return f"{found[best]:.2f}{kind}"


def eagle3_cell(shape: Shape, batch: int, devices: int) -> str:
    """Tokens per second and request, and the draft length of at most 8 that has the most."""
    speeds = {
        (draft_len, parts): sum(ACCEPTANCE**length for length in range(draft_len + 1))
        / H200.eagle3_seconds(shape, batch, draft_len, CONTEXT, devices, parts)
        for draft_len in range(9)
        for parts in _fitting_parts(shape, devices, batch)
    }
    best = max(speeds, key=lambda key: speeds[key], default=None)
    return "–" if best is None else f"{speeds[best]:.0f} (K={best[0]})"


def subject(name: str, title: str, cell: Callable[[Shape, int, int], str]) -> Subject:
    def run(options: Options) -> Iterator[Row]:
        for shape, batch in product(SHAPES, BATCHES):
            cells = [cell(shape, batch, devices) for devices in DEVICES]
            yield {"model": shape.name, "batch": batch, "cells": cells}

    def lines(rows: Sequence[Row]) -> list[str]:
        cells = [[row["model"], str(row["batch"]), *row["cells"]] for row in rows]
        return table(("model", "batch", *map(str, DEVICES)), cells)

    return Subject(name, title, run, lines)


SUBJECTS = (
    Subject("check", "Measured rounds, and the model", check, check_table),
    subject("plain", "Milliseconds of a plain round by devices", plain_cell),
    subject("eagle3", "Tokens per second of a request with EAGLE-3 by devices", eagle3_cell),
)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
