"""The benchmark's data set: JSON lines in TensorRT-LLM's format, read and written.

One request a line: {"task_id": 0, "input_ids": [..] or "prompt": "..", "output_tokens": 128};
`input_ids` takes precedence over `prompt`."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard

KEYS = {"task_id", "prompt", "input_ids", "output_tokens"}


@dataclass(frozen=True)
class BenchRequest:
    """One request of the data set; `prompt` holds text or token ids."""

    task_id: int
    prompt: str | list[int]
    output_tokens: int


def read_dataset(path: Path, num_requests: int = 0) -> list[BenchRequest]:
    """The first `num_requests` requests; 0: all. Raises ValueError naming file and line."""
    numbered = [
        (number, line) for number, line in enumerate(read_lines(path), start=1) if line.strip()
    ]
    if not numbered:
        raise ValueError(f"{path} has no request: one JSON object a line is expected")
    if num_requests > len(numbered):
        raise ValueError(f"{path} has {len(numbered)} requests, but num_requests is {num_requests}")
    chosen = numbered[: num_requests or None]
    return [parse_request(line, f"{path}, line {number}") for number, line in chosen]


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines. Raises ValueError for a file that cannot be read or is not UTF-8."""
    try:
        with path.open(encoding="utf-8") as lines:
            yield from lines
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def parse_request(line: str, where: str) -> BenchRequest:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: a JSON object is expected, not {line.strip()[:40]!r}")
    if unknown := sorted(entry.keys() - KEYS):
        raise ValueError(
            f"{where}: {', '.join(unknown)} not supported; the keys are {', '.join(sorted(KEYS))}"
        )
    task_id, output_tokens = entry.get("task_id"), entry.get("output_tokens")
    if not is_count(task_id):
        raise ValueError(f"{where}: task_id is {task_id!r}, an integer of 0 or more is expected")
    if not is_count(output_tokens) or not output_tokens:
        raise ValueError(
            f"{where}: output_tokens is {output_tokens!r}, an integer above 0 is expected"
        )
    return BenchRequest(task_id, parse_prompt(entry, where), output_tokens)


def parse_prompt(entry: dict[str, Any], where: str) -> str | list[int]:
    if (input_ids := entry.get("input_ids")) is not None:
        if isinstance(input_ids, list) and input_ids and all(map(is_count, input_ids)):
            return input_ids
        raise ValueError(f"{where}: input_ids must be a list of at least one token id")
    if isinstance(prompt := entry.get("prompt"), str) and prompt:
        return prompt
    raise ValueError(f"{where}: 'input_ids' (token ids) or 'prompt' (text, not empty) is needed")


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def write_dataset(requests: Iterable[BenchRequest], file: IO[str]) -> None:
    for request in requests:
        key = "prompt" if isinstance(request.prompt, str) else "input_ids"
        entry = {
            "task_id": request.task_id,
            key: request.prompt,
            "output_tokens": request.output_tokens,
        }
        file.write(json.dumps(entry) + "\n")
