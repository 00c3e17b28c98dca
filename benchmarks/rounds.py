"""What a generation round costs on a GPU: graph or eager, overlap or not, plain, one-model and two-model EAGLE-3.

    python benchmarks/rounds.py [--shape llama-8b|zoo] [--batch-sizes 1,8] [--draft-len 3] [--output result.json]

Rounds are driven one by one, without the server's thread. Round times are wall time of many rounds over their number;
all other columns come from a profiler trace of 100 rounds: graph launches a round, calls in which the host waits for
the device (one a round is for the event of its results), and the median time between two rounds in which the GPU does
nothing. `llama-8b` has random weights and synthetic acceptance (0.73 / 0.52 / 0.35 by position, the peers' 2.60 tokens
a round).
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch

from tllm_spec.config import LlmArgs
from tllm_spec.executor.build import build_executor
from tllm_spec.executor.decoding_rules import DecodingRules
from tllm_spec.executor.request import DraftCounters, LlmRequest, RequestState
from tllm_spec.sampling_params import SamplingParams

PROMPT_LEN, TIMED_ROUNDS, TRACED_ROUNDS = 1024, 150, 100
RATES = (0.73, 0.52, 0.35, 0.25, 0.18, 0.13, 0.09)
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
HEAD_8B = LLAMA_8B | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}
SPAN = "rounds"  # the trace's own beginning and end wait for the device, too
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaEventSynchronize")


@dataclass
class Row:
    """Times in milliseconds, the gap in microseconds."""

    path: str
    batch_size: int
    graph: bool
    overlap: bool
    round_ms: float
    tokens_a_round: float
    launches_a_round: float
    waits_a_round: float
    gap_us: float | None  # None: without graphs there is no telling where a round ends


class Rounds:
    """An executor with `batch_size` requests that generate for as long as it takes."""

    def __init__(self, model: str, batch_size: int, prompt_len: int, **options: Any) -> None:
        rounds = TIMED_ROUNDS + TRACED_ROUNDS + 60
        spec = options.get("speculative_config")
        width = spec["max_draft_len"] + 1 if spec else 1
        max_tokens = rounds * width
        args = LlmArgs.from_kwargs(
            model,
            skip_tokenizer_init=True,
            max_batch_size=batch_size,
            max_seq_len=prompt_len + max_tokens,
            max_num_tokens=8192,
            cuda_graph_config=options.pop("cuda_graph_config", {"batch_sizes": [batch_size]}),
            **options,
        )
        self.built = build_executor(args, None, lambda responses: None)
        self.executor = self.built.executor
        self.requests = [
            self._request(index, prompt_len, max_tokens, width - 1) for index in range(batch_size)
        ]
        self.built.queue.put(self.requests)
        while not all(request.state is RequestState.GENERATION for request in self.requests):
            self.executor.step()
        self.run(20)

    def _request(self, index: int, prompt_len: int, max_tokens: int, draft_len: int) -> LlmRequest:
        vocab_size = self.built.model_config.vocab_size
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        random = Random(index)
        return LlmRequest(
            request_id=index + 1,
            tokens=[random.randrange(vocab_size) for _ in range(prompt_len)],
            rules=DecodingRules.from_params(params, vocab_size=vocab_size, end_ids=(), encode=None),
            seed=index,
            arrival=index,
            max_tokens=max_tokens,
            draft_limit=draft_len,
            counters=DraftCounters(draft_len),
        )

    def run(self, number: int) -> None:
        for _ in range(number):
            self.executor.step()

    def timed(self) -> tuple[float, float]:
        """Milliseconds a round, and tokens a round and request."""
        torch.cuda.synchronize()
        before, start = self._num_tokens(), time.perf_counter()
        self.run(TIMED_ROUNDS)
        torch.cuda.synchronize()
        seconds, tokens = time.perf_counter() - start, self._num_tokens() - before
        return seconds / TIMED_ROUNDS * 1e3, tokens / TIMED_ROUNDS / len(self.requests)

    def never_waits(self) -> None:
        """Raises RuntimeError when any op of a round synchronises with the device; the results' event is not one."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.run(10)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def traced(self) -> list[dict[str, Any]]:
        """The trace of some rounds, as Chrome reads it."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            with torch.profiler.record_function(SPAN):
                self.run(TRACED_ROUNDS)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            profile.export_chrome_trace(str(file))
            events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
        return events

    def _num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)


def gap_between_launches(events: list[dict[str, Any]]) -> float:
    """Median microseconds in which nothing runs between the work of two graph launches; copies count as work."""
    launches = {e["args"]["correlation"] for e in events if e.get("name") == "cudaGraphLaunch"}
    work: list[tuple[float, float]] = []
    spans: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        start, end = event["ts"], event["ts"] + event["dur"]
        work.append((start, end))
        if event["args"].get("correlation") in launches:
            spans[event["args"]["correlation"]] += [start, end]
    rounds = sorted((min(times), max(times)) for times in spans.values())
    work.sort()
    gaps = []
    for (_, end), (start, _) in pairwise(rounds):
        busy = sum(min(stop, start) - max(begin, end) for begin, stop in work if begin < start and stop > end)
        gaps.append(start - end - busy)
    return statistics.median(gaps)


def measure(path: str, model: str, batch_size: int, prompt_len: int, **options: Any) -> Row:
    rounds = Rounds(model, batch_size, prompt_len, **options)
    overlap = rounds.executor.parts.max_in_flight > 0
    graph = rounds.executor.parts.runner.graphs is not None
    round_ms, tokens = rounds.timed()
    if graph and overlap:
        rounds.never_waits()
    events = rounds.traced()
    span = next(e for e in events if e.get("name") == SPAN and e.get("cat") == "user_annotation")
    calls = Counter(
        event["name"]
        for event in events
        if event.get("cat") == "cuda_runtime" and 0 <= event["ts"] - span["ts"] <= span["dur"]
    )
    row = Row(
        path,
        batch_size,
        graph,
        overlap,
        round_ms,
        tokens,
        calls["cudaGraphLaunch"] / TRACED_ROUNDS,
        sum(calls[name] for name in WAITS) / TRACED_ROUNDS,
        gap_between_launches(events) if graph else None,
    )
    print(table_line(row), flush=True)
    return row


def table_line(row: Row) -> str:
    how = f"{'graph' if row.graph else 'eager'} | {'overlap' if row.overlap else 'no overlap'}"
    tokens_a_second = row.batch_size * row.tokens_a_round / row.round_ms * 1e3
    figures = f"{row.round_ms:.2f} | {row.tokens_a_round:.2f} | {tokens_a_second:.0f}"
    gap = "–" if row.gap_us is None else f"{row.gap_us:.0f}"
    trace = f"{row.launches_a_round:.2f} | {row.waits_a_round:.2f} | {gap}"
    return f"| {row.path} | {row.batch_size} | {how} | {figures} | {trace} |"


def models(shape: str, folder: Path, draft_len: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The target, its EAGLE-3 configuration, and what else `LlmArgs` needs for them."""
    if shape == "zoo":
        head = {
            "decoding_type": "Eagle3",
            "speculative_model": "zoo:llama-eagle3",
            "max_draft_len": draft_len,
        }
        return "zoo:llama", head, {}
    for name, config in (("target", LLAMA_8B), ("head", HEAD_8B)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    head = {
        "decoding_type": "Eagle3",
        "speculative_model": str(folder / "head"),
        "load_format": "dummy",
        "max_draft_len": draft_len,
        "synthetic_acceptance_rates": RATES[:draft_len],
    }
    return str(folder / "target"), head, {"load_format": "dummy"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=("llama-8b", "zoo"), default="llama-8b")
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--draft-len", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("rounds.py needs a CUDA device")
    rows: list[Row] = []
    print(
        "| path | batch | launch | loop | round ms | tokens/round | tok/s | graph launches | waits | gap µs |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        model, head, options = models(args.shape, Path(name), args.draft_len)
        prompt_len = PROMPT_LEN if args.shape == "llama-8b" else 256
        two_model = head | {"eagle3_one_model": False}
        ways: dict[str, list[dict[str, Any]]] = {
            "plain": [{}, {"disable_overlap_scheduler": True}, {"cuda_graph_config": None}],
            "EAGLE-3 one-model": [
                {"speculative_config": head},
                {"speculative_config": head, "disable_overlap_scheduler": True},
                {"speculative_config": head, "cuda_graph_config": None},
            ],
            "EAGLE-3 two-model": [{"speculative_config": two_model}],
        }
        for batch_size in map(int, args.batch_sizes.split(",")):
            for path, variants in ways.items():
                for variant in variants:
                    rows.append(measure(path, model, batch_size, prompt_len, **options, **variant))
                    gc.collect()
                    torch.cuda.empty_cache()
    if args.output is not None:
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": args.shape}
        args.output.write_text(json.dumps(result | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
