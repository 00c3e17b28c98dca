"""A cost model of decoding rounds on one and several H200: bytes read, FLOPs, and collectives by
latency and bandwidth. It needs no GPU; `docs/scaling.md` explains it.

    python -m benchmarks.scaling_model [check] [plain] [eagle3]

check    one device, next to the rounds measured in benchmarks/results/rounds.json
plain    milliseconds of a plain round on 1 to 16 devices
eagle3   tokens per second of one request with EAGLE-3, and its best draft length
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import mean

from benchmarks.harness.report import table

RESULTS = Path(__file__).parent / "results" / "rounds.json"

# Of an H200, fitted to the rounds of one device (`check`): bytes per second, seconds and bf16 FLOPs
# per second; FP8 has twice these. Bytes for weights and KV cache.
WEIGHT_BANDWIDTH = 4.0e12
KV_BANDWIDTH = 4.0e12
LAYER_SECONDS = 12e-6  # of a layer's launches and small kernels
ROW_SECONDS = 4.7e-6  # of a row of logits: choosing a token
FLOPS = 0.78e15
MEMORY = 130e9
# Assumptions, not measured here. Latency of a small all-reduce in a CUDA graph, and bytes per
# second that a device sends, within a host of 8 (NVLink) and between hosts (InfiniBand).
HOST_SIZE = 8
NVLINK_SECONDS, NVLINK_BANDWIDTH = 9e-6, 350e9
NETWORK_SECONDS, NETWORK_BANDWIDTH = 25e-6, 45e9
ACCEPTANCE = 0.7  # of a draft, after accepted ones


@dataclass(frozen=True)
class Shape:
    """Elements; bytes of a weight's element. `attention`: of a layer's matrices. `mlp`: of a layer
    without experts. `expert`: of one; `shared`: of what every token takes next to them.
    `kv_bytes`: of a token in a layer; `kv_parts`: the most devices that can divide it."""

    name: str
    layers: int
    hidden: int
    vocab: int
    attention: float
    mlp: float
    kv_bytes: int
    kv_parts: int
    weight_bytes: int = 2
    dense_layers: int = 0  # of a model with experts
    experts: int = 0
    top_k: int = 0
    expert: float = 0
    shared: float = 0
    # The EAGLE-3 head: its fusion, its layer, and its vocabulary.
    head_fc: float = 0
    head_layer: float = 0
    head_vocab: int = 32000

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def total_bytes(self) -> float:
        dense = self.layers * self.attention + (self.layers - self.sparse_layers) * self.mlp
        sparse = self.sparse_layers * (self.experts * self.expert + self.shared)
        return self.weight_bytes * (dense + sparse) + 4 * self.vocab * self.hidden


def llama(name: str, layers: int, hidden: int, inner: int, heads: int, **options: int) -> Shape:
    """With 8 KV heads of 128, a head like a layer with twice the input, and 128,256 tokens."""
    kv, mlp = 1024, 3 * hidden * inner
    attention = hidden * (heads * 128 + 2 * kv) + heads * 128 * hidden
    head = 2 * hidden * (heads * 128 + 2 * kv) + heads * 128 * hidden + mlp
    sizes = {"attention": attention, "mlp": mlp, "head_fc": 3 * hidden**2, "head_layer": head}
    return Shape(name, layers, hidden, 128256, kv_bytes=4 * kv, kv_parts=8, **sizes, **options)


LLAMA_8B = llama("Llama 3.1 8B, bf16", 32, 4096, 14336, 32)
SHAPES = (
    LLAMA_8B,
    llama("Llama 3.3 70B, bf16", 80, 8192, 28672, 64),
    Shape(
        "Qwen3 235B-A22B, FP8",
        *(94, 4096, 151936),
        attention=4096 * (8192 + 1024) + 8192 * 4096,
        mlp=0,
        kv_bytes=4 * 512,
        kv_parts=4,
        weight_bytes=1,
        experts=128,
        top_k=8,
        expert=3 * 4096 * 1536,
        head_fc=3 * 4096**2,
        head_layer=2 * 4096 * 9216 + 8192 * 4096 + 3 * 4096 * 12288,
    ),
    Shape(
        "DeepSeek V3, FP8",
        *(61, 7168, 129280),
        attention=187e6,
        mlp=3 * 7168 * 18432,
        kv_bytes=2 * 576,
        kv_parts=1,
        weight_bytes=1,
        dense_layers=3,
        experts=256,
        top_k=8,
        expert=3 * 7168 * 2048,
        shared=3 * 7168 * 2048,
        head_fc=3 * 7168**2,
        head_layer=2 * 7168 * 9216 + 8192 * 7168 + 3 * 7168 * 18432,
    ),
)


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
    shape: Shape, batch: int, window: int, context: int, devices: int, expert_parts: int = 1
) -> float:
    """A forward of the target over `batch` windows, and sampling. A part of the experts is sliced
    over devices / expert_parts devices."""
    rows, size = batch * window, shape.weight_bytes
    kv = batch * context * shape.kv_bytes / min(devices, shape.kv_parts) / KV_BANDWIDTH
    layer = LAYER_SECONDS + kv + gemm_seconds(shape.attention / devices, rows, size)
    dense = gemm_seconds(shape.mlp / devices, rows, size)
    sparse = 0.0
    if shape.experts:
        hit = hit_experts(shape.experts, shape.top_k, rows, expert_parts)
        read = hit * shape.expert / (devices / expert_parts)
        rows_of_expert = rows * shape.top_k / expert_parts / hit
        sparse = gemm_seconds(read, rows_of_expert, size)
        sparse += gemm_seconds(shape.shared / devices, rows, size)
    sums = 2 * all_reduce_seconds(2 * rows * shape.hidden, devices)
    seconds = shape.layers * (layer + sums) + shape.sparse_layers * sparse
    seconds += (shape.layers - shape.sparse_layers) * dense
    return seconds + _output_seconds(shape, shape.vocab, rows, devices)


def _output_seconds(shape: Shape, vocab: int, rows: int, devices: int) -> float:
    """The output layer (bf16), the gathering of its logits, and the choice of tokens."""
    gathered = all_reduce_seconds(rows * vocab * 2 / 2, devices)  # half of what a sum sends
    seconds = gemm_seconds(vocab * shape.hidden / devices, rows, 2)
    return seconds + gathered + rows * ROW_SECONDS * vocab / 128256


def eagle3_seconds(
    shape: Shape, batch: int, draft_len: int, context: int, devices: int, expert_parts: int = 1
) -> float:
    """A round: the target's, then the head's steps, whose layer is sharded as the target's are."""
    target = round_seconds(shape, batch, draft_len + 1, context, devices, expert_parts)
    if not draft_len:
        return target
    rows = batch * (draft_len + 1)
    fuse = gemm_seconds(shape.head_fc, rows, 2)
    first, step = (_head_seconds(shape, each, batch, context, devices) for each in (rows, batch))
    return target + fuse + first + (draft_len - 1) * step


