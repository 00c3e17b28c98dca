"""What `deterministic: true` costs on a GPU: an 8B Llama's shape with it and without, alternating
in one run.

    python benchmarks/deterministic.py [--output result.json]

Weights and prompts are those of `rounds.py`: 1024 tokens of context, CUDA graphs, overlap. A time
is the median of three, each of 60 rounds (of one prompt for the prefill, which goes through
`LLM.generate`)."""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from driven_rounds import WARM_UP_ROUNDS, Rounds
from rounds import PROMPT_LEN, models

from tllm_spec import LLM, SamplingParams

REPEATS, ROUNDS = 3, 60
LONG_PROMPT = 8000
DRAFT_LEN = 3


@dataclass
class Row:
    """Milliseconds of a round, or of a prompt."""

    path: str
    batch_size: int
    off_ms: float
    on_ms: float

    def __str__(self) -> str:
        figures = f"{self.off_ms:.2f} | {self.on_ms:.2f} | {self.on_ms / self.off_ms:.2f}"
        return f"| {self.path} | {self.batch_size} | {figures} |"


def alternate(off: Callable[[], float], on: Callable[[], float]) -> tuple[float, float]:
    """Medians of what the two return, called by turns."""
    pairs = [(off(), on()) for _ in range(REPEATS)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(
        pair[1] for pair in pairs
    )


def rounds(path: str, model: str, batch_size: int, prompt_len: int, **options: Any) -> Row:
    room = (1 + DRAFT_LEN) * (WARM_UP_ROUNDS + (1 + REPEATS) * ROUNDS)
    off, on = (
        Rounds(
            model,
            max_batch_size=batch_size,
            max_seq_len=prompt_len + room,
            deterministic=deterministic,
            **options,
        )
        for deterministic in (False, True)
    )
    for engine in (off, on):
        engine.start(batch_size, prompt_len)
    times = alternate(lambda: off.timed(ROUNDS).round_ms, lambda: on.timed(ROUNDS).round_ms)
    return Row(path, batch_size, *times)


def prefill(model: str, **options: Any) -> Row:
    own = {
        "max_batch_size": 1,
        "max_num_tokens": 8192,
        "kv_cache_config": {"enable_block_reuse": False},
    }
    prompt = [Random(0).randrange(128256) for _ in range(LONG_PROMPT)]
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    with ExitStack() as stack:
        off, on = (
            stack.enter_context(
                LLM(model, skip_tokenizer_init=True, deterministic=each, **own, **options)
            )
            for each in (False, True)
        )

        def once(llm: LLM) -> float:
            start = time.perf_counter()
            llm.generate([prompt], params, use_tqdm=False)
            return (time.perf_counter() - start) * 1e3

        for llm in (off, on):
            once(llm)  # compiles
        return Row(
            f"a prompt of {LONG_PROMPT} tokens", 1, *alternate(lambda: once(off), lambda: once(on))
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("deterministic.py needs a CUDA device")
    rows: list[Row] = []
    print("| path | batch | off ms | on ms | ratio |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        model, head, options = models("llama-8b", Path(name), DRAFT_LEN)
        speculates = {"speculative_config": head}
        measurements = [
            *(
                (lambda size=size: rounds("plain", model, size, PROMPT_LEN, **options))
                for size in (1, 8, 64)
            ),
            *(
                (
                    lambda size=size: rounds(
                        "EAGLE-3 K=3", model, size, PROMPT_LEN, **options, **speculates
                    )
                )
                for size in (1, 8)
            ),
            lambda: prefill(model, **options),
        ]
        for measure in measurements:
            rows.append(measure())
            print(rows[-1], flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    if args.output is not None:
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.output.write_text(
            json.dumps(result | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
