"""Tokens a round of an EAGLE-3 head, of matches in the text, and of both together, in chains and in
trees, and of a draft model with and without matches, on the zoo.

The target is made to emit a given text: held-out code, or an edit of the code in the prompt that a
script made: a name is changed, and of ten lines one is left out and one of other code is new. So
each drafter is measured on the same text, and the zoo's small target need not know how to edit."""

import keyword
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.harness.report import Options, Row, table
from tllm_spec import LLM, SamplingParams
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.corpus import heldout_files, read_source

DRAFT_LEN, NUM_TEXTS = 5, 16
HEAD = {
    "decoding_type": "Eagle3",
    "speculative_model": "zoo:llama-eagle3",
    "max_draft_len": DRAFT_LEN,
}
TREE = HEAD | {
    "use_dynamic_tree": True,
    "dynamic_tree_max_topK": 4,
    "max_total_draft_tokens": 16,
}
MODEL = HEAD | {"decoding_type": "Draft_Target", "speculative_model": "zoo:llama-draft"}
DRAFTERS: dict[str, dict[str, Any]] = {
    "EAGLE-3": HEAD,
    "SA": {"decoding_type": "SA", "max_draft_len": DRAFT_LEN},
    "both": HEAD | {"sa_config": {}},
    "both, threshold 4": HEAD | {"sa_config": {"threshold": 4}},
    "tree": TREE,
    "tree of both": TREE | {"sa_config": {}},
    "tree of both, threshold 4": TREE | {"sa_config": {"threshold": 4}},
    "draft model": MODEL,
    "draft model and SA": MODEL | {"sa_config": {}},
}
GOALS = {
    ("edits", "both", "EAGLE-3"): 1.25,
    ("edits", "both", "SA"): 1.02,
    ("code", "both", "EAGLE-3"): 0.99,
    ("edits", "tree of both", "both"): 1.02,
    ("code", "tree of both", "tree"): 0.99,
    ("edits", "draft model and SA", "draft model"): 1.25,
    ("edits", "draft model and SA", "SA"): 1.02,
    ("code", "draft model and SA", "draft model"): 0.99,
}


class Replayed:
    """A logits processor: the target's choice is the next token of a text."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = [*tokens, 0]

    def __call__(self, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        chosen = self._tokens[min(len(tokens), len(self._tokens) - 1)]
        return torch.full_like(logits, -1e4).index_fill_(0, torch.tensor([chosen]), 0.0)


def edited(code: str, other: str) -> str:
    """In every ten lines the fourth is followed by one of `other`, and the eighth left out."""
    names = Counter(re.findall(r"\b[a-z_]{4,}\b", code))
    name = next((name for name, _ in names.most_common() if not keyword.iskeyword(name)), "None")
    lines = re.sub(rf"\b{name}\b", f"new_{name}", code).splitlines(keepends=True)
    new = iter([line for line in other.splitlines(keepends=True) if line.strip()])
    for number in range(len(lines)):
        if number % 10 == 3:
            lines[number] += next(new, "")
        elif number % 10 == 7:
            lines[number] = ""
    return "".join(lines)


def replays(kind: str, number: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and what follows them."""
    tokenizer, found = load_tokenizer("zoo:llama"), []
    for path in heldout_files():
        lines = read_source(path).splitlines(keepends=True)
        for first in range(0, len(lines) - 80, 80):
            code, rest = ("".join(lines[first + n : first + n + 40]) for n in (0, 40))
            prompt = tokenizer.encode(code)
            follows = tokenizer.encode("\n\n" + edited(code, rest) if kind == "edits" else rest)
            if 300 < len(prompt) < 900 and 300 < len(follows) < 900:
                found.append((prompt, follows))
    return found[:: max(1, len(found) // number)][:number]


def tokens_a_round(
    config: dict[str, Any], texts: list[tuple[list[int], list[int]]]
) -> SpeculativeStats:
    params = [
        SamplingParams(
            max_tokens=len(follows),
            ignore_eos=True,
            detokenize=False,
            logits_processor=Replayed(prompt + follows),
        )
        for prompt, follows in texts
    ]
    total = SpeculativeStats()
    with LLM("zoo:llama", speculative_config=config, max_batch_size=8, max_num_tokens=2048) as llm:
        prompts = [prompt for prompt, _ in texts]
        for output in llm.generate(prompts, params, use_tqdm=False):
            total += output.speculative_decoding or SpeculativeStats()
    return total


def matches(options: Options) -> Iterator[Row]:
    for kind in ("edits", "code"):
        texts = replays(kind, 1 if options.quick else NUM_TEXTS)
        if options.quick:
            texts = [(prompt, follows[:20]) for prompt, follows in texts]
        for name, config in DRAFTERS.items():
            stats = tokens_a_round(config, texts)
            yield {"text": kind, "drafter": name, "acceptance_length": stats.acceptance_length}


def matches_table(rows: Sequence[Row]) -> list[str]:
    by_text: dict[str, dict[str, float]] = {}
    for row in rows:
        by_text.setdefault(row["text"], {})[row["drafter"]] = row["acceptance_length"]
    lines = []
    for text, found in by_text.items():
        ratios = [
            f"{one}: {found[one] / found[other]:.2f} of {other} (goal {goal})"
            for (kind, one, other), goal in GOALS.items()
            if kind == text
        ]
        lines.append([text, *(f"{found[name]:.2f}" for name in DRAFTERS), ", ".join(ratios)])
    return table(("tokens a round", *DRAFTERS, "goals"), lines)
