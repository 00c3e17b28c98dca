"""Makes data sets: random token ids, or pieces of text files.

Needs a vocabulary's size or a tokenizer's `encode`, never a model.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from tllm_spec.bench.dataset import BenchRequest
from tllm_spec.progress import progress

Encode = Callable[[str], list[int]]


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    def draw(self, generator: random.Random) -> int:
        """A length of 1 or more."""


@dataclass(frozen=True)
class NormalLengths:
    """Normally distributed, rounded; a length below 1 becomes 1."""

    mean: float
    stdev: float

    def draw(self, generator: random.Random) -> int:
        return max(1, round(generator.gauss(self.mean, self.stdev)))


@dataclass(frozen=True)
class UniformLengths:
    """Every length from `shortest` to `longest` is equally likely."""

    shortest: int
    longest: int

    def draw(self, generator: random.Random) -> int:
        return generator.randint(self.shortest, self.longest)


def synthetic_requests(
    num_requests: int, inputs: Lengths, outputs: Lengths, vocab_size: int, seed: int
) -> Iterator[BenchRequest]:
    """Requests of uniformly random token ids; the same seed gives the same requests."""
    generator = random.Random(seed)
    for task_id in range(num_requests):
        input_ids = generator.choices(range(vocab_size), k=inputs.draw(generator))
        yield BenchRequest(task_id, input_ids, outputs.draw(generator))


def text_requests(
    files: Sequence[Path],
    encode: Encode,
    num_requests: int,
    input_len: int,
    output_len: int,
    seed: int,
) -> Iterator[BenchRequest]:
    """Prompts of exactly `input_len` tokens that start at random lines, spread evenly over the
    files. Files shorter than a prompt are skipped.

    Raises ValueError when no file is long enough.
    """
    generator = random.Random(seed)
    shuffled = generator.sample(files, len(files))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in shuffled)
    found = islice((text for text in texts if len(encode(text)) >= input_len), num_requests)
    with progress("files", min(num_requests, len(files)), "files", every=5) as bar:
        long_enough = []
        for text in found:
            long_enough.append(text)
            bar.advance()
    if not long_enough:
        raise ValueError(
            f"none of the {len(files)} files has {input_len} tokens: lower --input-len"
        )
    with progress("prompts", num_requests, "prompts", every=5) as bar:
        for task_id in range(num_requests):
            text = long_enough[task_id % len(long_enough)]
            yield BenchRequest(task_id, _cut(text, encode, input_len, generator), output_len)
            bar.advance()


def _cut(text: str, encode: Encode, input_len: int, generator: random.Random) -> list[int]:
    """The first `input_len` tokens from a random line on, or of the whole text when too few
    follow."""
    lines = text.splitlines(keepends=True)
    first = generator.randrange(len(lines))
    input_ids = encode("".join(lines[first:]))
    return (input_ids if len(input_ids) >= input_len else encode(text))[:input_len]
