"""How close a model is to another one, such as a quantised copy to the original: equal tokens of
their texts, and what both say of the prompts."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tllm_spec.bench.compare import Contestant, token_ids
from tllm_spec.bench.dataset import BenchRequest
from tllm_spec.bench.runner import run_requests
from tllm_spec.outputs import Logprob, RequestOutput
from tllm_spec.progress import progress
from tllm_spec.sampling_params import SamplingParams

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
