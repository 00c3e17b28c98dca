"""How fast prompts are read on a GPU: FLASHINFER's contexts beside TRITON's, and where the time of
a long one goes.

    python -m benchmarks.prefill [--shape llama-8b|tiny] [--repeats 5] [--output result.json]

Both engines stand side by side, with random weights of Llama-3.1-8B's shape in bfloat16, and take
turns. Seconds are wall time from putting requests of one output token into the queue until the host
has all their tokens: the median of the repeats. The share of 790 TFLOP/s (a large bfloat16 matrix
product's rate on an H200) counts the linear layers and the causal half of attention. The last
tables are a profiler's, of one run each with FLASHINFER; its own cost is in the wall time that they
name."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.rounds import LLAMA_8B
from tllm_spec.config import LlmArgs
from tllm_spec.executor.build import BuiltExecutor, build_executor
from tllm_spec.executor.decoding_rules import DecodingRules
from tllm_spec.executor.request import DraftCounters, LlmRequest
from tllm_spec.models.config import ModelConfig
from tllm_spec.sampling_params import SamplingParams

PEAK_FLOPS = 790e12
MAX_NUM_TOKENS, MAX_BATCH_SIZE, TOP_KERNELS = 8192, 64, 12
BACKENDS = ("TRITON", "FLASHINFER")
LONG = LLAMA_8B | {"max_position_embeddings": 16384}
SHAPES = {
    "llama-8b": LONG,
    "tiny": LONG
    | {"num_hidden_layers": 2, "vocab_size": 2048, "hidden_size": 512, "head_dim": 128},
}


@dataclass(frozen=True)
class Case:
    name: str
    num_prompts: int
    prompt_len: int
    cached: int = 0  # tokens of each prompt that are found in the cache
    bar: float | None = None  # seconds that are aimed at


CASES = (
    Case("64 prompts of 1k", 64, 1024, bar=1.45),
    Case("one prompt of 8k", 1, 8192, bar=0.21),
    Case("first token of a 1k prompt", 1, 1024, bar=0.025),
    Case("2k behind a cached 6k", 1, 8192, cached=6144),
    Case("64 tokens behind a cached 8k", 1, 8192, cached=8128),
)


@dataclass(frozen=True)
class Row:
    case: str
    backend: str
    seconds: float
    tokens_a_second: float
    share_of_peak: float
    bar: float | None


class Engine:
    """An executor that is driven from here."""

    def __init__(self, model: str, backend: str) -> None:
        self.built: BuiltExecutor = build_executor(
            LlmArgs.from_kwargs(
                model,
                skip_tokenizer_init=True,
                load_format="dummy",
                max_batch_size=MAX_BATCH_SIZE,
                max_seq_len=8192 + 32,
                max_num_tokens=MAX_NUM_TOKENS,
                enable_chunked_prefill=True,
                kv_cache_config={"max_tokens": 1 << 17},
                cuda_graph_config=None,
                attn_backend=backend,
            ),
            None,
            lambda responses: None,
        )
        self.num_requests = 0

    def run(self, prompts: list[list[int]], cached: int = 0) -> float:
        """Seconds until all prompts have a token. Of each, `cached` tokens must be found in the
        cache."""
        rules = DecodingRules.from_params(
            SamplingParams(max_tokens=1, ignore_eos=True),
            vocab_size=self.built.model_config.vocab_size,
            end_ids=(),
            encode=None,
        )
        requests = []
        for prompt in prompts:
            self.num_requests += 1
            requests.append(
                LlmRequest(
                    request_id=self.num_requests,
                    tokens=list(prompt),
                    rules=rules,
                    seed=0,
                    arrival=self.num_requests,
                    max_tokens=1,
                    draft_limit=0,
                    counters=DraftCounters(0),
                )
            )
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.built.queue.put(requests)
        while not all(request.is_finished for request in requests):
            self.built.executor.step()
        seconds = time.perf_counter() - start
        assert all(request.cached_tokens == cached for request in requests)
        return seconds

    def prompts(self, case: Case, repeat: int) -> list[list[int]]:
        """New ones, of which `cached` tokens are put into the cache first."""
        random = Random(f"{case.name} {repeat}")
        vocab_size = self.built.model_config.vocab_size
        prompts = [
            random.choices(range(vocab_size), k=case.prompt_len) for _ in range(case.num_prompts)
        ]
        if case.cached:
            self.run([prompt[: case.cached] for prompt in prompts])
        return prompts


def flops(config: ModelConfig, case: Case) -> float:
    """Of linear layers, where every token counts, of the output layer for the last tokens, and of
    attention."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * q_size + 2 * kv_size + 3 * config.intermediate_size)
    new = case.prompt_len - case.cached
    pairs = (case.prompt_len**2 - case.cached**2) / 2  # of a query and a key
    a_prompt = new * 2 * layer * config.num_layers + 4 * q_size * pairs * config.num_layers
    return case.num_prompts * (a_prompt + 2 * config.hidden_size * config.vocab_size)


