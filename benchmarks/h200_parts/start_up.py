"""Point 6: from starting an interpreter to an `LLM` that answers; loading weights from files.

Run as a module this is the interpreter that is started: it takes `Start`'s fields as JSON and
prints seconds and bytes as JSON."""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200_parts.figures import Figure
from benchmarks.h200_parts.setup import Report, Setup
from benchmarks.harness.engine import release, start_up_phases, synchronize
from benchmarks.harness.models import LLAMA_8B, Config
from benchmarks.harness.report import ROOT
from tllm_spec import LLM, SamplingParams


@dataclass(frozen=True)
class Start:
    """`load`: requests, tokens of their prompts and output tokens; served twice after the first
    answer. `at`: when the interpreter was started, on the clock that processes share."""

    model: str
    options: dict[str, Any]
    load: tuple[int, int, int] | None = None
    at: float = field(default_factory=time.monotonic)


def start_up(setup: Setup, report: Report) -> None:
    """Random weights and default graphs: EAGLE-3 with empty caches of kernels and measurements,
    the same again, and plain. Each serves one load twice, which shows what was not yet ready."""
    models, draft_len = setup.models, setup.scale.draft_len
    common = models.options | {"max_seq_len": 8192 if models.is_8b else 256}
    eagle3 = common | {"speculative_config": models.eagle3(draft_len)}
    name = f"start-up, EAGLE-3 K={draft_len}"
    load = (64, 512, 16) if models.is_8b else (4, 32, 4)
    with tempfile.TemporaryDirectory() as cache:
        for title, options in (
            (f"{name}, nothing compiled or measured before", eagle3),
            (name, eagle3),
            ("start-up, plain", common),
        ):
            caches = {"TRITON_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}
            found = _started(Start(models.target, options, load), caches)
            ready, _ = found.pop("ready"), found.pop("host GiB")
            details = {f"{phase} s": seconds for phase, seconds in found.items()}
            report(Figure(6, title, "s", ready, details=details))


def from_files(setup: Setup, report: Report) -> None:
    """Weights on the local disk; a quarter of the layers when quick."""
    models = setup.models
    options = models.options | {"cuda_graph_config": None, "max_seq_len": 256}
    if not models.is_8b:
        report(_loaded("zoo weights", _started(Start(models.target, options), {}), 0))
        return
    config = {**LLAMA_8B, "num_hidden_layers": 8} if setup.quick else LLAMA_8B
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = write_checkpoint(config, Path(folder), torch.device(models.device))
        release()
        found = _started(Start(folder, options | {"load_format": "auto"}), {})
    name = f"weights of {config['num_hidden_layers']} layers from safetensors"
    report(_loaded(name, found, num_bytes))


def _loaded(name: str, found: dict[str, float], num_bytes: int) -> Figure:
    details = {"GB on disk": num_bytes / 1e9, "GB/s": num_bytes / 1e9 / found["weights"]}
    details["peak host memory with file pages, GiB"] = found["host GiB"]
    return Figure(6, name, "s", found["weights"], details=details)


def _started(start: Start, environment: dict[str, str]) -> dict[str, float]:
    """Raises CalledProcessError when the process fails; its messages go where ours go."""
    command = [sys.executable, "-m", "benchmarks.h200_parts.start_up", json.dumps(asdict(start))]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def measure(start: Start, imported: float) -> dict[str, float]:
    """Seconds of each phase until the engine is ready, and of its first answers. `imported`: when
    the imports were done."""
    found = {"imports": imported - start.at}
    began = time.monotonic()
    if start.options["device"] != "cpu":
        torch.zeros(1, device=start.options["device"]).add_(1)
        synchronize()
    found["device"] = time.monotonic() - began
    began = time.monotonic()
    with start_up_phases() as phases:
        llm = LLM(start.model, skip_tokenizer_init=True, **start.options)
    ready = time.monotonic()
    found |= {name: sum(seconds) for name, seconds in phases.items()}
    found["the rest"] = ready - began - sum(map(sum, phases.values()))
    found["ready"] = ready - start.at
    found["host GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    with llm:
        llm.generate([1] * 16, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        found["first answer"] = time.monotonic() - ready
        if start.load is not None:
            found["first load"] = _serve(llm, *start.load)
            found["the same load again"] = _serve(llm, *start.load)
    return found


def _serve(llm: LLM, number: int, prompt_len: int, max_tokens: int) -> float:
    """Seconds of requests sent at once, whose prompts have no common prefix."""
    prompts = [[1 + i] * prompt_len for i in range(number)]
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - began


def write_checkpoint(config: Config, folder: Path, device: torch.device) -> int:
    """A Llama checkpoint of random weights in shards, written to the disk and dropped from the
    page cache as far as the system allows. Returns its bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with device:
        model = LlamaForCausalLM(LlamaConfig(**config, dtype="bfloat16"))
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="2GB")
    files = list(folder.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as written:
            os.fsync(written.fileno())
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    print(json.dumps(measure(Start(**json.loads(sys.argv[1])), time.monotonic())))