def _head_seconds(shape: Shape, rows: int, batch: int, context: int, devices: int) -> float:
    kv = batch * context * shape.kv_bytes / min(devices, shape.kv_parts) / KV_BANDWIDTH
    layer = 2 * LAYER_SECONDS + kv + gemm_seconds(shape.head_layer / devices, rows, 2)
    sums = 2 * all_reduce_seconds(2 * rows * shape.hidden, devices)
    return layer + sums + _output_seconds(shape, shape.head_vocab, batch, devices)


def measured() -> Iterator[tuple[str, int, float]]:
    """Path, batch size and milliseconds of the 8B shape's rounds, of each table."""
    subjects = json.loads(RESULTS.read_text())
    for name in ("zero_drafts", "sampling_params", "deterministic"):
        found: dict[tuple[str, int], list[float]] = {}
        for row in subjects[name]["rows"]:
            path = "plain" if name == "zero_drafts" else row["path"]
            found.setdefault((path, row["batch_size"]), []).append(row["ms"])
        for (path, batch), ms in found.items():
            yield path, batch, mean(ms)


CHECK_CONTEXT = 1150  # prompts of 1,024 tokens, in the middle of the timed rounds


def predicted_ms(path: str, batch: int) -> float:
    if path == "plain":
        return 1e3 * round_seconds(LLAMA_8B, batch, 1, CHECK_CONTEXT, 1)
    return 1e3 * eagle3_seconds(LLAMA_8B, batch, 3, CHECK_CONTEXT, 1)


def check_lines() -> list[str]:
    cells = [
        [path, str(batch), f"{ms:.2f}", f"{predicted_ms(path, batch):.2f}"]
        for path, batch, ms in measured()
    ]
    return table(("path", "batch", "measured, ms", "model, ms"), cells)


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
