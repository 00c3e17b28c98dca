"""A cost model of decoding rounds on one and several H200: bytes read, FLOPs, and collectives by
latency and bandwidth. It needs no GPU; `docs/scaling.md` explains it.

    python -m benchmarks.scaling_model [check] [plain] [eagle3]

check    one device, next to the rounds measured in benchmarks/results
plain    milliseconds of a plain round on 1 to 16 devices
eagle3   tokens per second of one request with EAGLE-3, and its best draft length
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness.report import table
from benchmarks.harness.scaling_shapes import LLAMA_8B, QWEN3_30B, SHAPES, V3_STYLE, Shape

RESULTS = Path(__file__).parent / "results"

# Of an H200, fitted to the rounds of one device (`check`): bytes per second, seconds and bf16 FLOPs
# per second; FP8 has twice these. Bytes for weights and KV cache.
WEIGHT_BANDWIDTH = 4.26e12
KV_BANDWIDTH = 3.8e12
LATENT_BANDWIDTH = 2.0e12  # of latents, which every head reads
LAYER_SECONDS = 21.9e-6  # of a layer's launches and small kernels
EXPERT_SECONDS = 12.6e-6  # of a router and the order of its tokens
LATENT_SECONDS = 14.7e-6  # of a layer's projections to latents and back
ROW_SECONDS = 5.6e-6  # of a row of logits: choosing a token
FLOPS = 0.848e15
MEMORY = 130e9
# Assumptions, not measured here. Latency of a small all-reduce in a CUDA graph, and bytes per
# second that a device sends, within a host of 8 (NVLink) and between hosts (InfiniBand).
HOST_SIZE = 8
NVLINK_SECONDS, NVLINK_BANDWIDTH = 9e-6, 350e9
NETWORK_SECONDS, NETWORK_BANDWIDTH = 25e-6, 45e9
ACCEPTANCE = 0.7  # of a draft, after accepted ones


def gemm_seconds(elements: float, rows: float, weight_bytes: int) -> float:
    """Reading weights and multiplying overlap, but not fully where they take the same time."""
    reading = elements * weight_bytes / WEIGHT_BANDWIDTH
    multiplying = 2 * elements * rows / (FLOPS * (2 if weight_bytes == 1 else 1))
    return float((reading**2 + multiplying**2) ** 0.5)


def all_reduce_seconds(num_bytes: float, devices: int) -> float:
    """Within a host one step, or a ring where that is shorter; between hosts a ring of hosts on
    top."""
    local = min(devices, HOST_SIZE)
    if local == 1:
        return 0.0
    one_step = NVLINK_SECONDS + (local - 1) * num_bytes / NVLINK_BANDWIDTH
    ring = 2 * NVLINK_SECONDS + 2 * (local - 1) / local * num_bytes / NVLINK_BANDWIDTH
    seconds, hosts = min(one_step, ring), devices // local
    if hosts > 1:
        sent = 2 * (hosts - 1) / hosts * num_bytes / local
        seconds += NETWORK_SECONDS + sent / NETWORK_BANDWIDTH
    return seconds


@lru_cache
def hit_experts(experts: int, top_k: int, rows: int, parts: int) -> float:
    """The most experts that a part of them has to read, on average over random routings."""
    noise, most = random.Random(0), []
    for _ in range(4):
        hit = {expert for _ in range(rows) for expert in noise.sample(range(experts), top_k)}
        size = experts // parts
        most.append(max(sum(each // size == part for each in hit) for part in range(parts)))
    return mean(most)


def round_seconds(
    shape: Shape,
    batch: int,
    window: int,
    context: float,
    devices: int,
    expert_parts: int = 1,
    hit: float | None = None,
) -> float:
    """A forward of the target over `batch` windows, and sampling. A part of the experts is sliced
    over devices / expert_parts devices. hit: the experts that a part reads, if that was counted."""
    rows, size = batch * window, shape.weight_bytes
    kv = batch * context * shape.kv_bytes / min(devices, shape.kv_parts)
    kv /= LATENT_BANDWIDTH if shape.is_latent else KV_BANDWIDTH
    layer = LAYER_SECONDS + shape.is_latent * LATENT_SECONDS + kv
    layer += gemm_seconds(shape.attention / devices, rows, size)
    dense = gemm_seconds(shape.mlp / devices, rows, size)
    sparse = 0.0
    if shape.experts:
        hit = hit or hit_experts(shape.experts, shape.top_k, rows, expert_parts)
        read = hit * shape.expert / (devices / expert_parts)
        rows_of_expert = rows * shape.top_k / expert_parts / hit
        sparse = EXPERT_SECONDS + gemm_seconds(read, rows_of_expert, size)
        sparse += gemm_seconds(shape.shared / devices, rows, size)
    summed = all_reduce_seconds(2 * rows * shape.hidden, devices)
    seconds = shape.layers * (layer + 2 * summed) + shape.sparse_layers * sparse
    seconds += summed  # of embeddings
    seconds += (shape.layers - shape.sparse_layers) * dense
    return seconds + _output_seconds(shape, shape.vocab, rows, devices)


def _output_seconds(shape: Shape, vocab: int, rows: int, devices: int) -> float:
    """The output layer (bf16), the choice of tokens, and the exchange of each rank's best, 8 bytes
    a row."""
    exchanged = all_reduce_seconds(8 * rows, devices)
    seconds = gemm_seconds(vocab * shape.hidden / devices, rows, 2)
    return seconds + exchanged + rows * ROW_SECONDS * vocab / 128256


def eagle3_seconds(
    shape: Shape, batch: int, draft_len: int, context: float, devices: int, expert_parts: int = 1
) -> float:
    """A round: the target's, then the head's steps, whose layer is sharded as the target's are."""
    target = round_seconds(shape, batch, draft_len + 1, context, devices, expert_parts)
    if not draft_len:
        return target
    rows = batch * (draft_len + 1)
    fuse = gemm_seconds(shape.head_fc, rows, 2)
    first, step = (_head_seconds(shape, each, batch, context, devices) for each in (rows, batch))
    return target + fuse + first + (draft_len - 1) * step


