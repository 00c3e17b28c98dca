"""Acceptance of the zoo's drafters on held-out prompts of 128 tokens, with the same seeds for all
ways of drafting; parts of cpu.py."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from benchmarks.harness.report import Options, Row, table
from tllm_spec import LLM, SamplingParams
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.corpus import heldout_files, read_source

PROMPT_LEN = 128
DEPTH = 4
DRAFT_TARGET = {
    "decoding_type": "Draft_Target", "speculative_model": "zoo:llama-draft",
    "max_draft_len": DEPTH,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "coupled": {},
    "rejection": {"use_rejection_sampling": True},
    "argmax": {"draft_sampling": "greedy"},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "EAGLE-3": {"decoding_type": "Eagle3", "speculative_model": "zoo:llama-eagle3"},
    "P-EAGLE": {"decoding_type": "Eagle3", "speculative_model": "zoo:llama-peagle"},
    "Draft/Target": DRAFT_TARGET | {"draft_target_one_model": True},
    "NGram": {
        "decoding_type": "NGram", "max_matching_ngram_size": 3, "is_use_oldest": False,
        "max_rejected_rounds": None,
    },
}  # fmt: skip
TREE = {"max_draft_len": DEPTH} | {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"max_draft_len": DEPTH},
    **{f"tree of {n}": TREE | {"max_total_draft_tokens": n} for n in (8, 16, 32, 48)},
}
# At a temperature: the draft's likeliest tokens instead of those that its noise chooses.
ARGMAX = {"tree of 16, argmax": SHAPES["tree of 16"] | {"draft_sampling": "greedy"}}
TEMPERATURES = {"greedy": 0.0, "T = 0.8": 0.8}


def heldout_prompts(number: int) -> list[list[int]]:
    """Pieces of held-out files, several of a long file."""
    tokenizer = load_tokenizer("zoo:llama")
    texts = [tokenizer.encode((read_source(path) or "")[:20_000]) for path in heldout_files()]
    starts = range(0, 4 * PROMPT_LEN, PROMPT_LEN)
    pieces = [text[start : start + PROMPT_LEN] for start in starts for text in texts]
    return [piece for piece in pieces if len(piece) == PROMPT_LEN][:number]


def acceptance(
    config: dict[str, Any], number: int, max_tokens: int, temperature: float
) -> SpeculativeStats:
    """The figures over `number` prompts."""
    common = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True}
    params = [SamplingParams(seed=seed, detokenize=False, **common) for seed in range(number)]
    with LLM("zoo:llama", speculative_config=config, max_batch_size=8, max_num_tokens=2048) as llm:
        outputs = llm.generate(heldout_prompts(number), params, use_tqdm=False)
    assert isinstance(outputs, list)
    found = [output.speculative_decoding or SpeculativeStats() for output in outputs]
    return sum(found, SpeculativeStats())


def sampling(options: Options) -> Iterator[Row]:
    number, max_tokens = (1, 8) if options.quick else (80, 128)
    for name, way in WAYS.items():
        stats = acceptance(DRAFT_TARGET | way, number, max_tokens, 0.8)
        yield {"drafts": name, **stats.to_dict()}


def sampling_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        [
            row["drafts"],
            f"{row['acceptance_length']:.2f}",
            f"{row['draft_acceptance_rate']:.3f}",
            " / ".join(f"{rate:.2f}" for rate in row["per_position_acceptance"]),
        ]
        for row in rows
    ]
    return table(("drafts", "acceptance length", "acceptance rate", "by position"), lines)


def trees(options: Options) -> Iterator[Row]:
    number, max_tokens = (1, 8) if options.quick else (40, 128)
    drafters = ["EAGLE-3"] if options.quick else list(DRAFTERS)
    for drafter, (name, temperature) in product(drafters, TEMPERATURES.items()):
        ways = SHAPES | (ARGMAX if temperature and drafter != "NGram" else {})
        for shape in ("chain", "tree of 16") if options.quick else ways:
            stats = acceptance(DRAFTERS[drafter] | ways[shape], number, max_tokens, temperature)
            where = {"drafter": drafter, "temperature": name, "shape": shape}
            yield where | {"acceptance_length": stats.acceptance_length}


def trees_table(rows: Sequence[Row]) -> list[str]:
    lines, chain = [], 0.0
    for row in rows:  # a chain comes before its trees
        length = row["acceptance_length"]
        chain = length if row["shape"] == "chain" else chain
        where = [row["drafter"], row["temperature"], row["shape"]]
        lines.append([*where, f"{length:.2f}", f"{length / chain:.2f}"])
    return table(("drafter", "sampling", "drafts", "acceptance length", "of the chain"), lines)
