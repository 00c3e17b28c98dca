"""Acceptance length of draft trees against chains of the same depth.

    python -m benchmarks.tree_acceptance [--quick] [--output result.json]

The zoo on 40 held-out prompts of 128 tokens and 128 new ones, greedy and at temperature 0.8, with
the same seeds. Trees have 4 children a node. NGram's chain is the newest continuation. Bar: an
EAGLE-3 tree of 16 drafts at least 1.10 of the chain, at both temperatures."""

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from benchmarks.draft_sampling import heldout_prompts
from benchmarks.harness.report import Options, Row, Subject, main, table
from tllm_spec import LLM, SamplingParams
from tllm_spec.outputs import SpeculativeStats

DEPTH = 4
DRAFTERS: dict[str, dict[str, Any]] = {
    "EAGLE-3": {"decoding_type": "Eagle3", "speculative_model": "zoo:llama-eagle3"},
    "Draft/Target": {
        "decoding_type": "Draft_Target",
        "speculative_model": "zoo:llama-draft",
        "draft_target_one_model": True,
    },
    "NGram": {
        "decoding_type": "NGram",
        "max_matching_ngram_size": 3,
        "is_use_oldest": False,
        "max_rejected_rounds": None,
    },
}
TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {},
    **{f"tree of {n}": TREE | {"max_total_draft_tokens": n} for n in (8, 16, 32, 48)},
}
# At a temperature: the draft's likeliest tokens instead of those that its noise chooses.
ARGMAX = {"tree of 16, argmax": SHAPES["tree of 16"] | {"draft_sampling": "greedy"}}
TEMPERATURES = {"greedy": 0.0, "T = 0.8": 0.8}


def acceptance(
    config: dict[str, Any], prompts: list[list[int]], max_tokens: int, temperature: float
) -> SpeculativeStats:
    common = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True}
    params = [SamplingParams(seed=seed, detokenize=False, **common) for seed in range(len(prompts))]
    with LLM("zoo:llama", speculative_config=config, max_batch_size=8, max_num_tokens=2048) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert isinstance(outputs, list)
    found = [output.speculative_decoding or SpeculativeStats() for output in outputs]
    return sum(found, SpeculativeStats())


def shapes(options: Options) -> Iterator[Row]:
    number, max_tokens = (1, 8) if options.quick else (40, 128)
    prompts = heldout_prompts(number)
    drafters = ["EAGLE-3"] if options.quick else list(DRAFTERS)
    for drafter, (name, temperature) in product(drafters, TEMPERATURES.items()):
        ways = SHAPES | (ARGMAX if temperature and drafter != "NGram" else {})
        if options.quick:
            ways = {shape: ways[shape] for shape in ("chain", "tree of 16")}
        for shape, own in ways.items():
            config = DRAFTERS[drafter] | {"max_draft_len": DEPTH} | own
            stats = acceptance(config, prompts, max_tokens, temperature)
            where = {"drafter": drafter, "temperature": name, "shape": shape}
            yield where | {"acceptance_length": stats.acceptance_length}


def shapes_table(rows: Sequence[Row]) -> list[str]:
    chains = {
        (row["drafter"], row["temperature"]): row["acceptance_length"]
        for row in rows
        if row["shape"] == "chain"
    }
    lines = [
        [
            row["drafter"],
            row["temperature"],
            row["shape"],
            f"{row['acceptance_length']:.2f}",
            f"{row['acceptance_length'] / chains[row['drafter'], row['temperature']]:.2f}",
        ]
        for row in rows
    ]
    return table(("drafter", "sampling", "drafts", "acceptance length", "of the chain"), lines)


SUBJECTS = (Subject("shapes", "Trees and chains of depth 4", shapes, shapes_table),)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
