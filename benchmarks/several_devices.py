"""Rounds on one and on several GPUs of a host: milliseconds, sums, idle and host time, start-up.

    python -m benchmarks.several_devices [sums] [llama-8b] [llama-70b] [v3] [--ranks 1,2]
    python -m benchmarks.several_devices [v3-fp8] [qwen3-235b] --ranks 8 [--layers 48]
    python -m benchmarks.several_devices llama-70b --layers 40   # where one device is too small
    python -m benchmarks.several_devices llama-8b --device cpu   # tiny shapes: shows that it runs

sums       an all-reduce after a GEMM by size, with the addition to the residual stream: NCCL's,
           and one-shot and two-shot over the ranks' memory
llama-8b   plain rounds and EAGLE-3 with 3 drafts; on several ranks also with NCCL's sums, and with
           one-shot sums, for all sizes
llama-70b  both of Llama 3.3 70B's shape
v3         a DeepSeek-V3-style model: experts sliced over the ranks (tp), and divided (ep)
v3-fp8     DeepSeek V3's own shape with FP8 weights, of at most `--layers` layers, also with its MTP
           module and 3 drafts; eight GPUs of 141 GiB hold all 61 layers, of 80 GiB 48
qwen3-235b Qwen3-235B-A22B's shape: plain rounds, experts sliced and divided, and EAGLE-3

Random bf16 weights, prompts of 1,024 tokens, greedy, synthetic acceptance. Each row is a world of
its own. It needs an MPI with `mpiexec`. NVLink multicast is never used."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.harness.dummy_models import (
    DEEPSEEK_V3,
    QWEN3_235B,
    TINY_EAGLE3,
    TINY_LLAMA,
    TINY_V3,
    V3_STYLE,
)
from benchmarks.harness.models import EAGLE3_8B, LLAMA_8B, Config
from benchmarks.harness.rank_job import Job
from benchmarks.harness.report import Options, Row, Subject, main, number, table
from tllm_spec.distributed.mpirun import find_mpiexec

JOB_LIMIT_S = 170
DRAFT_LEN = 3
AS_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
LLAMA_70B: Config = {**LLAMA_8B, **AS_70B, "num_hidden_layers": 80}
EAGLE3_70B: Config = {**EAGLE3_8B, **AS_70B}
EAGLE3_235B: Config = {**EAGLE3_8B, "vocab_size": QWEN3_235B["vocab_size"]}
LARGE = {"v3-fp8": DEEPSEEK_V3, "qwen3-235b": QWEN3_235B}
FIXED_SUMS = ("NCCL", "one-shot")
WAYS = {"nccl_us": "NCCL, µs", "one_shot_us": "one-shot, µs", "two_shot_us": "two-shot, µs"}


def jobs(subject: str, ranks: int, is_full: bool, num_layers: int) -> Iterator[Job]:
    """num_layers: of the 70B shape, and at most so many of the larger ones."""
    tiny = {"device": "cpu", "batch_sizes": (1, 2), "prompt_len": 16, "room": 64, "rounds": 3}
    size = replace(Job("", ranks), **({} if is_full else tiny))
    if subject == "sums":
        if ranks > 1 and is_full:
            yield replace(size, name="sums", kind="sums")
        return
    if subject in LARGE and is_full:
        yield from _large(subject, size, num_layers)
        return
    if subject in ("v3", *LARGE):
        model = V3_STYLE if is_full else TINY_V3
        sizes = (1, 8, 64) if is_full else size.batch_sizes
        job = replace(size, model=model, batch_sizes=sizes)
        yield replace(job, name="V3-style, tp")
        if ranks > 1:
            yield replace(job, name="V3-style, ep", ep_size=ranks)
        return
    target, head = _llama(subject, is_full, num_layers)
    if num_layers < LLAMA_70B["num_hidden_layers"] and subject == "llama-70b":
        subject = f"{subject} of {num_layers} layers"
    # 70B's weights leave room for few contexts on one device.
    is_tight = subject.startswith("llama-70b") and ranks == 1
    sizes = (1, 8) if is_tight else (1, 8, 64)
    plain = replace(size, model=target, batch_sizes=sizes if is_full else size.batch_sizes)
    eagle3 = replace(plain, draft=head, draft_len=DRAFT_LEN)
    if is_tight:
        eagle3 = replace(eagle3, batch_sizes=plain.batch_sizes[:1])
    for name, job in (("plain", plain), (f"EAGLE-3 K={DRAFT_LEN}", eagle3)):
        yield replace(job, name=f"{subject}, {name}")
        if ranks > 1 and is_full and subject == "llama-8b":
            for sums in FIXED_SUMS:
                yield replace(job, name=f"{subject}, {name}, {sums}", sums=sums)


def _large(subject: str, size: Job, num_layers: int) -> Iterator[Job]:
    """Experts sliced over all ranks, and divided in two parts that are sliced; then drafts."""
    model = LARGE[subject]
    num_layers = min(num_layers, model["num_hidden_layers"])
    model = {**model, "num_hidden_layers": num_layers}
    plain = replace(size, model=model, batch_sizes=(1, 8, 64))
    name = f"{subject} of {num_layers} layers"
    yield replace(plain, name=f"{name}, tp")
    yield replace(plain, name=f"{name}, tp, ep 2", ep_size=2)
    head = EAGLE3_235B if subject == "qwen3-235b" else None
    drafter = "EAGLE-3" if head else "MTP"
    yield replace(plain, name=f"{name}, {drafter} K={DRAFT_LEN}", draft=head, draft_len=DRAFT_LEN)


def _llama(subject: str, is_full: bool, num_layers: int) -> tuple[Config, Config]:
    if not is_full:
        return TINY_LLAMA, TINY_EAGLE3
    if subject == "llama-8b":
        return LLAMA_8B, EAGLE3_8B
    return {**LLAMA_70B, "num_hidden_layers": num_layers}, EAGLE3_70B


def run_job(job: Job) -> list[Row]:
    """Rows of a world, or one that says why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        text = json.dumps(asdict(replace(job, started=time.monotonic())))
        program = ["-m", "benchmarks.harness.rank_job", text, str(results)]
        command = [sys.executable, *program]
        if job.ranks > 1:
            mpiexec = find_mpiexec() or sys.exit("no mpiexec: pip install 'tllm_spec[parallel]'")
            command = [mpiexec, "-n", str(job.ranks), sys.executable, "-m", "mpi4py", *program]
        try:
            status = subprocess.run(command, timeout=JOB_LIMIT_S, env=_environment()).returncode
        except subprocess.TimeoutExpired:
            status = -1
        rows = list(map(json.loads, results.read_text().splitlines())) if results.exists() else []
    failed = [{"job": job.name, "ranks": job.ranks, "status": status}] if status else []
    return rows + failed


