"""The requests of the equality suite, how they are sent, and how their outputs are compared with
plain decoding's."""

import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from tests.lossless.oracle import GetOracle
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.zoo.corpus import heldout_files, read_source

OUTPUT_LEN = 48
# Two candidates closer than this may swap: on a CPU rounding differs between batch shapes by about
# 1e-5.
TOLERANCE = 1e-3
# On a GPU. The best logits lie between 8 and 16, where bfloat16 numbers are 1/16 apart and float16
# numbers 1/128, and sampling divides them by 0.7.
GPU_TOLERANCE = {"bfloat16": 0.25, "float16": 0.05, "float32": 2e-3}


class NearTie(UserWarning):
    """A tolerated difference; pytest prints each one at the end of its report."""


@dataclass(frozen=True)
class Case:
    """A named request. No two cases share a prompt, so that a drafter can tell them apart."""

    name: str
    prompt: list[int]
    params: SamplingParams


@cache
def heldout_text() -> str:
    return "".join(map(read_source, heldout_files()))


def heldout_prompts(tokenizer: Tokenizer, number: int, length: int) -> list[list[int]]:
    """Pieces of held-out source text of `length` tokens and a few more each, no two of the same
    length."""
    text = heldout_text()[: number * length * 20]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    stride = len(tokens) // number
    assert stride > length + number
    return [tokens[i * stride : i * stride + length + i] for i in range(number)]


def fixed_length_cases(tokenizer: Tokenizer, prompts: Sequence[list[int]]) -> list[Case]:
    """One case for every way of sampling, each `OUTPUT_LEN` tokens long."""
    newline, indent, *common = (
        tokenizer.encode(text, add_special_tokens=False)[0]
        for text in ("\n", "    ", " self", ".", "(", ",", " =")
    )
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "temperature": {"temperature": 0.8},
        "top_p_and_top_k": {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
        "penalties": {
            "temperature": 0.7,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
        },
        "min_p": {"temperature": 1.1, "min_p": 0.05},
        "logit_bias_and_bad_words": {
            "temperature": 0.8,
            "logit_bias": {newline: 1.5, common[1]: -2.0},
            "bad_token_ids": [[common[3]], [newline, indent], [common[4], common[2]]],
        },
        "min_tokens": {
            "temperature": 0.8,
            "min_tokens": OUTPUT_LEN,
            "stop_token_ids": [newline, *common],
        },
        "logits_processor": {"temperature": 0.9, "logits_processor": avoid_repeating_and_push},
    }
    return [
        Case(
            name,
            prompt,
            SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True, seed=1000 + i, **own),
        )
        for i, ((name, own), prompt) in enumerate(zip(ways.items(), prompts, strict=True))
    ]


def avoid_repeating_and_push(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that depends on the last four tokens: with one of them wrong the text is
    another."""
    logits[tokens[-1]] = -torch.inf
    logits[sum(tokens[-4:]) * 7 % len(logits)] += 3.0
    return logits


def border_crossing_stop(tokenizer: Tokenizer, token_ids: list[int], at_least: int) -> str:
    """A string that the text of `token_ids` first has after `at_least` tokens, begun by one token
    and ended by the next."""
    ends = [tokenizer.decode(token_ids[: i + 1]) for i in range(len(token_ids))]
    for before, after in pairwise(ends[at_least:]):
        stop = before[-2:] + after[len(before) :][:2]
        if after.startswith(before) and len(stop) == 4 and ends[-1].find(stop) == len(before) - 2:
            return stop
    raise AssertionError("the text repeats itself too much to stop anywhere")


def latest_new_token(token_ids: list[int]) -> int:
    """The token whose first occurrence is the latest."""
    return max(set(token_ids), key=token_ids.index)


def generate(llm: LLM, cases: Iterable[Case], batch_size: int) -> list[RequestOutput]:
    """Outputs in the order of the cases. At most `batch_size` are in flight, and as one ends the
    next one joins."""
    in_flight: deque[RequestHandle] = deque()
    handles: list[RequestHandle] = []
    for case in cases:
        if len(in_flight) == batch_size:
            in_flight.popleft().result()
        in_flight.append(llm.generate_async(case.prompt, case.params))
        handles.append(in_flight[-1])
    return [handle.result(timeout=120) for handle in handles]


def assert_same(
    case: Case,
    output: RequestOutput,
    plain: RequestOutput,
    oracle: GetOracle,
    tolerance: float = TOLERANCE,
    *,
    at_edges: bool = False,
) -> None:
    """Equal tokens, text and reasons. Where two candidates are closer than `tolerance`, the text
    may part there (NearTie). `at_edges`: also where one is that close to what a filter excludes,
    which coarse numbers often are."""
    assert output.error is None, f"{case.name}: {output.error}"
    ours, theirs = output.outputs[0], plain.outputs[0]
    if ours.token_ids == theirs.token_ids:
        assert ours.text == theirs.text
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        return
    pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    assert place is not None, (
        f"{case.name}: {len(ours.token_ids)} tokens instead of {len(theirs.token_ids)}"
    )
    candidates = (ours.token_ids[place], theirs.token_ids[place])
    gap_of = oracle().gap_with_edges if at_edges else oracle().gap
    gap = gap_of(case.params, case.prompt, theirs.token_ids[:place], candidates)
    message = (
        f"{case.name}: token {place} is {candidates[0]} instead of {candidates[1]}, {gap:.1e} apart"
    )
    assert gap < tolerance, message
    warnings.warn(message, NearTie, stacklevel=2)
