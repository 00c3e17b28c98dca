"""The benchmark's data set: JSON lines in TensorRT-LLM's format, read and written, or a folder of
recorded traffic.

One request a line: {"task_id": 0, "input_ids": [..] or "prompt": "..", "output_tokens": 128};
`input_ids` takes precedence over `prompt`. In place of a prompt may be `messages`, of which the
model's chat template makes one."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Annotated

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt
from typing_extensions import TypedDict

from tllm_spec.config.config_base import ConfigModel, check
from tllm_spec.progress import progress
from tllm_spec.recording.traffic_folder import read_lines, read_records
from tllm_spec.recording.traffic_record import json_object, named
from tllm_spec.text.chat_prompt import Conversation

ANSWER_TOKENS = 256  # at most, of messages without `output_tokens`


@dataclass(frozen=True)
class BenchRequest:
    """One request of the data set; `prompt` holds text, token ids or messages. ends_itself: at the
    model's end tokens, too, unless options say otherwise."""

    task_id: int
    prompt: str | list[int] | Conversation
    output_tokens: int
    ends_itself: bool = False


def read_dataset(path: Path, num_requests: int = 0) -> list[BenchRequest]:
    """The first `num_requests` requests, of recorded traffic the latest; 0: all. Raises ValueError
    naming file and line."""
    if path.is_dir():
        return recorded_requests(path, num_requests)
    numbered = [
        (number, line) for number, line in enumerate(read_lines(path), start=1) if line.strip()
    ]
    if not numbered:
        raise ValueError(f"{path} has no request: one JSON object a line is expected")
    if num_requests > len(numbered):
        raise ValueError(f"{path} has {len(numbered)} requests, but num_requests is {num_requests}")
    chosen = numbered[: num_requests or None]
    return [
        parse_request(line, f"{path}, line {number}", index)
        for index, (number, line) in enumerate(chosen)
    ]


def recorded_requests(folder: Path, num_requests: int = 0) -> list[BenchRequest]:
    """As long as they were recorded, or shorter: those that had end tokens have the model's."""
    records = read_records(folder, num_requests or None)
    if len(records) < num_requests or not records:
        raise ValueError(
            f"{folder} has {len(records)} recorded requests, and num_requests is {num_requests}"
        )
    return [
        BenchRequest(index, record.prompt, len(record.output), bool(record.sampling.get("end_ids")))
        for index, record in enumerate(records)
    ]


class _Message(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic's

    role: str


class _Line(ConfigModel):
    task_id: NonNegativeInt | None = None
    input_ids: Annotated[list[NonNegativeInt], Field(min_length=1)] | None = None
    messages: Annotated[list[_Message], Field(min_length=1)] | None = None
    prompt: str | None = None
    output_tokens: PositiveInt | None = None

    @check
    def _check_together(self) -> Iterator[str]:
        if not (self.input_ids or self.messages or self.prompt):
            yield "input_ids (token ids), prompt (text, not empty) or messages is needed"
        if self.output_tokens is None and (self.input_ids or not self.messages):
            yield "output_tokens = None: an integer above 0 is needed"


def parse_request(line: str, where: str, index: int = 0) -> BenchRequest:
    """index: its `task_id` without one of its own."""
    with named(where):
        entry = _Line(**json_object(line))
    task_id = index if entry.task_id is None else entry.task_id
    if entry.input_ids is None and entry.messages is not None:
        length = entry.output_tokens or ANSWER_TOKENS
        return BenchRequest(task_id, Conversation(entry.messages), length, ends_itself=True)
    assert entry.output_tokens is not None
    return BenchRequest(task_id, entry.input_ids or entry.prompt or "", entry.output_tokens)


def write_dataset(requests: Iterable[BenchRequest], file: IO[str]) -> None:
    for request in requests:
        assert not isinstance(request.prompt, Conversation)
        key = "prompt" if isinstance(request.prompt, str) else "input_ids"
        entry = {
            "task_id": request.task_id,
            key: request.prompt,
            "output_tokens": request.output_tokens,
        }
        file.write(json.dumps(entry) + "\n")


# Makes data sets: random token ids, or pieces of text files.
#
# Needs a vocabulary's size or a tokenizer's `encode`, never a model.


Encode = Callable[[str], list[int]]
Lengths = Callable[[random.Random], int]  # draws a length of 1 or more, in tokens


def normal_lengths(mean: float, stdev: float) -> Lengths:
    """Normally distributed, rounded; a length below 1 becomes 1."""
    return lambda generator: max(1, round(generator.gauss(mean, stdev)))


def uniform_lengths(shortest: int, longest: int) -> Lengths:
    """Every length from `shortest` to `longest` is equally likely."""
    return lambda generator: generator.randint(shortest, longest)


def synthetic_requests(
    num_requests: int, inputs: Lengths, outputs: Lengths, vocab_size: int, seed: int
) -> Iterator[BenchRequest]:
    """Requests of uniformly random token ids; the same seed gives the same requests."""
    generator = random.Random(seed)
    for task_id in range(num_requests):
        input_ids = generator.choices(range(vocab_size), k=inputs(generator))
        yield BenchRequest(task_id, input_ids, outputs(generator))


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