def _environment() -> dict[str, str]:
    """Open MPI refuses root unless it is told twice."""
    as_root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    return {**os.environ, **dict.fromkeys(as_root, "1")}


def tables(rows: Sequence[Row]) -> list[str]:
    """Sums by size; rounds by job and batch size; a line for each job that failed."""
    by_size = [row for row in rows if "bytes" in row]
    ways = [way for way in WAYS if any(way in row for row in by_size)]
    sums = [
        [str(row["ranks"]), f"{row['bytes']:,}", *(number(row.get(way)) for way in ways)]
        for row in by_size
    ]
    titles = ("GPUs", "bytes", *(WAYS[way] for way in ways))
    lines = table(titles, sums) if sums else []
    if any("batch" in row for row in rows):
        lines += rounds_table(rows)
    failed = (row for row in rows if "status" in row)
    return lines + [f"- {row['job']}, {row['ranks']} ranks: {row['status']}" for row in failed]


def rounds_table(rows: Sequence[Row]) -> list[str]:
    """Sums: their number in a round, and their time, in which a rank waits for the others."""
    merged: dict[tuple[str, int, int], Row] = {}
    started = {(row["job"], row["ranks"]): row for row in rows if "start_up_s" in row}
    for row in rows:
        if "batch" in row:
            key = row["job"], row["ranks"], row["batch"]
            merged.setdefault(key, started[key[:2]].copy()).update(row)
    titles = ("", "GPUs", "batch", "ms", "of one GPU", "sums", "sums, µs", "idle, µs", "host, ms")
    lines = [
        [name, str(ranks), str(batch), *_cells(row, merged)]
        for (name, ranks, batch), row in merged.items()
    ]
    return table((*titles, "start-up, s"), lines)


def _cells(row: Row, merged: Mapping[tuple[str, int, int], Row]) -> list[str]:
    name = row["job"].replace(", ep", ", tp")
    for sums in FIXED_SUMS:
        name = name.removesuffix(f", {sums}")
    alone = merged.get((name, 1, row["batch"]))
    share = f"{row['ms'] / alone['ms']:.3f}" if alone and row["ranks"] > 1 else ""
    rest = [number(row.get(key)) for key in ("sums_us", "idle_us", "host_ms", "start_up_s")]
    return [number(row["ms"]), share, f"{row['sums']:.0f}" if "sums" in row else "", *rest]


def subject(name: str, title: str) -> Subject:
    def run(options: Options) -> Iterator[Row]:
        for ranks in options.numbers("ranks"):
            for job in jobs(name, ranks, options.device == "cuda", options.more.layers):
                yield from run_job(job)

    return Subject(name, title, run, tables)


SUBJECTS = (
    subject("sums", "Sums over several GPUs"),
    subject("llama-8b", "8B on several GPUs"),
    subject("llama-70b", "70B on several GPUs"),
    subject("v3", "V3-style on several GPUs"),
    subject("v3-fp8", "DeepSeek V3's shape in FP8 on several GPUs"),
    subject("qwen3-235b", "Qwen3-235B-A22B's shape on several GPUs"),
)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__, ranks="1,2", layers=80))
