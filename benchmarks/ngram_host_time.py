"""How long NGram's pool keeps the host busy in a round: 64 requests of 8,000 tokens, 1 to 5 of them
new.

    python benchmarks/ngram_host_time.py [--output result.json] [--rounds 60] [--max-pool-entries N]

`text` is source code of the standard library, split into words, spaces and signs; `random` are ids
from a vocabulary of 128,000, where nearly every n-gram is new. A round asks the pool once for each
request; its figure is the median. The first call, which indexes a request's whole prompt, is the
mean over the requests."""

import argparse
import gc
import json
import platform
import random
import re
import statistics
import sys
import sysconfig
import time
from array import array
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from tllm_spec.executor.resources.ngram_pool import NGramPool

NUM_REQUESTS, PROMPT_LEN, MAX_NEW_TOKENS = 64, 8000, 5
CHOICES = {"oldest": (True, True), "newest": (True, False), "longest": (False, True)}
MAX_ROUND_US, MAX_FIRST_CALL_MS = 200.0, 5.0


@dataclass
class Row:
    stream: str
    pool: str
    choice: str
    max_matching_ngram_size: int
    max_draft_len: int
    round_us: float
    first_call_ms: float
    mean_draft_len: float

    @property
    def meets_bars(self) -> bool:
        return self.round_us < MAX_ROUND_US and self.first_call_ms < MAX_FIRST_CALL_MS


def text_stream() -> list[int]:
    ids: dict[str, int] = {}
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    words = (re.findall(r"\w+| +|\n+|[^\w\s]", file.read_text(errors="replace")) for file in files)
    return [ids.setdefault(word, len(ids)) for file_words in words for word in file_words]


def random_stream() -> list[int]:
    return random.Random(0).choices(range(128_000), k=1_000_000)


def cut(stream: list[int], length: int) -> list[list[int]]:
    """One piece a request, of `length` tokens that are integer objects of their own, as from a
    device."""
    starts = range(0, NUM_REQUESTS * length, length)
    assert starts.stop <= len(stream), "fewer rounds: the stream is too short"
    return [array("q", stream[start : start + length]).tolist() for start in starts]


def seconds_to_propose(
    pool: NGramPool, texts: list[list[int]], draft_len: int
) -> tuple[float, int]:
    drafts = []
    start = time.perf_counter()
    for request_id, tokens in enumerate(texts):
        drafts.append(pool.propose(request_id, tokens, draft_len))
    return time.perf_counter() - start, sum(map(len, drafts))


def measure(
    pool: NGramPool, stream: list[int], draft_len: int, num_rounds: int
) -> tuple[float, float, float]:
    """Microseconds a round, milliseconds a first call, tokens a draft."""
    texts = cut(stream, PROMPT_LEN + MAX_NEW_TOKENS * num_rounds)
    coming = [text[PROMPT_LEN:] for text in texts]
    for text in texts:
        del text[PROMPT_LEN:]
    gc.collect()
    first, _ = seconds_to_propose(pool, texts, draft_len)
    rng, seconds, num_drafted = random.Random(2), [], 0
    for _ in range(num_rounds):
        for text, tokens in zip(texts, coming, strict=True):
            num_new = rng.randint(1, MAX_NEW_TOKENS)
            text += tokens[:num_new]
            del tokens[:num_new]
        duration, num_proposed = seconds_to_propose(pool, texts, draft_len)
        seconds.append(duration)
        num_drafted += num_proposed
    return (
        statistics.median(seconds) * 1e6,
        first * 1e3 / NUM_REQUESTS,
        num_drafted / num_rounds / NUM_REQUESTS,
    )


def run(num_rounds: int, max_pool_entries: int) -> list[Row]:
    streams = {"text": text_stream(), "random": random_stream()}
    rows = []
    for stream, is_public, choice, size, draft_len in product(
        streams, (False, True), CHOICES, (2, 3, 4), (4, 8)
    ):
        is_keep_all, is_use_oldest = CHOICES[choice]
        pool = NGramPool(
            max_draft_len=draft_len,
            max_matching_ngram_size=size,
            is_keep_all=is_keep_all,
            is_use_oldest=is_use_oldest,
            is_public_pool=is_public,
            max_pool_entries=max_pool_entries,
        )
        figures = measure(pool, streams[stream], draft_len, num_rounds)
        rows.append(
            Row(stream, "public" if is_public else "private", choice, size, draft_len, *figures)
        )
        print(format_row(rows[-1]), flush=True)
    return rows


def format_row(row: Row) -> str:
    options = f"{row.stream:<6} {row.pool:<7} {row.choice:<7} ngram {row.max_matching_ngram_size}"
    figures = f"{row.round_us:6.0f} us/round  {row.first_call_ms:5.2f} ms first call"
    draft_lens = f"draft {row.mean_draft_len:4.2f} of {row.max_draft_len}"
    return f"{'ok  ' if row.meets_bars else 'MISS'} {options}  {figures}  {draft_lens}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="where the rows go as JSON")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--max-pool-entries",
        type=int,
        default=2_000_000,
        help="below 520,000 a public pool is full",
    )
    args = parser.parse_args()
    rows = run(args.rounds, args.max_pool_entries)
    num_ok = sum(row.meets_bars for row in rows)
    bars = {"round_us": MAX_ROUND_US, "first_call_ms": MAX_FIRST_CALL_MS}
    limits = f"{MAX_ROUND_US:g} us a round, {MAX_FIRST_CALL_MS:g} ms a first call"
    print(f"bars: {limits}; {num_ok} of {len(rows)} rows ok")
    report = {
        "python": platform.python_version(),
        "bars": bars,
        "rows": [asdict(row) for row in rows],
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if num_ok == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
