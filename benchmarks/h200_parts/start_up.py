"""Point 6: from starting an interpreter to an `LLM` that answers.

Run as a module this is the interpreter that is started: it takes `Start`'s fields as JSON and
prints seconds and bytes as JSON."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.h200_parts.figures import Figure
from benchmarks.h200_parts.setup import Report, Setup
from benchmarks.harness.engine import start_up_phases, synchronize
from benchmarks.harness.report import ROOT
from tllm_spec import LLM, SamplingParams


@dataclass(frozen=True)
class Start:
    """`load`: requests, tokens of their prompts and output tokens; served twice after the first
    answer. `at`: when the interpreter was started, on the clock that processes share."""

    model: str
    options: dict[str, Any]
    load: tuple[int, int, int]
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
            ready = found.pop("ready")
            details = {f"{phase} s": seconds for phase, seconds in found.items()}
            report(Figure(6, title, "s", ready, details=details))


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
    with llm:
        llm.generate([1] * 16, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        found["first answer"] = time.monotonic() - ready
        found["first load"] = _serve(llm, *start.load)
        found["the same load again"] = _serve(llm, *start.load)
    return found


def _serve(llm: LLM, number: int, prompt_len: int, max_tokens: int) -> float:
    """Seconds of requests sent at once, whose prompts have no common prefix."""
    prompts = [[1 + i] * prompt_len for i in range(number)]
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(measure(Start(**json.loads(sys.argv[1])), time.monotonic())))
