"""Runs the same requests through several engines and compares their texts and speeds.

All engines stay in memory. Each pass runs all of them, every second pass in reverse order, so that
a slow phase of the machine affects every configuration."""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

from tllm_spec.bench.dataset import BenchRequest
from tllm_spec.bench.report import speculation_section, times_section, total_stats
from tllm_spec.bench.runner import Run, run_requests
from tllm_spec.outputs import Logprob, RequestOutput
from tllm_spec.progress import Progress, progress
from tllm_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tllm_spec.llm import LLM


@dataclass(frozen=True)
class Contestant:
    """One configuration at one concurrency (0 or less: no limit): its name, its engine and its
    measured runs."""

    name: str
    llm: "LLM"
    concurrency: int = 1
    runs: list[Run] = field(default_factory=list)

    @property
    def output_tokens_per_s(self) -> list[float]:
        return [run.output_tokens_per_s for run in self.runs]


@dataclass(frozen=True)
class Difference:
    """The first position at which a text differs from the baseline's; None: the text has
    ended."""

    name: str
    concurrency: int
    task_id: int
    position: int
    expected: int | None
    found: int | None

    def __str__(self) -> str:
        return (
            f"{self.name}, concurrency {self.concurrency}, task_id {self.task_id}: output token "
            f"{self.position} is {self.found}, the baseline has {self.expected}"
        )


def run_in_turn(
    contestants: Sequence[Contestant],
    requests: Sequence[BenchRequest],
    sampling: Sequence[SamplingParams],
    repeat: int,
    warmup: int,
    streaming: bool,
    bar: Progress | None = None,
) -> None:
    """Appends `repeat` runs to every contestant's `runs`, after `warmup` runs that are
    discarded. bar: counts requests; None: one of its own."""
    total = len(contestants) * (warmup + repeat) * len(requests)
    own = progress("compare", total, "requests", has_parts=True)
    with own if bar is None else nullcontext(bar) as shown:
        for number in range(warmup + repeat):
            for each in contestants[:: -1 if number % 2 else 1]:
                run_of = f"run {number + 1} of {warmup + repeat}"
                shown.begin(f"{each.name}, concurrency {each.concurrency}, {run_of}")
                run = run_requests(each.llm, requests, sampling, each.concurrency, streaming, shown)
                if number >= warmup:
                    each.runs.append(run)


def differences(
    contestants: Sequence[Contestant], requests: Sequence[BenchRequest]
) -> list[Difference]:
    """Texts that differ from those of the baseline's first run: one entry for each configuration
    and request. The baseline is the first configuration of the same model."""
    baselines: dict[str, Contestant] = {}
    found: dict[tuple[str, int], Difference] = {}
    for contestant in contestants:
        baseline = baselines.setdefault(contestant.llm.args.model, contestant)
        expected = [token_ids(output) for output in baseline.runs[0].outputs]
        for run in contestant.runs:
            for request, wanted, output in zip(requests, expected, run.outputs, strict=True):
                if found_at := first_difference(wanted, token_ids(output)):
                    difference = Difference(
                        contestant.name, contestant.concurrency, request.task_id, *found_at
                    )
                    found.setdefault((contestant.name, request.task_id), difference)
    return list(found.values())


def token_ids(output: RequestOutput) -> list[int]:
    return [token for sample in output.outputs for token in sample.token_ids]


def first_difference(
    expected: list[int], found: list[int]
) -> tuple[int, int | None, int | None] | None:
    """(position, expected token, found token), or None for equal texts."""
    pairs = enumerate(zip_longest(expected, found))
    return next(((position, *pair) for position, pair in pairs if pair[0] != pair[1]), None)


