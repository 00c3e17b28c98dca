"""Acceptance of Draft/Target at temperature 0.8 by how drafts are drawn.

    python -m benchmarks.draft_sampling [--quick] [--output result.json]

The zoo, `max_draft_len` 4, 80 held-out prompts of 128 tokens and 128 new ones, the same seeds for
all three ways. Bars: coupled drafts at least 0.9 of rejection sampling's acceptance rate, and above
that of argmax drafts."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness.report import Options, Row, Subject, main, table
from tllm_spec import LLM, SamplingParams
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.corpus import heldout_files, read_source

WAYS: dict[str, dict[str, Any]] = {
    "coupled": {},
    "rejection": {"use_rejection_sampling": True},
    "argmax": {"draft_sampling": "greedy"},
}
PROMPT_LEN = 128


def heldout_prompts(number: int) -> list[list[int]]:
    """Pieces of held-out files, several of a long file."""
    tokenizer = load_tokenizer("zoo:llama")
    texts = [tokenizer.encode((read_source(path) or "")[:20_000]) for path in heldout_files()]
    starts = range(0, 4 * PROMPT_LEN, PROMPT_LEN)
    pieces = [text[start : start + PROMPT_LEN] for start in starts for text in texts]
    return [piece for piece in pieces if len(piece) == PROMPT_LEN][:number]


def acceptance(way: dict[str, Any], prompts: list[list[int]], max_tokens: int) -> SpeculativeStats:
    config = {
        "decoding_type": "Draft_Target",
        "speculative_model": "zoo:llama-draft",
        "max_draft_len": 4,
        **way,
    }
    common = {"max_tokens": max_tokens, "temperature": 0.8, "ignore_eos": True, "detokenize": False}
    total = SpeculativeStats()
    with LLM("zoo:llama", speculative_config=config, max_batch_size=8, max_num_tokens=2048) as llm:
        for seed, prompt in enumerate(prompts):
            output = llm.generate_async(prompt, SamplingParams(seed=seed, **common)).result()
            total += output.speculative_decoding or SpeculativeStats()
    return total


def ways(options: Options) -> Iterator[Row]:
    number, max_tokens = (1, 8) if options.quick else (80, 128)
    prompts = heldout_prompts(number)
    for name, way in WAYS.items():
        yield {"drafts": name, **acceptance(way, prompts, max_tokens).to_dict()}


def ways_table(rows: Sequence[Row]) -> list[str]:
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


SUBJECTS = (Subject("ways", "Draft/Target at temperature 0.8", ways, ways_table),)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
