"""Guided decoding: what it costs in a round, and what its forced text gains as drafts.

    python -m benchmarks.guided [rounds] [forced_text] [fills]

rounds       milliseconds of a round with overlap in batches of which no request, half of them, or
             all have a grammar, and the ratio over batches without one
forced_text  tokens per round of NGram and EAGLE-3 (K = 4) on JSON schemas, with drafts of forced
             text, with drafts that are only cut where the grammar excludes them, and with neither:
             the zoo
fills        milliseconds of the host for one mask of a text of random tokens, by grammar, and for
             the masks of a round of 16 requests, with 3 drafts each and without

Rounds: random prompts; with `--shape llama-8b` random weights. Drafts are verified without
synthetic acceptance, which would accept what a grammar excludes. The grammar is of JSON lines that
never end; the texts of all requests differ. The kinds of batches take turns."""

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, product
from typing import Any
from unittest import mock

from benchmarks.harness.engine import Rounds, in_turns, release
from benchmarks.harness.grammars import FILLED, JsonLines, random_object, walks_of
from benchmarks.harness.models import open_models
from benchmarks.harness.report import Options, Row, Subject, main, table
from benchmarks.rounds import Case
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.sampling_params import SamplingParams

K = 3
REQUESTS = 16
KINDS = {"none": 0.0, "half": 0.5, "all": 1.0}
DRAFTERS = {
    "NGram": {"decoding_type": "NGram", "max_draft_len": K + 1, "max_matching_ngram_size": 3},
    "EAGLE-3": {
        "decoding_type": "Eagle3", "speculative_model": "zoo:llama-eagle3", "max_draft_len": K + 1
    },
}  # fmt: skip


def rounds(options: Options) -> Iterator[Row]:
    with open_models(options.shape, options.device) as models:
        case = Case(options, models)
        case.prompt_len = 256 if case.is_8b else 32
        case.rounds, case.turns = (48, 3) if case.is_8b else (8, 1)
        sizes = ((1, 8) if options.quick else (1, 8, 64)) if case.is_8b else (1, 2)
        eagle3 = models.eagle3(K, synthetic_acceptance_rates=None)
        drafting = case.engine(*sizes, speculative_config=eagle3)
        plain = case.engine(*sizes, weights_of=drafting)
        lines = JsonLines(plain.built.model_config.vocab_size)
        for path, engine in (("plain", plain), ("EAGLE-3", drafting)):
            for size in sizes:
                yield from _of_batches(case, engine, lines, size, {"path": path})
            engine.stop()


def _of_batches(
    case: Case, engine: Rounds, lines: JsonLines, size: int, about: Row
) -> Iterator[Row]:
    def restarted_ms(number: int) -> float:
        engine.start(size, case.prompt_len, lines.states(number))
        return engine.round_ms(case.rounds)

    kinds = {name: part for name, part in KINDS.items() if size > 1 or part != 0.5}
    sides = {name: partial(restarted_ms, round(size * part)) for name, part in kinds.items()}
    found = in_turns(sides, case.turns)
    for name, values in found.items():
        pairs = zip(values, found["none"], strict=True)
        ratio, ms = statistics.median(own / free for own, free in pairs), statistics.median(values)
        yield about | {"batch_size": size, "guided": name, "ms": ms, "ratio": ratio}
    release()


def ratios(rows: Sequence[Row]) -> list[str]:
    cells: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
    for row in rows:
        text = f"{row['ms']:.3f} ({row['ratio']:.3f})"
        cells[row["path"], row["batch_size"]][row["guided"]] = text
    lines = [
        (path, str(size), *(own.get(kind, "–") for kind in KINDS))
        for (path, size), own in cells.items()
    ]
    return table(("", "batch", *KINDS), lines)


def forced_text(options: Options) -> Iterator[Row]:
    """The texts must be equal."""
    number = 8 if options.quick else 48
    better, texts = GrammarState.better_drafts, set[tuple[str, ...]]()
    ways: dict[str, Callable[[GrammarState, list[int], int], list[int]]] = {
        "neither": lambda state, drafts, limit: drafts,
        "cut": lambda state, drafts, limit: better(state, drafts, 0),
        "forced text": better,
    }
    for (drafter, config), (name, way) in product(DRAFTERS.items(), ways.items()):
        with mock.patch.object(GrammarState, "better_drafts", way):
            outputs = _json_outputs(config, options.device, number)
        texts.add(tuple(output.outputs[0].text for output in outputs))
        assert len(texts) == 1, "the text depends on the drafts"
        stats = [each.speculative_decoding for each in outputs if each.speculative_decoding]
        num_drafted = sum(sum(each.per_position_drafted) for each in stats)
        num_accepted = sum(sum(each.per_position_accepted) for each in stats)
        num_tokens = sum(each.num_emitted_tokens for each in stats)
        yield {
            "drafter": drafter,
            "drafts": name,
            "acceptance_length": num_tokens / sum(each.rounds for each in stats),
            "draft_acceptance_rate": num_accepted / num_drafted,
        }


def _json_outputs(config: dict[str, Any], device: str, number: int) -> list[RequestOutput]:
    params = [
        SamplingParams(
            max_tokens=160,
            seed=seed,
            temperature=(0.0, 0.8)[seed % 2],
            guided_decoding={"json": random_object(seed)},
        )
        for seed in range(number)
    ]
    with LLM("zoo:llama", device=device, max_batch_size=8, speculative_config=config) as llm:
        outputs = llm.generate(["import json\n"] * number, params, use_tqdm=False)
    assert isinstance(outputs, list)
    return outputs


def drafts_table(rows: Sequence[Row]) -> list[str]:
    cells = [
        (
            row["drafter"],
            row["drafts"],
            f"{row['acceptance_length']:.3f}",
            f"{row['draft_acceptance_rate']:.3f}",
        )
        for row in rows
    ]
    return table(("drafter", "drafts", "tokens per round", "accepted drafts"), cells)


def fills(options: Options) -> Iterator[Row]:
    size, num_tokens = (8192, 40) if options.quick else (128256, 32)
    for name, about in FILLED.items():
        alone = [walks_of(*about, size, 1, num_tokens, seed=seed)[0] for seed in range(3)]
        masks = sorted(chain.from_iterable(alone))
        _, plain = walks_of(*about, size, REQUESTS, num_tokens)
        _, drafted = walks_of(*about, size, REQUESTS, num_tokens, K)
        yield {
            "grammar": name,
            "tokens": size,
            "median_ms": 1000 * statistics.median(masks),
            "p99_ms": 1000 * masks[len(masks) * 99 // 100],
            "longest_ms": 1000 * masks[-1],
            "round_ms": 1000 * statistics.median(plain),
            "drafted_round_ms": 1000 * statistics.median(drafted),
        }


def fills_table(rows: Sequence[Row]) -> list[str]:
    keys = ("median_ms", "p99_ms", "longest_ms", "round_ms", "drafted_round_ms")
    cells = [(row["grammar"], *(f"{row[key]:.3f}" for key in keys)) for row in rows]
    return table(("grammar", "median", "p99", "longest", "16 requests", "with 3 drafts"), cells)


SUBJECTS = (
    Subject("rounds", "Guided rounds, ms (over none)", rounds, ratios),
    Subject("forced_text", "Forced text as drafts", forced_text, drafts_table),
    Subject("fills", "A mask of 128,256 tokens, ms", fills, fills_table),
)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
