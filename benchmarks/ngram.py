"""How long a round's search for matches of the ends of texts takes, of NGram and SA.

    python -m benchmarks.ngram [search] [--quick] [--output result.json]

`search`: microseconds of one call of `match_suffixes` with 3 drafts, on a GPU in a CUDA graph.
Texts are random, of 1,000 different tokens; no match is longer than a few tokens. With shared
texts, a public pool of 262,144 tokens is full, and all requests share it and their own texts. For a
tree the 8 best matches are found and made a tree of 16 drafts."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch

from benchmarks.harness.device_time import call_us
from benchmarks.harness.report import Options, Row, Subject, crossed, main
from tllm_spec.config.text_search import SHARED_WIDTH
from tllm_spec.kernels.drafts.path_trees import path_trees
from tllm_spec.kernels.drafts.suffix_match import TextTable, match_suffixes

DRAFT_LEN, MAX_MATCH, NUM_TOKENS, NUM_PATHS, NUM_NODES, TOPK = 3, 64, 1000, 8, 16, 4
NUM_SHARED = 64
CALLS = 10


def full_table(batch: int, length: int, num_shared: int, device: str) -> TextTable:
    """Texts of that many tokens in all slots, of which one is the dummy."""
    num_slots = batch + 1
    size = num_slots * length + num_shared * SHARED_WIDTH
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, NUM_TOKENS, (size,), generator=generator, dtype=torch.int32)
    salts = torch.zeros(num_slots + num_shared, dtype=torch.int32, device=device)
    lens = torch.full((num_slots,), length - 1, device=device)
    return TextTable(tokens.to(device), length, lens, salts if num_shared else None)


def searches(batch: int, length: int, device: str) -> dict[str, Callable[[], object]]:
    slots = torch.arange(batch, device=device)
    own = full_table(batch, length, 0, device)

    def tree() -> object:
        found = match_suffixes(own, slots, DRAFT_LEN, MAX_MATCH, NUM_PATHS)
        return path_trees(found.drafts, found.num_drafts, NUM_NODES, TOPK)

    shared = full_table(batch, length, NUM_SHARED, device)
    return {
        "chain": lambda: match_suffixes(own, slots, DRAFT_LEN, MAX_MATCH),
        "tree": tree,
        "chain, shared texts": lambda: match_suffixes(shared, slots, DRAFT_LEN, MAX_MATCH),
    }


def search(options: Options) -> Iterator[Row]:
    lengths = (300,) if options.quick else (1100, 8192, 131072)
    for length, batch in product(lengths, (1, 2) if options.quick else (1, 8, 64)):
        for name, call in searches(batch, length, options.device).items():
            if options.device == "cuda":
                us = call_us({name: [call] * CALLS})[name]
            else:
                start = time.perf_counter()
                call()
                us = (time.perf_counter() - start) * 1e6
            yield {"requests": batch, "tokens": length, "search": name, "us": us}


def search_table(rows: Sequence[Row]) -> list[str]:
    cells = (
        (row["search"], f"{row['requests']} x {row['tokens']:,}", f"{row['us']:.1f}")
        for row in rows
    )
    return crossed("µs, by requests x tokens of each text", cells)


SUBJECTS = (Subject("search", "Matches of the ends of texts", search, search_table),)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