def measure(engines: dict[str, Engine], case: Case, repeats: int) -> list[Row]:
    seconds = defaultdict(list)
    for repeat in range(-1, repeats):  # the first is not counted
        for backend, engine in engines.items():
            prompts = engine.prompts(case, repeat)
            taken = engine.run(prompts, case.cached)
            if repeat >= 0:
                seconds[backend].append(taken)
    rows = []
    for backend, engine in engines.items():
        median = statistics.median(seconds[backend])
        tokens = case.num_prompts * (case.prompt_len - case.cached)
        share = flops(engine.built.model_config, case) / median / PEAK_FLOPS
        rows.append(Row(case.name, backend, median, tokens / median, share, case.bar))
        bar = "–" if case.bar is None else f"{case.bar * 1e3:.0f}"
        print(
            f"| {case.name} | {backend} | {median * 1e3:.1f} | {bar} | {tokens / median:.0f} | "
            f"{share:.0%} |",
            flush=True,
        )
    return rows


def profiled(engine: Engine, case: Case, repeat: int) -> dict[str, Any]:
    """Milliseconds of one run and of its kernels, and the longest of these."""
    prompts = engine.prompts(case, repeat)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds = engine.run(prompts)
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    found = [
        {"kernel": e.key[:60], "ms": e.self_device_time_total / 1e3, "calls": e.count}
        for e in events
    ]
    total = sum(kernel["ms"] for kernel in found)
    print(f"\n| {case.name}: kernels {total:.1f} of {seconds * 1e3:.1f} ms | ms | calls | share |")
    print("|---|---|---|---|")
    for kernel in found[:TOP_KERNELS]:
        share = kernel["ms"] / total
        print(f"| {kernel['kernel']} | {kernel['ms']:.2f} | {kernel['calls']} | {share:.1%} |")
    return {
        "case": case.name,
        "ms": seconds * 1e3,
        "kernel_ms": total,
        "longest": found[:TOP_KERNELS],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-8b")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("prefill.py needs a CUDA device")
    with tempfile.TemporaryDirectory() as name:
        Path(name, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        engines = {backend: Engine(name, backend) for backend in BACKENDS}
    print("| prompts | contexts | ms | bar | tok/s | share of 790 TFLOP/s |")
    print("|---|---|---|---|---|---|")
    rows: list[Row] = []
    with torch.inference_mode():
        for case in CASES:
            rows += measure(engines, case, args.repeats)
        profiles = [
            profiled(engines["FLASHINFER"], case, args.repeats) for case in CASES if case.bar
        ]
    if args.output is not None:
        result = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "shape": args.shape,
        }
        table = {"rows": [asdict(row) for row in rows], "profiles": profiles}
        args.output.write_text(json.dumps(result | table, indent=1) + "\n")


if __name__ == "__main__":
    main()
