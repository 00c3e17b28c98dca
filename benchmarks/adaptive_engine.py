"""Adaptive draft lengths in the real engine, on the zoo's models: against every static draft
length, 0 included.

    python -m benchmarks.adaptive_engine [--output result.json] [--repeat 5] [--new-tokens 96]
    [--drafters eagle3]
                                         [--times benchmarks/zoo_round_times.json] [--scripted]

NGram and one-model EAGLE-3, or whichever drafters are named, serve the same traffic, which moves:
text that is being copied, where NGram is right, and sampled text, where it is not; one request and
eight at once. `--scripted`: any text, and drafts are accepted by chance, as in the phases of
adaptive_simulator.py and adaptive_h200.py. All engines take turns phase by phase and stay as they
are from one phase to the next, so the adaptive ones meet every change with what they have learned
before. The first pass is a warm-up. A ratio is the median over the passes of (adaptive / best
static in the same pass), where the best static length is that with the highest median of its own;
of the moving traffic it is one length for all of it. "perfect" is each phase at its best static
length: more than that is not to be had by moving between them. Prompts are in the times, static
NGram pauses single requests as it does by default. `--times`: rounds take what a table says
(benchmarks/table_clock.py), since neighbours on this machine move single passes by a fifth."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.adaptive_simulator import PHASE_ACCEPTANCES
from benchmarks.scripted_acceptance import script_acceptance
from benchmarks.table_clock import TableClock
from tllm_spec import LLM, SamplingParams
from tllm_spec.tokenizer import load_tokenizer
from tllm_spec.zoo.corpus import heldout_files, read_source

STATIC = (0, 1, 3, 5)
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"decoding_type": "NGram", "max_matching_ngram_size": 3},
    "eagle3": {"decoding_type": "Eagle3", "speculative_model": "zoo:llama-eagle3"},
}
DRAFTERS["eagle3_two_model"] = DRAFTERS["eagle3"] | {"eagle3_one_model": False}
DRAFTERS["draft_target"] = {"decoding_type": "Draft_Target", "speculative_model": "zoo:llama-draft"}
DRAFTERS["draft_target_one_model"] = DRAFTERS["draft_target"] | {"draft_target_one_model": True}
SMALL = {
    "max_batch_size": 8,
    "max_seq_len": 1024,
    "kv_cache_config": {"max_tokens": 8192, "enable_block_reuse": False},
}
PROMPT_LEN, NUM_PROMPTS = 150, 8
START_UP_SPREAD, ROUND_SPREAD = (
    0.1,
    0.1,
)  # of times under --times: standard deviations of their logarithms


@dataclass(frozen=True)
class Phase:
    """`acceptance`: of every draft, given those before it; None: drafts are what they are."""

    name: str
    prompts: list[list[int]]
    at_once: int
    temperature: float
    acceptance: float | None = None


@dataclass(frozen=True)
class Row:
    drafter: str
    phase: str
    tokens_per_second: dict[str, float]  # medians, of each static length and "adaptive"
    best_static: int
    adaptive_over_best: float  # median over the passes
    lowest: float
    highest: float
    perfect_over_best: float  # median over the passes; 1 where the traffic is one phase
    acceptance_length: float  # of the adaptive engine


def held_out_texts() -> list[list[int]]:
    tokenizer = load_tokenizer("zoo:llama")
    texts = [
        tokenizer.encode(read_source(path) or "", add_special_tokens=False)
        for path in heldout_files()
    ]
    return [text for text in texts if len(text) > 2 * PROMPT_LEN][:NUM_PROMPTS]


def scripted_phases() -> list[Phase]:
    free = [text[:PROMPT_LEN] for text in held_out_texts()]
    return [
        Phase(f"accepted at {acceptance}, {at_once} at once", prompts, at_once, 0.0, acceptance)
        for at_once, prompts in ((1, free[:4]), (8, free))
        for acceptance in PHASE_ACCEPTANCES
    ]


def phases() -> list[Phase]:
    texts = held_out_texts()
    copying = [text[:PROMPT_LEN] * 2 + text[: PROMPT_LEN // 5] for text in texts]
    free = [text[:PROMPT_LEN] for text in texts]
    return [
        Phase("copying, 1 at once", copying[:4], 1, 0.0),
        Phase("free, 1 at once", free[:4], 1, 1.0),
        Phase("copying, 8 at once", copying, 8, 0.0),
        Phase("free, 8 at once", free, 8, 1.0),
    ]


def speculation(
    drafter: str, length: int | None, *, scripted: bool = False
) -> dict[str, Any] | None:
    """None: adaptive, over the static lengths."""
    if length == 0:
        return None
    longest = max(STATIC) if length is None else length
    config = DRAFTERS[drafter] | {"max_draft_len": longest}
    if scripted:
        config["synthetic_acceptance_rates"] = [
            0.0
        ] * longest  # until script_acceptance says otherwise
    return config | ({"adaptive": {"candidate_steps": list(STATIC)}} if length is None else {})


def serve(
    llm: LLM, phase: Phase, new_tokens: int, clock: TableClock | None = None
) -> tuple[float, float]:
    """Seconds, by `clock` if there is one, and the acceptance length (0 without speculation)."""
    if phase.acceptance is not None and llm._executor.parts.sampler._synthetic is not None:
        script_acceptance(llm._executor, phase.acceptance)
    params = [
        SamplingParams(
            max_tokens=new_tokens,
            temperature=phase.temperature or None,
            seed=seed,
            ignore_eos=True,
            detokenize=False,
        )
        for seed in range(len(phase.prompts))
    ]
    now = time.perf_counter if clock is None else lambda: clock.total
    start, outputs = now(), []
    for first in range(0, len(phase.prompts), phase.at_once):
        some = slice(first, first + phase.at_once)
        found = llm.generate(phase.prompts[some], params[some], use_tqdm=False)
        outputs += found if isinstance(found, list) else [found]
    seconds = now() - start
    stats = [output.speculative_decoding for output in outputs]
    rounds = sum(each.rounds for each in stats if each)
    return seconds, sum(
        each.num_emitted_tokens for each in stats if each
    ) / rounds if rounds else 0.0


class Comparison:
    """Every engine's seconds, pass by pass: `seconds[engine][phase]`."""

    def __init__(
        self,
        new_tokens: int,
        drafters: Sequence[str],
        times: Path | None = None,
        *,
        scripted: bool = False,
    ) -> None:
        self.phases, self.scripted = scripted_phases() if scripted else phases(), scripted
        self.new_tokens, self.drafters, self.times = new_tokens, drafters, times
        self.seconds: dict[tuple[str, str], dict[str, list[float]]] = {}
        self.acceptance: dict[tuple[str, str], float] = {}
        self.switches: dict[str, int] = {}

    def run(self, repeat: int) -> None:
        with ExitStack() as stack:
            engines = {("", "0"): stack.enter_context(LLM("zoo:llama", **SMALL))}
            for drafter in self.drafters:
                for length in (*STATIC[1:], None):
                    own = {
                        "speculative_config": speculation(drafter, length, scripted=self.scripted)
                    }
                    name = "adaptive" if length is None else str(length)
                    engines[drafter, name] = stack.enter_context(LLM("zoo:llama", **SMALL, **own))
            clocks = (
                dict.fromkeys(engines, None)
                if self.times is None
                else self._clocks(engines, self.times)
            )
            for turn in range(repeat + 1):
                for phase in self.phases:
                    for key, llm in engines.items():
                        seconds, length_accepted = serve(llm, phase, self.new_tokens, clocks[key])
                        if turn:
                            self.seconds.setdefault(key, {}).setdefault(phase.name, []).append(
                                seconds
                            )
                            self.acceptance[key[0] + key[1], phase.name] = length_accepted
            for drafter in self.drafters:
                controller = engines[drafter, "adaptive"]._executor.parts.controller
                self.switches[drafter] = controller.state()["decisions"]["num_switches"]

    def _clocks(
        self, engines: dict[tuple[str, str], LLM], times: Path
    ) -> dict[tuple[str, str], TableClock | None]:
        spreads = {"start_up_spread": START_UP_SPREAD, "round_spread": ROUND_SPREAD}
        return {
            key: TableClock(llm, times, seed=seed, **spreads)
            for seed, (key, llm) in enumerate(engines.items())
        }

    def rows(self) -> list[Row]:
        tokens = {phase.name: len(phase.prompts) * self.new_tokens for phase in self.phases}
        rows = []
        for drafter in self.drafters:
            engines = {str(length): (drafter if length else "", str(length)) for length in STATIC}
            engines["adaptive"] = (drafter, "adaptive")
            perfect = {}  # the engine for each phase
            for name in tokens:
                passes = {engine: self.seconds[key][name] for engine, key in engines.items()}
                accepted = self.acceptance[drafter + "adaptive", name]
                rows.append(row(drafter, name, tokens[name], passes, accepted))
                perfect[name] = engines[str(rows[-1].best_static)]
            passes = {
                engine: self._sums(dict.fromkeys(tokens, key)) for engine, key in engines.items()
            }
            accepted = statistics.mean(
                self.acceptance[drafter + "adaptive", name] for name in tokens
            )
            total = sum(tokens.values())
            rows.append(
                row(drafter, "moving traffic", total, passes, accepted, self._sums(perfect))
            )
        return rows

    def _sums(self, engines: dict[str, tuple[str, str]]) -> list[float]:
        """Seconds of each pass through all phases, with an engine for each phase."""
        parts = (self.seconds[key][phase] for phase, key in engines.items())
        return [sum(each) for each in zip(*parts, strict=True)]


