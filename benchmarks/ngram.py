"""What NGram costs the host in a round, of requests with 8,000 tokens, 1 to 5 of them new.

    python -m benchmarks.ngram [step] [tree_step] [--quick] [--output result.json]

`step`: all that the round's forward waits for, which is lookup, checks, padding and the copy to the
slots (of the CPU). `tree_step`: the same with trees. The text is source code of the standard
library, split into words, spaces and signs. Medians of rounds. `max_draft_len` is 4, other options
have their defaults."""

import random
import re
import statistics
import sys
import sysconfig
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks.harness.report import Options, Row, Subject, crossed, main
from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape, DraftShapes, chain_of
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.decoding_rules import DecodingRules
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.ngram_pool import NGramPool
from tllm_spec.executor.resources.ngram_tree_pool import NGramTreePool
from tllm_spec.executor.resources.seq_slots import SeqSlotManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.grammar_work import GrammarWork
from tllm_spec.executor.speculative.drafting.host_drafter import HostDrafter
from tllm_spec.executor.speculative.drafting.host_tree import Room
from tllm_spec.executor.speculative.drafting.host_trees import HostTreeDrafter
from tllm_spec.executor.speculative.drafting.ngram import NGramDrafter
from tllm_spec.sampling_params import SamplingParams

DRAFT_LEN, MAX_NEW_TOKENS, VOCAB_SIZE = 4, 5, 128_000
TREE = DraftShape(DRAFT_LEN, 16, 4)


def text_stream() -> list[int]:
    ids: dict[str, int] = {}
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    words = (re.findall(r"\w+| +|\n+|[^\w\s]", file.read_text(errors="replace")) for file in files)
    return [ids.setdefault(word, len(ids)) for file_words in words for word in file_words]


class Texts:
    """Pieces of a stream, each of which grows by 1 to 5 tokens a round."""

    def __init__(
        self, stream: list[int], num_requests: int, prompt_len: int, num_rounds: int
    ) -> None:
        length = prompt_len + MAX_NEW_TOKENS * num_rounds
        assert num_requests * length <= len(stream), "fewer rounds: the stream is too short"
        starts = range(0, num_requests * length, length)
        # Integer objects of their own, as they come from a device.
        self.pieces = [array("q", stream[start : start + length]).tolist() for start in starts]
        self.texts = [piece[:prompt_len] for piece in self.pieces]
        self.rng = random.Random(2)

    def grow(self) -> None:
        for text, piece in zip(self.texts, self.pieces, strict=True):
            text += piece[len(text) : len(text) + self.rng.randint(1, MAX_NEW_TOKENS)]


def median_seconds(texts: Texts, num_rounds: int, run: Callable[[], float]) -> float:
    seconds = []
    for _ in range(num_rounds):
        texts.grow()
        seconds.append(run())
    return statistics.median(seconds)


MakeDrafter = Callable[[SeqSlotManager], HostDrafter]


def chains(ngram_size: int, manager: SeqSlotManager) -> HostDrafter:
    pool = NGramPool(
        max_draft_len=DRAFT_LEN,
        max_matching_ngram_size=ngram_size,
        is_keep_all=True,
        is_use_oldest=True,
        is_public_pool=False,
        max_pool_entries=2_000_000,
    )
    slots = SlotState(manager, DraftShapes.chains(DRAFT_LEN), torch.device("cpu"))
    return HostDrafter(NGramDrafter(pool.propose), None, slots, VOCAB_SIZE, GrammarWork())


def trees(ngram_size: int, manager: SeqSlotManager) -> HostDrafter:
    pool = NGramTreePool(
        max_draft_len=DRAFT_LEN,
        max_matching_ngram_size=ngram_size,
        is_public_pool=False,
        max_pool_entries=2_000_000,
    )
    depths = [DraftShape(depth, TREE.num_nodes, TREE.topk) for depth in range(1, DRAFT_LEN + 1)]
    shapes = DraftShapes([NO_DRAFTS, *depths], narrows=True)
    slots = SlotState(manager, shapes, torch.device("cpu"))
    inner, room = NGramDrafter(pool.propose_paths), Room(TREE.topk, TREE.num_nodes)
    return HostTreeDrafter(inner, None, slots, VOCAB_SIZE, GrammarWork(), room)


class Step:
    """A host drafter and requests in slots, as a round has them."""

    def __init__(self, texts: list[list[int]], make: MakeDrafter, shape: DraftShape) -> None:
        manager = SeqSlotManager(len(texts))
        self.drafter, self.shape = make(manager), shape
        rules = DecodingRules.from_params(
            SamplingParams(), vocab_size=VOCAB_SIZE, end_ids=(), encode=None
        )
        self.requests = [
            LlmRequest(number, text, rules, seed=0, max_tokens=10_000, draft_limit=DRAFT_LEN)
            for number, text in enumerate(texts)
        ]
        for request in self.requests:
            manager.acquire(request)

    def run(self) -> float:
        for request in self.requests:
            request.py_draft_tokens = [0] * DRAFT_LEN
        batch = ScheduledBatch(generation_requests=self.requests, shape=self.shape)
        start = time.perf_counter()
        self.drafter.prepare_draft_tokens(batch)
        return time.perf_counter() - start


def steps(options: Options, makers: dict[str, MakeDrafter], shape: DraftShape) -> Iterator[Row]:
    stream = text_stream()
    prompt_len, num_rounds = (500, 5) if options.quick else (8000, 60)
    for num_requests, column in product((1, 8) if options.quick else (1, 8, 64), makers):
        texts = Texts(stream, num_requests, prompt_len, num_rounds)
        whole = Step(texts.texts, makers[column], shape)
        whole.run()
        seconds = median_seconds(texts, num_rounds, whole.run)
        yield {"requests": num_requests, "column": column, "step_us": seconds * 1e6}


def step(options: Options) -> Iterator[Row]:
    return steps(options, {f"n-gram {n}": partial(chains, n) for n in (2, 4)}, chain_of(DRAFT_LEN))


def tree_step(options: Options) -> Iterator[Row]:
    return steps(options, {f"n-gram {n}": partial(trees, n) for n in (2, 4)}, TREE)


def step_table(rows: Sequence[Row]) -> list[str]:
    cells = ((str(row["requests"]), row["column"], f"{row['step_us']:.0f}") for row in rows)
    return crossed("requests; µs of a round", cells)


SUBJECTS = (
    Subject("step", "NGram's host drafter, text, private pool", step, step_table),
    Subject("tree_step", "NGram's host drafter, trees of 16 drafts", tree_step, step_table),
)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
