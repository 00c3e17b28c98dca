"""Acceptance of the zoo's Draft/Target at T > 0 by how drafts are drawn: coupled, rejection
sampling, argmax.

    python benchmarks/draft_sampling.py [--output result.json] [--prompts 80] [--new-tokens 128]
    [--temperature 0.8]

Held-out prompts, the same seeds for all three. Bars: coupled at least 0.9 of rejection sampling,
and above argmax."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tllm_spec import LLM, SamplingParams
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.tokenizer import load_tokenizer
from tllm_spec.zoo.corpus import heldout_files, read_source

WAYS: dict[str, dict[str, Any]] = {
    "coupled": {},
    "rejection": {"use_rejection_sampling": True},
    "argmax": {"draft_sampling": "greedy"},
}


def heldout_prompts(number: int, length: int) -> list[list[int]]:
    """Pieces of held-out files, several of a long file."""
    tokenizer = load_tokenizer("zoo:llama")
    texts = [tokenizer.encode((read_source(path) or "")[:20_000]) for path in heldout_files()]
    pieces = [
        text[start : start + length] for start in range(0, 4 * length, length) for text in texts
    ]
    return [piece for piece in pieces if len(piece) == length][:number]


def acceptance(
    way: dict[str, Any], prompts: list[list[int]], new_tokens: int, temperature: float
) -> SpeculativeStats:
    """The figures of all prompts together with `max_draft_len` 4."""
    config = {
        "decoding_type": "Draft_Target",
        "speculative_model": "zoo:llama-draft",
        "max_draft_len": 4,
        **way,
    }
    params = [
        SamplingParams(
            max_tokens=new_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=True,
            detokenize=False,
        )
        for seed in range(len(prompts))
    ]
    total = SpeculativeStats()
    with LLM("zoo:llama", speculative_config=config, max_batch_size=8, max_num_tokens=2048) as llm:
        for prompt, param in zip(prompts, params, strict=True):
            total += (
                llm.generate_async(prompt, param).result().speculative_decoding
                or SpeculativeStats()
            )
    return total


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()
    prompts = heldout_prompts(args.prompts, 128)
    found = {
        name: acceptance(way, prompts, args.new_tokens, args.temperature)
        for name, way in WAYS.items()
    }
    for name, stats in found.items():
        rates = " ".join(f"{rate:.2f}" for rate in stats.per_position_acceptance)
        print(
            f"{name:<10} length {stats.acceptance_length:.2f}  rate "
            f"{stats.draft_acceptance_rate:.3f}  each {rates}"
        )
    coupled, rejection, argmax = (found[name].draft_acceptance_rate for name in WAYS)
    print(
        f"coupled / rejection {coupled / rejection:.3f} (bar 0.9), coupled / argmax "
        f"{coupled / argmax:.3f} (bar 1)"
    )
    if args.output:
        args.output.write_text(
            json.dumps({name: s.to_dict() for name, s in found.items()}, indent=2) + "\n"
        )
    return 0 if coupled >= 0.9 * rejection and coupled > argmax else 1


if __name__ == "__main__":
    sys.exit(main())