def comparison(contestants: Sequence[Contestant], streaming: bool) -> list[dict[str, Any]]:
    """A row for each configuration: median, lowest and highest speed of its runs, and percentiles
    of its requests' times. The speedup is a ratio of medians."""
    baseline = median(contestants[0].output_tokens_per_s)
    rows = []
    for contestant in contestants:
        speeds = contestant.output_tokens_per_s
        config = contestant.llm.args.speculative_config
        outputs = [output for run in contestant.runs for output in run.outputs]
        stats = total_stats(outputs)
        rows.append(
            {
                "configuration": contestant.name,
                "concurrency": contestant.concurrency,
                "speculation": None if config is None else speculation_section(config),
                "output_tokens_per_s": median(speeds),
                "output_tokens_per_s_range": [min(speeds), max(speeds)],
                "speedup": median(speeds) / baseline,
                **times_section(outputs, streaming=streaming),
                "acceptance_length": stats.acceptance_length if stats.rounds else None,
                "draft_acceptance_rate": stats.draft_acceptance_rate if stats.rounds else None,
                "per_position_acceptance": list(stats.per_position_acceptance),
            }
        )
    return rows


# How close a model is to another one, such as a quantised copy to the original: equal tokens of
# their texts, and what both say of the prompts.


READING = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)


def fidelity(
    contestants: Sequence[Contestant], requests: Sequence[BenchRequest]
) -> list[dict[str, Any]]:
    """A row for each model, of which each has a contestant that has run; the first is the baseline.

    `equal_tokens` and `equal_choices` are shares: of the positions of the outputs, and of those of
    the prompts, at which the model's own most probable token counts. `perplexity` is that of the
    prompts' tokens without the first of each. Prompts of one token say nothing (None).

    Raises:
        ValueError: the models' tokenizers make different tokens of the prompts.
    """
    texts = [[token_ids(output) for output in each.runs[0].outputs] for each in contestants]
    read = [_read(each, requests) for each in contestants]
    prompts = [[output.prompt_token_ids for output in outputs] for outputs in read]
    if any(own != prompts[0] for own in prompts):
        raise ValueError(
            "the models make different tokens of the prompts; only models with the same tokenizer "
            "can be compared"
        )
    choices = [_choices(outputs) for outputs in read]
    return [
        {
            "configuration": contestant.name,
            "equal_tokens": _equal_share(own_texts, texts[0]),
            "equal_choices": _equal_share([own_choices], [choices[0]]),
            "perplexity": _perplexity(outputs),
        }
        for contestant, own_texts, own_choices, outputs in zip(
            contestants, texts, choices, read, strict=True
        )
    ]


def _read(contestant: Contestant, requests: Sequence[BenchRequest]) -> list[RequestOutput]:
    sampling = [READING] * len(requests)
    with progress(f"{contestant.name}, prompts", len(requests), "requests") as bar:
        run = run_requests(contestant.llm, requests, sampling, contestant.concurrency, bar=bar)
    return run.outputs


def _equal_share(found: list[list[int]], expected: list[list[int]]) -> float | None:
    total = sum(map(len, expected))
    equal = sum(
        one == other
        for pair in zip(found, expected, strict=True)
        for one, other in zip(*pair, strict=False)
    )
    return equal / total if total else None


def _choices(outputs: Sequence[RequestOutput]) -> list[int]:
    """The most probable token at each position of the prompts."""
    return [
        next(token for token, entry in entries.items() if entry.rank == 1)
        for _, entries in _predictions(outputs)
    ]


def _perplexity(outputs: Sequence[RequestOutput]) -> float | None:
    found = [entries[token].logprob for token, entries in _predictions(outputs)]
    return math.exp(-sum(found) / len(found)) if found else None


def _predictions(outputs: Sequence[RequestOutput]) -> Iterator[tuple[int, dict[int, Logprob]]]:
    """The prompts' tokens, and the log probabilities at their positions."""
    for output in outputs:
        entries = output.outputs[0].prompt_logprobs
        for token, own in zip(output.prompt_token_ids, entries, strict=True):
            if own is not None:
                yield token, own
