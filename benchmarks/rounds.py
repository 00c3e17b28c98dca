"""What a generation round costs on a GPU: graph or eager, overlap or not, plain, one-model and
two-model EAGLE-3.

    python benchmarks/rounds.py [--shape llama-8b|zoo] [--batch-sizes 1,8] [--draft-len 3] [--output
    result.json]

Rounds are driven one by one, without the server's thread. Round times are wall time of many rounds
over their number; all other columns come from a profiler trace of 100 rounds: graph launches a
round, calls in which the host waits for the device (one a round is for the event of its results),
and the median time of a round in which the GPU does nothing between graphs. `llama-8b` has random
weights and synthetic acceptance (0.73 / 0.52 / 0.35 by position, the peers' 2.60 tokens a round).
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from driven_rounds import SPAN, Rounds, gap_between_launches, release
from model_shapes import RATES, write_configs

PROMPT_LEN, TIMED_ROUNDS, TRACED_ROUNDS = 1024, 150, 100
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


def measure(path: str, model: str, batch_size: int, prompt_len: int, **options: Any) -> Row:
    spec = options.get("speculative_config")
    width = spec["max_draft_len"] + 1 if spec else 1
    max_seq_len = prompt_len + (TIMED_ROUNDS + TRACED_ROUNDS + 60) * width
    rounds = Rounds(model, max_batch_size=batch_size, max_seq_len=max_seq_len, **options)
    rounds.start(batch_size, prompt_len)
    overlap = rounds.executor.parts.max_in_flight > 0
    graph = rounds.executor.parts.runner.graphs is not None
    timed = rounds.timed(TIMED_ROUNDS)
    if graph and overlap:
        rounds.never_waits()
    events = rounds.traced(TRACED_ROUNDS)
    span = next(e for e in events if e.get("name") == SPAN and e.get("cat") == "user_annotation")
    calls = Counter(
        event["name"]
        for event in events
        if event.get("cat") == "cuda_runtime" and 0 <= event["ts"] - span["ts"] <= span["dur"]
    )
    launches_a_round = calls["cudaGraphLaunch"] / TRACED_ROUNDS
    row = Row(
        path,
        batch_size,
        graph,
        overlap,
        timed.round_ms,
        timed.tokens_a_round,
        launches_a_round,
        sum(calls[name] for name in WAITS) / TRACED_ROUNDS,
        gap_between_launches(events, round(launches_a_round)) if graph else None,
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
    write_configs(folder)
    head = {
        "decoding_type": "Eagle3",
        "speculative_model": str(folder / "eagle3"),
        "load_format": "dummy",
        "max_draft_len": draft_len,
        "synthetic_acceptance_rates": RATES[:draft_len],
    }
    return str(folder / "target"), head, {"load_format": "dummy"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=("llama-8b", "zoo"), default="llama-8b")
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--draft-len", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("rounds.py needs a CUDA device")
    rows: list[Row] = []
    print(
        "| path | batch | launch | loop | round ms | tokens/round | tok/s | graph launches | waits "
        "| gap µs |"
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
                    release()
    if args.output is not None:
        result = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "shape": args.shape,
        }
        args.output.write_text(
            json.dumps(result | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
