"""What happens behind lm_head on a GPU: the choice of tokens, the filters, and whole captured
one-model rounds.

    python benchmarks/sampling_kernels.py [--output result.json] [--no-kernels] [--no-rounds]
    [--synthetic]

Kernels: 128,256 tokens in bfloat16, device time of a CUDA graph with several of them, rotating
among inputs that together do not fit the cache. Beside each stands the way that it replaced, on the
same inputs: a float32 copy of the logits before the same two kernels for the choice, sort + softmax
+ cumsum in plain torch for the filters.

Rounds: the Llama-3.1-8B shape with an EAGLE-3 head of 32,000 draft tokens, K = 3, dummy weights,
lengths of 1,024. Device time of a replay, greedy and with temperature 0.8, top_p 0.9, top_k 50, and
how many kernels (copies included) one replay runs. A run in an older checkout gives the other side.
"""

import argparse
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rounds import models

from tllm_spec.config import LlmArgs
from tllm_spec.executor.build import build_executor

VOCAB, REPEATS, ROUND_BATCHES, KV_LEN = 128256, 20, (1, 8), 1024
Call = Callable[[torch.Tensor], object]


def graph_us(calls: list[Callable[[], object]]) -> float:
    """Microseconds of one call, the median of 30 replays of all of them in one graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch has no annotation
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return replays_us(graph.replay) / len(calls)


def replays_us(replay: Callable[[], object], number: int = 30) -> float:
    for _ in range(3):
        replay()
    times = []
    for _ in range(number):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()  # type: ignore[no-untyped-call] # torch has no annotation
        replay()
        end.record()  # type: ignore[no-untyped-call] # torch has no annotation
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def sorted_filters(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The whole row sorted; parameters `[R, 1]`."""
    descending = logits.sort(dim=-1, descending=True).values
    floor = torch.where(min_p > 0, descending[:, :1] + min_p.log(), -torch.inf)
    floor = torch.maximum(floor, descending.gather(1, top_k - 1))
    kept = torch.where(descending < floor, -torch.inf, descending).softmax(dim=-1)
    before = kept.cumsum(dim=-1) - kept
    last_kept = ((before < top_p).sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    floor = torch.where(top_p < 1, torch.maximum(floor, descending.gather(1, last_kept)), floor)
    return logits.masked_fill(logits < floor, -torch.inf)


def ways(num_rows: int) -> dict[str, Call]:
    """Every way of a choice on logits `[R, V]`; what replaced it stands behind what was."""
    from tllm_spec.kernels.choose_token import choose_best, choose_token
    from tllm_spec.kernels.filter_cut import filter_cut

    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device="cuda")

    seeds = torch.arange(num_rows, device="cuda")
    zero, one, temperature, off = full(0), full(1), full(0.8), full(0)
    top_k, all_k, top_p = full(50, torch.int64), full(VOCAB, torch.int64), full(0.9)

    def greedy_before(logits: torch.Tensor) -> object:
        nothing = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
        return choose_token(logits.float(), nothing.to(torch.float32), nothing, nothing)

    def filters_before(logits: torch.Tensor, k: torch.Tensor) -> object:
        scaled = logits.float() / temperature.unsqueeze(1)
        scaled = sorted_filters(scaled, k.unsqueeze(1), top_p.unsqueeze(1), off.unsqueeze(1))
        return choose_token(scaled, one, seeds, seeds)

    def filters_now(logits: torch.Tensor, k: torch.Tensor) -> object:
        cut = filter_cut(logits, temperature, k, top_p, off)
        return choose_token(logits, temperature, seeds, seeds, cut=cut)

    return {
        "greedy, float32 copy": greedy_before,
        "greedy": choose_best,
        "sampled, float32 copy": lambda logits: choose_token(
            logits.float(), temperature, seeds, seeds
        ),
        "sampled": lambda logits: choose_token(logits, temperature, seeds, seeds),
        "top_k 50 top_p 0.9, sorted": lambda logits: filters_before(logits, top_k),
        "top_k 50 top_p 0.9": lambda logits: filters_now(logits, top_k),
        "top_p 0.9, sorted": lambda logits: filters_before(logits, all_k),
        "top_p 0.9": lambda logits: filters_now(logits, all_k),
        "filters off": lambda logits: filter_cut(logits, temperature, all_k, one, zero),
        "cut of top_k 50 top_p 0.9": lambda logits: filter_cut(
            logits, temperature, top_k, top_p, off
        ),
    }


