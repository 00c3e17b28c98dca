"""The benchmark's data set: JSON lines in TensorRT-LLM's format, read and written, or a folder of
recorded traffic.

One request a line: {"task_id": 0, "input_ids": [..] or "prompt": "..", "output_tokens": 128};
`input_ids` takes precedence over `prompt`. In place of a prompt may be `messages`, of which the
model's chat template makes one."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard

from tllm_spec.recording.traffic_folder import read_records
from tllm_spec.text.chat_prompt import Conversation

KEYS = {"task_id", "prompt", "input_ids", "messages", "output_tokens"}
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


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines. Raises ValueError for a file that cannot be read or is not UTF-8."""
    try:
        with path.open(encoding="utf-8") as lines:
            yield from lines
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def parse_request(line: str, where: str, index: int = 0) -> BenchRequest:
    """index: its `task_id` without one of its own."""
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
    prompt, task_id = parse_prompt(entry, where), entry.get("task_id", index)
    is_chat = isinstance(prompt, Conversation)
    output_tokens = entry.get("output_tokens", ANSWER_TOKENS if is_chat else None)
    if not is_count(task_id):
        raise ValueError(f"{where}: task_id is {task_id!r}, an integer of 0 or more is expected")
    if not is_count(output_tokens) or not output_tokens:
        raise ValueError(
            f"{where}: output_tokens is {output_tokens!r}, an integer above 0 is expected"
        )
    return BenchRequest(task_id, prompt, output_tokens, ends_itself=is_chat)


def parse_prompt(entry: dict[str, Any], where: str) -> str | list[int] | Conversation:
    if (input_ids := entry.get("input_ids")) is not None:
        if isinstance(input_ids, list) and input_ids and all(map(is_count, input_ids)):
            return input_ids
        raise ValueError(f"{where}: input_ids must be a list of at least one token id")
    if (messages := entry.get("messages")) is not None:
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise ValueError(f"{where}: messages must be a list of objects with role and content")
        return Conversation(messages)
    if isinstance(prompt := entry.get("prompt"), str) and prompt:
        return prompt
    raise ValueError(
        f"{where}: 'input_ids' (token ids) or 'prompt' (text, not empty) or 'messages' is needed"
    )


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