def _head_seconds(shape: Shape, rows: int, batch: int, context: float, devices: int) -> float:
    kv = batch * context * shape.kv_bytes / min(devices, shape.kv_parts) / KV_BANDWIDTH
    layer = 2 * LAYER_SECONDS + kv + gemm_seconds(shape.head_layer / devices, rows, 2)
    sums = 3 * all_reduce_seconds(2 * rows * shape.hidden, devices)  # with the embeddings'
    return layer + sums + _output_seconds(shape, shape.head_vocab, batch, devices)


@dataclass(frozen=True)
class Checked:
    """A measured round, in milliseconds, and what the model says."""

    what: str
    batch: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


CHECK_CONTEXT = 1150  # prompts of 1,024 tokens, in the middle of the timed rounds


def checked() -> Iterator[Checked]:
    yield from _checked_llama()
    yield from _checked_table()
    yield from _checked_experts("moe", "rounds", QWEN3_30B, 0)
    yield from _checked_experts("deepseek", "plain", V3_STYLE, 1)


def _checked_llama() -> Iterator[Checked]:
    """Of the 8B shape, from `benchmarks.h200`: plain rounds, and one-model EAGLE-3."""
    for figure in _results("h200")["figures"]:
        found = re.match(r"(plain|EAGLE-3 K=(\d)) round, batch (\d+)", figure["name"])
        if found:
            draft_len, batch = int(found[2] or 0), int(found[3])
            context = figure["details"]["context"]
            seconds = eagle3_seconds(LLAMA_8B, batch, draft_len, context, 1)
            yield Checked(f"{LLAMA_8B.name}, {found[1]}", batch, figure["value"], 1e3 * seconds)


def _checked_table() -> Iterator[Checked]:
    """The means of the tables of `benchmarks.rounds`."""
    for name, subject in _results("rounds").items():
        found: dict[tuple[str, int], list[float]] = {}
        for row in subject["rows"]:
            path = "plain" if name == "zero_drafts" else row["path"]
            found.setdefault((path, row["batch_size"]), []).append(row["ms"])
        for (path, batch), ms in found.items():
            draft_len = 0 if path == "plain" else 3
            seconds = eagle3_seconds(LLAMA_8B, batch, draft_len, CHECK_CONTEXT, 1)
            what = f"{LLAMA_8B.name}, {path}, {name.replace('_', ' ')}"
            yield Checked(what, batch, mean(ms), 1e3 * seconds)


def _checked_experts(file: str, subject: str, shape: Shape, shared: int) -> Iterator[Checked]:
    """With the experts that were really hit, of which `shared` are the shared one."""
    for row in _results(file)[subject]["rows"]:
        if found := re.match(r"batch (\d+)(.*)", row["what"]):
            batch, hit = int(found[1]), row["hit"] - shared
            seconds = round_seconds(shape, batch, 1, CHECK_CONTEXT, 1, hit=hit)
            yield Checked(f"{shape.name}{found[2]}", batch, row["value"], 1e3 * seconds)


def _results(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{file}.json").read_text())
    return found


def check_lines() -> list[str]:
    cells = [
        [
            each.what,
            str(each.batch),
            f"{each.measured:.2f}",
            f"{each.predicted:.2f}",
            f"{each.error:+.0%}",
        ]
        for each in checked()
    ]
    return table(("round", "batch", "measured, ms", "model, ms", "error"), cells)


CONTEXT = 2048
DEVICES = (1, 2, 4, 8, 16)
BATCHES = (1, 32, 128)


def _fits(shape: Shape, devices: int, batch: int) -> bool:
    kv = batch * CONTEXT * shape.layers * shape.kv_bytes / min(devices, shape.kv_parts)
    return shape.total_bytes / devices + kv < MEMORY


def _parts(shape: Shape, devices: int) -> tuple[int, ...]:
    """Ways of dividing the experts."""
    return (1, devices) if shape.experts and devices > 1 else (1,)


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
    if not _fits(shape, devices, batch):
        return "–"
    found = {
        parts: 1e3 * round_seconds(shape, batch, 1, CONTEXT, devices, parts)
        for parts in _parts(shape, devices)
    }
    best = min(found, key=lambda parts: found[parts])
    kind = f" {'tp' if best == 1 else 'ep'}" if len(found) > 1 else ""
    return f"{found[best]:.2f}{kind}"


def tokens_per_round(draft_len: int) -> float:
    return float(sum(ACCEPTANCE**length for length in range(draft_len + 1)))


def best_draft_len(shape: Shape, batch: int, devices: int) -> tuple[int, float]:
    """Draft length of at most 8 with the most tokens per second, and these for each request."""
    speeds = {
        (draft_len, parts): tokens_per_round(draft_len)
        / eagle3_seconds(shape, batch, draft_len, CONTEXT, devices, parts)
        for draft_len in range(9)
        for parts in _parts(shape, devices)
    }
    best = max(speeds, key=lambda key: speeds[key])
    return best[0], speeds[best]


def eagle3_lines() -> list[str]:
    """Tokens per second and request, and the draft length."""
    cells = []
    for shape in SHAPES:
        for batch in BATCHES:
            row = [shape.name, str(batch)]
            for devices in DEVICES:
                if not _fits(shape, devices, batch):
                    row.append("–")
                    continue
                draft_len, speed = best_draft_len(shape, batch, devices)
                row.append(f"{speed:.0f} (K={draft_len})")
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
