"""What a round costs in which one request's rules need more than the graph of a round knows.

    python benchmarks/ruled_rounds.py [--shape llama-8b|zoo] [--batch-sizes 1,64] [--rounds 60]
    [--repeat 3]
                                      [--output result.json]

All requests are greedy; the last one has a rule. "forward in a graph" is the engine as it is
served: such a round is the graph of its forward, with sampling (and drafting) launched behind it.
"kernel by kernel" is the same engine without those graphs. Both take turns; a figure is the median
over the turns of (its round time / that of the same requests without a rule). `llama-8b` has random
weights and synthetic acceptance, as in rounds.py."""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from driven_rounds import Rounds, release
from rounds import models

DRAFT_LEN = 3
RULES: dict[str, dict[str, Any]] = {
    "temperature, top_p": {"temperature": 0.8, "top_p": 0.95},  # which a round's graph knows
    "repetition_penalty": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
    "logit_bias": {"logit_bias": {7: 2.0}},
}


@dataclass
class Row:
    """Milliseconds, and ratios to it."""

    path: str
    batch_size: int
    rule: str
    simple_ms: float
    forward_in_a_graph: float
    kernel_by_kernel: float


def measure(
    path: str, model: str, batch_size: int, args: argparse.Namespace, **options: Any
) -> list[Row]:
    prompt_len = 1024 if "load_format" in options else 64
    width = DRAFT_LEN + 1 if "speculative_config" in options else 1
    length = prompt_len + (2 * args.rounds + 60) * width
    engine = Rounds(model, max_batch_size=batch_size, max_seq_len=length, **options)
    runner = engine.executor.parts.runner
    forwards, rows = runner.decode.forward_graphs, list[Row]()
    assert forwards is not None
    for name, rules in RULES.items():
        simple, kept, eager = list[float](), list[float](), list[float]()
        for _ in range(args.repeat):
            engine.start(batch_size, prompt_len)
            simple.append(engine.timed(args.rounds).round_ms)
            engine.start(batch_size, prompt_len, **rules)
            kept.append(engine.timed(args.rounds).round_ms / simple[-1])
            runner.decode.forward_graphs = None
            eager.append(engine.timed(args.rounds).round_ms / simple[-1])
            runner.decode.forward_graphs = forwards
        found = [statistics.median(each) for each in (simple, kept, eager)]
        rows.append(Row(path, batch_size, name, *found))
        figures = f"{found[0]:.2f} | {found[1]:.2f} | {found[2]:.2f}"
        print(f"| {path} | {batch_size} | {name} | {figures} |", flush=True)
    engine.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=("llama-8b", "zoo"), default="llama-8b")
    parser.add_argument("--batch-sizes", default="1,64")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("ruled_rounds.py needs a CUDA device")
    rows = list[Row]()
    print(
        "| path | batch | rule of one request | without, ms | forward in a graph | kernel by "
        "kernel |"
    )
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        model, head, options = models(args.shape, Path(name), DRAFT_LEN)
        paths: dict[str, dict[str, Any]] = {"plain": {}, "EAGLE-3": {"speculative_config": head}}
        for batch_size in map(int, args.batch_sizes.split(",")):
            for path, own in paths.items():
                rows += measure(path, model, batch_size, args, **options, **own)
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
