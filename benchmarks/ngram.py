"""How long NGram's pool keeps the host busy in a round: 64 requests of 8,000 tokens, 1 to 5 of them
new.

    python -m benchmarks.ngram [--quick] [--output result.json]

`text` is source code of the standard library, split into words, spaces and signs; `random` are ids
of a vocabulary of 128,000, where nearly every n-gram is new. The pool is asked once per request and
round; medians. `max_draft_len` is 4, other options have their defaults."""

import random
import re
import statistics
import sys
import sysconfig
import time
from array import array
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from benchmarks.harness.report import Options, Row, Subject, main, table
from tllm_spec.executor.resources.ngram_pool import NGramPool

DRAFT_LEN, MAX_NEW_TOKENS = 4, 5


def text_stream() -> list[int]:
    ids: dict[str, int] = {}
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    words = (re.findall(r"\w+| +|\n+|[^\w\s]", file.read_text(errors="replace")) for file in files)
    return [ids.setdefault(word, len(ids)) for file_words in words for word in file_words]


def random_stream() -> list[int]:
    return random.Random(0).choices(range(128_000), k=1_000_000)


def measure(
    pool: NGramPool, stream: list[int], num_requests: int, prompt_len: int, num_rounds: int
) -> float:
    """Median microseconds of a round."""
    length = prompt_len + MAX_NEW_TOKENS * num_rounds
    assert num_requests * length <= len(stream), "fewer rounds: the stream is too short"
    starts = range(0, num_requests * length, length)
    # Integer objects of their own, as they come from a device.
    pieces = [array("q", stream[start : start + length]).tolist() for start in starts]
    texts = [piece[:prompt_len] for piece in pieces]
    propose(pool, texts)
    rng, seconds = random.Random(2), []
    for _ in range(num_rounds):
        for text, piece in zip(texts, pieces, strict=True):
            text += piece[len(text) : len(text) + rng.randint(1, MAX_NEW_TOKENS)]
        seconds.append(propose(pool, texts))
    return statistics.median(seconds) * 1e6


def propose(pool: NGramPool, texts: list[list[int]]) -> float:
    start = time.perf_counter()
    for request_id, tokens in enumerate(texts):
        pool.propose(request_id, tokens, DRAFT_LEN)
    return time.perf_counter() - start


def host_time(options: Options) -> Iterator[Row]:
    streams = {"text": text_stream(), "random": random_stream()}
    sizes = (4, 500, 5) if options.quick else (64, 8000, 60)
    for stream, is_public, ngram_size in product(streams, (False, True), (2, 3, 4)):
        pool = NGramPool(
            max_draft_len=DRAFT_LEN,
            max_matching_ngram_size=ngram_size,
            is_keep_all=True,
            is_use_oldest=True,
            is_public_pool=is_public,
            max_pool_entries=2_000_000,
        )
        yield {
            "stream": stream,
            "pool": "public" if is_public else "private",
            "ngram_size": ngram_size,
            "round_us": measure(pool, streams[stream], *sizes),
        }


def host_time_table(rows: Sequence[Row]) -> list[str]:
    sizes = sorted({row["ngram_size"] for row in rows})
    lines: dict[str, list[str]] = {}
    for row in rows:
        name = f"{row['stream']}, {row['pool']} pool"
        lines.setdefault(name, [name]).append(f"{row['round_us']:.0f}")
    return table(("µs of a round, by n-gram size", *map(str, sizes)), lines.values())


SUBJECTS = (Subject("host_time", "NGram, 64 requests of 8k tokens", host_time, host_time_table),)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