def row(
    drafter: str,
    phase: str,
    tokens: int,
    passes: dict[str, list[float]],
    acceptance: float,
    perfect: list[float] | None = None,
) -> Row:
    """passes: seconds of each, by engine. perfect: of the best static lengths; None: there is one
    phase."""
    speeds = {
        engine: statistics.median(tokens / each for each in times)
        for engine, times in passes.items()
    }
    best = max(STATIC, key=lambda length: speeds[str(length)])
    static = passes[str(best)]
    ratios = [other / own for other, own in zip(static, passes["adaptive"], strict=True)]
    bound = statistics.median(
        other / own for other, own in zip(static, perfect or static, strict=True)
    )
    middle = statistics.median(ratios)
    return Row(drafter, phase, speeds, best, middle, min(ratios), max(ratios), bound, acceptance)


def table(rows: list[Row]) -> str:
    lines = [
        "| drafter | traffic | tok/s at 0 / 1 / 3 / 5 | adaptive | best static | adaptive / best "
        "(range) | perfect |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        static = " / ".join(f"{each.tokens_per_second[str(length)]:.0f}" for length in STATIC)
        span = f"**{each.adaptive_over_best:.2f}** ({each.lowest:.2f}–{each.highest:.2f})"
        adaptive = f"{each.tokens_per_second['adaptive']:.0f}"
        lines.append(
            f"| {each.drafter} | {each.phase} | {static} | {adaptive} | {each.best_static} | "
            f"{span} "
            f"| {each.perfect_over_best:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--drafters", default="ngram,eagle3", help=f"of {', '.join(DRAFTERS)}")
    parser.add_argument("--times", type=Path)
    parser.add_argument("--scripted", action="store_true")
    args = parser.parse_args()
    drafters = args.drafters.split(",")
    if unknown := set(drafters) - DRAFTERS.keys():
        parser.error(f"--drafters {', '.join(sorted(unknown))}: known are {', '.join(DRAFTERS)}")
    comparison = Comparison(args.new_tokens, drafters, args.times, scripted=args.scripted)
    comparison.run(args.repeat)
    rows = comparison.rows()
    print(table(rows))
    print(
        f"switches of the adaptive engines: {comparison.switches}; {torch.get_num_threads()} "
        "thread(s)"
    )
    if args.output:
        found = {
            "repeat": args.repeat,
            "new_tokens": args.new_tokens,
            "times": str(args.times) if args.times else None,
            "scripted": args.scripted,
            "rows": [asdict(each) for each in rows],
        }
        args.output.write_text(
            json.dumps(found | {"switches": comparison.switches}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