def measure_kernels(rows: list[int]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for num_rows in rows:
        num_inputs = max(2, min(REPEATS, (200 << 20) // (num_rows * VOCAB * 2)))
        inputs = [
            (torch.randn(num_rows, VOCAB, device="cuda") * 3).bfloat16() for _ in range(num_inputs)
        ]
        repeats = REPEATS if num_rows <= 32 else 4
        for name, way in ways(num_rows).items():
            calls = [lambda way=way, x=inputs[i % num_inputs]: way(x) for i in range(repeats)]
            found.setdefault(name, {})[num_rows] = round(graph_us(calls), 2)
    return found


def measure_rounds(synthetic: bool) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        target, head, options = models("llama-8b", Path(name), 3)
        if not synthetic:
            del head["synthetic_acceptance_rates"]
        args = LlmArgs.from_kwargs(
            target,
            skip_tokenizer_init=True,
            max_batch_size=max(ROUND_BATCHES),
            max_seq_len=4096,
            max_num_tokens=4096,
            cuda_graph_config={"batch_sizes": list(ROUND_BATCHES)},
            kv_cache_config={"free_gpu_memory_fraction": 0.3},
            speculative_config=head,
            **options,
        )
        with torch.inference_mode():
            runner = build_executor(args, None, lambda responses: None).executor.parts.runner
            for batch in ROUND_BATCHES:
                for way in ("greedy", "sampled"):
                    found[f"{way} batch {batch}"] = measure_round(runner, batch, way == "sampled")
    return found


def measure_round(runner: Any, batch: int, sampled: bool) -> dict[str, Any]:
    slots, state, chosen = runner._slots, runner._sampler.state, list(range(batch))
    slots.kv_lens[:batch] = KV_LEN
    slots._draft_limits[:batch] = 3
    parameters = type(state.gather(torch.zeros(0, dtype=torch.int64, device="cuda")))(
        state.floats, state.integers
    )
    for column, value in (("temperature", 0.8), ("top_p", 0.9)):
        parameters.column(column)[:batch] = value if sampled else float(column == "top_p")
    parameters.integer("top_k")[:batch] = 50 if sampled else state.vocab_size

    def replay() -> None:
        assert runner.graphs.replay(chosen, 3, sampled) is not None

    us = replays_us(replay, 100)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    events = [
        event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    names = Counter(event.name[:60] for event in events)
    return {"us": round(us, 1), "kernels": len(events), "names": dict(names.most_common())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rows", default="1,4,32,64,256")
    parser.add_argument("--no-kernels", action="store_true")
    parser.add_argument("--no-rounds", action="store_true")
    parser.add_argument(
        "--synthetic", action="store_true", help="accept drafts at benchmarks/rounds.py's rates"
    )
    args = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if not args.no_kernels:
        result["kernels_us"] = measure_kernels([int(rows) for rows in args.rows.split(",")])
        print("| us | " + " | ".join(f"R = {rows}" for rows in args.rows.split(",")) + " |")
        for name, times in result["kernels_us"].items():
            print(f"| {name} | " + " | ".join(map(str, times.values())) + " |")
    if not args.no_rounds:
        result["rounds"] = measure_rounds(args.synthetic)
        for name, row in result["rounds"].items():
            print(f"| {name} | {row['us']} us | {row['kernels']} kernels |")
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
