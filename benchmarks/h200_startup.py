"""Point 6: from starting an interpreter to an `LLM` that answers, second by second; weights from
files on disk.

Run as a script this is the interpreter that is started: it takes one JSON object of `Start`'s
fields and prints one of seconds and bytes. Phases are timed by wrapping what `building/engines.py`
calls."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from driven_rounds import stopwatch, synchronize
from h200_figures import Figure
from h200_setup import Report, Setup
from model_shapes import LLAMA_8B, Config, head_dim

from tllm_spec import LLM, SamplingParams
from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.executor.building import engines
from tllm_spec.executor.rounds.round_runner import RoundRunner

GIB = 1 << 30
SHARD_LAYERS = 4


@dataclass(frozen=True)
class Start:
    """`load`: requests, their prompts' tokens and output tokens, which are served twice once the
    engine has answered.
    `at`: seconds since the epoch at which the interpreter was asked for."""

    model: str
    options: dict[str, Any]
    load: tuple[int, int, int] | None = None
    at: float = field(default_factory=time.time)


def start_up(setup: Setup, report: Report) -> None:
    """Point 6 with random weights and default graphs: with a head, no compiled kernel and no
    measured product on disk, which leaves some; the same again, and plain. Each then serves one
    load twice: what the first of the two waits for was not ready."""
    draft_len = setup.scale.draft_len
    common = setup.options | {"max_seq_len": 8192 if setup.is_8b else 256}
    head = common | {"speculative_config": setup.eagle3(draft_len)}
    name = f"start-up, EAGLE-3 K={draft_len}"
    with tempfile.TemporaryDirectory() as cache:
        runs = [
            (f"{name}, nothing compiled or measured before", head),
            (name, head),
            ("start-up, plain", common),
        ]
        for title, options in runs:
            load = (64, 512, 16) if setup.is_8b else (4, 32, 4)
            own = {"TRITON_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}
            found = _started(Start(setup.target, options, load), own)
            ready = found.pop("ready")
            report(Figure(6, title, "s", ready, details=_seconds(found)))


def from_files(setup: Setup, report: Report) -> None:
    """Point 6 with weights on the local disk; a quarter of the layers when quick."""
    if not setup.is_8b:
        options = setup.options | {"cuda_graph_config": None, "max_seq_len": 256}
        found, num_bytes = _started(Start(setup.target, options), {}), 0
        report(_loaded("zoo weights", found, num_bytes))
        return
    config = {**LLAMA_8B, "num_hidden_layers": 8} if setup.quick else LLAMA_8B
    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        num_bytes = write_checkpoint(config, Path(name), torch.device(setup.device))
        written = time.perf_counter() - began
        options = setup.options | {
            "cuda_graph_config": None,
            "max_seq_len": 8192,
            "load_format": "auto",
        }
        found = _started(Start(name, options), {})
    figure = _loaded(
        f"weights of {config['num_hidden_layers']} layers from safetensors", found, num_bytes
    )
    report(figure)
    print(f"the checkpoint was written in {written:.0f} s", file=sys.stderr)


def _loaded(name: str, found: dict[str, float], num_bytes: int) -> Figure:
    counted = " and file pages" if found["counts_files"] else ""
    memory = {
        "GB on disk": num_bytes / 1e9,
        "GB/s": num_bytes / 1e9 / found["weights"],
        f"GiB that host memory{counted} grew by at most": found["host_growth"] / GIB,
    }
    return Figure(6, name, "s", found["weights"], details=memory)


def _seconds(found: dict[str, float]) -> dict[str, float]:
    return {f"{name} s": seconds for name, seconds in found.items() if name not in HOST_FIGURES}


def _started(start: Start, environment: dict[str, str]) -> dict[str, float]:
    """Runs this file. Raises CalledProcessError when it fails; its messages go where ours go."""
    run = subprocess.run(
        [sys.executable, __file__, json.dumps(asdict(start))],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


HOST_FIGURES = ("host_growth", "counts_files")


def measure(start: Start, imported: float) -> dict[str, float]:
    """Seconds of the phases until the engine is ready, then of its first answer; `imported`: when
    imports were done."""
    found = {"imports": imported - start.at}
    began = time.time()
    if start.options["device"] != "cpu":
        torch.zeros(1, device=start.options["device"]).add_(1)
        synchronize()
    found["device"] = time.time() - began
    began = time.time()
    with ExitStack() as stack:
        peak = stack.enter_context(peak_host_growth())
        phases = {
            "weights": stack.enter_context(stopwatch(engines, "load_model", settle=True)),
            "head": stack.enter_context(stopwatch(engines, "load_head", settle=True)),
            "KV pools": stack.enter_context(stopwatch(KVPool, "__init__", settle=True)),
            "graphs": stack.enter_context(stopwatch(RoundRunner, "capture_graphs", settle=True)),
        }
        llm = LLM(start.model, skip_tokenizer_init=True, **start.options)
    ready = time.time()
    found |= {name: sum(seconds) for name, seconds in phases.items()}
    found["the rest"] = ready - began - sum(map(sum, phases.values()))
    found["ready"] = ready - start.at
    with llm:
        llm.generate([1] * 16, SamplingParams(max_tokens=4, ignore_eos=True))
        found["first answer, after it,"] = time.time() - ready
        if start.load is not None:
            found["first load"], found["the same load again"] = (
                _serve(llm, *start.load) for _ in range(2)
            )
    return found | {"host_growth": float(peak.growth), "counts_files": float(not peak.is_anonymous)}


def _serve(llm: LLM, number: int, prompt_len: int, max_tokens: int) -> float:
    """Seconds of the requests, all at once. Their prompts begin differently."""
    prompts = [[1 + place] * prompt_len for place in range(number)]
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - began


class HostMemory:
    """Bytes of this process in host memory. `is_anonymous`: without the pages of mapped files,
    where the kernel tells them apart."""

    def __init__(self) -> None:
        self.is_anonymous = "RssAnon" in _status()
        self.growth = 0
        self._before = self.now()

    def now(self) -> int:
        return _status()["RssAnon" if self.is_anonymous else "VmRSS"]

    def look(self) -> None:
        self.growth = max(self.growth, self.now() - self._before)


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = [line.split() for line in lines if line.endswith(" kB")]
    return {name.rstrip(":"): int(kib) << 10 for name, kib, _ in sizes}


@contextmanager
def peak_host_growth() -> Iterator[HostMemory]:
    """Looks every 5 ms, from a thread of its own."""
    memory, done = HostMemory(), threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            memory.look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        done.set()
        thread.join()
        memory.look()


def write_checkpoint(config: Config, folder: Path, device: torch.device) -> int:
    """A Llama checkpoint of random weights in shards, written through to the disk and out of the
    page cache as far as the system does that. Returns its bytes. Raises RuntimeError when the disk
    has too little room."""
    from safetensors.torch import save_file

    shards = checkpoint_shapes(config)
    num_bytes = sum(2 * _size(shape) for shard in shards for shape in shard.values())
    if shutil.disk_usage(folder).free < 1.1 * num_bytes:
        raise RuntimeError(f"{folder} has no room for {num_bytes} bytes")
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = folder / f"model-{number:05}.safetensors"
        tensors = {
            name: torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.02).cpu()
            for name, shape in shard.items()
        }
        save_file(tensors, file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file.name)
        with file.open("rb") as written:
            os.fsync(written.fileno())
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return num_bytes


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def checkpoint_shapes(config: Config) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of an untied Llama, shard by shard."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_size = config["num_attention_heads"] * head_dim(config)
    kv_size = config["num_key_value_heads"] * head_dim(config)
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shards: list[dict[str, tuple[int, ...]]] = []
    for first in range(0, config["num_hidden_layers"], SHARD_LAYERS):
        numbers = range(first, min(first + SHARD_LAYERS, config["num_hidden_layers"]))
        shards.append(
            {f"model.layers.{n}.{name}": shape for n in numbers for name, shape in layer.items()}
        )
    ends = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    return [*shards, {**ends, "model.norm.weight": (hidden,)}]


if __name__ == "__main__":
    print(json.dumps(measure(Start(**json.loads(sys.argv[1])), time.time())))
