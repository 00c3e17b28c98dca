"""Texts that a head is trained on: outputs of recorded traffic, or a text file."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from tllm_spec.executor.device.transfer import to_device
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.registry import model_config
from tllm_spec.recording.traffic_folder import (
    files_of,
    read_lines,
    read_records,
    read_states_file,
    states_files_of,
)
from tllm_spec.recording.traffic_record import TrafficRecord
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.training.draft_head import ALIGNMENT, Batch
from tllm_spec.zoo.registry import resolve_model

HELD_OUT_ONE_IN = 20
MAX_HELD_OUT = 1 << 15  # tokens


class Text(NamedTuple):
    """A prompt and its output, or a piece of them."""

    tokens: Tensor
    """`[T]` int64, on the CPU."""
    start: int
    """The first token of the output, 1 or more: what is drafted follows it."""
    file: Path | None = None
    """Has the target's hidden states of the whole text; None: they were not recorded."""
    offset: int = 0
    """The place of a piece in the text."""
    record: TrafficRecord | None = None
    """None: of a text file."""


def read_texts(
    data: Path, model: str, max_length: int, unroll: int, layers: tuple[int, ...]
) -> list[Text]:
    """The texts of a folder of recorded traffic, or of a text file, in pieces of `max_length`
    tokens or a few less. Those that have no whole round of `unroll` drafts are left out. Raises
    ValueError for a file that cannot be read, or that has tokens of another model or states of
    other layers."""
    if data.is_dir():
        config = model_config(resolve_model(model))
        known = dict(_with_states(file, layers, config) for file in states_files_of(data))
        records = read_records(data) if files_of(data) or not known else []
        texts = [*known.values()]
        for each in (record for record in records if record.id not in known):
            each.check_tokens(config.vocab_size)
            texts.append(_text(each.prompt + each.output, each))
    else:
        texts = [Text(torch.tensor(load_tokenizer(model).encode("".join(read_lines(data)))), 1)]
    max_length = max(1, max_length // ALIGNMENT) * ALIGNMENT
    pieces = [piece for text in texts for piece in _pieces(text, max_length)]
    return [text for text in pieces if len(text.tokens) - text.start > unroll + 1]


def split(texts: list[Text], data: Path, unroll: int) -> tuple[list[Text], list[Text]]:
    """Training texts by length, and held-out texts. A text's content decides, so a longer recording
    holds out the same ones, and equal texts are on the same side. Raises ValueError for fewer than
    two."""
    if len(texts) < 2:
        raise ValueError(
            f"{data} has {len(texts)} texts with more than {unroll + 1} output tokens "
            f"(--unroll {unroll}); 2 or more are needed"
        )
    ordered = sorted(texts, key=lambda text: crc32(text.tokens.numpy().tobytes()))
    number = max(1, len(ordered) // HELD_OUT_ONE_IN)
    held_out, size = ordered[:1], len(ordered[0].tokens)
    for text in ordered[1:number]:
        size += len(text.tokens)
        if size > MAX_HELD_OUT:
            break
        held_out.append(text)
    return sorted(ordered[number:], key=lambda text: len(text.tokens)), held_out


def unseen_records(training: Sequence[Text], held_out: Sequence[Text]) -> list[TrafficRecord]:
    """The records of held-out texts of which no piece is trained on."""
    seen = {text.record.id for text in training if text.record is not None}
    found = {text.record.id: text.record for text in held_out if text.record is not None}
    return [record for name, record in found.items() if name not in seen]


def draw(
    texts: Sequence[Text], num_tokens: int, unroll: int, device: torch.device, share: slice
) -> Batch:
    """Texts drawn by chance, one or more for each rank, that have at most `num_tokens` with their
    padding. They are neighbours in `texts`, so that those of similar lengths come together. All
    have hidden states or none. Only outputs count."""
    at_least = share.step or 1
    has_states = texts[_below(len(texts))].file is not None
    alike = [text for text in texts if (text.file is not None) == has_states]
    place = _below(len(alike))
    number = max(at_least, num_tokens // len(alike[place].tokens))
    nearby = alike[max(0, place - number) : place + number + 1]
    chosen: list[Text] = []
    longest = 0
    for text in (nearby[index] for index in torch.randperm(len(nearby)).tolist()):
        longest = max(longest, len(text.tokens))
        if len(chosen) >= at_least and (len(chosen) + 1) * longest > num_tokens:
            break
        chosen.append(text)
    return padded(chosen, unroll, device, share)


def batches(texts: Sequence[Text], num_tokens: int) -> list[list[Text]]:
    """All texts, in batches of at most `num_tokens`, or of one text. The texts of a batch count as
    long as its longest one. They have similar lengths, and all have hidden states or none."""
    found: list[list[Text]] = []
    for text in sorted(texts, key=lambda text: (text.file is None, len(text.tokens))):
        last = found[-1] if found else []
        is_alike = bool(last) and (last[0].file is None) == (text.file is None)
        if is_alike and (len(last) + 1) * len(text.tokens) <= num_tokens:
            last.append(text)
        else:
            found.append([text])
    return found


def padded(
    texts: Sequence[Text], unroll: int, device: torch.device, share: slice = slice(None)
) -> Batch:
    """The texts as rows, with a chain from every token."""
    longest = max(len(text.tokens) for text in texts)
    width = -(-longest // ALIGNMENT) * ALIGNMENT + unroll
    counts = torch.zeros(len(texts), width, dtype=torch.bool)
    for row, text in enumerate(texts):
        counts[row, text.start - 1 : len(text.tokens) - 1] = True
    own = texts[share]
    tokens = _rows([text.tokens for text in own], width)
    read = [_states_of(text) for text in own if text.file is not None]
    states = None
    if read:
        captured, hidden = (
            to_device(_rows(parts, width), device) for parts in zip(*read, strict=True)
        )
        states = captured, hidden
    return Batch(to_device(tokens, device), counts, share, states)


def _below(number: int) -> int:
    return int(torch.randint(number, ()))


def _rows(parts: Sequence[Tensor], width: int) -> Tensor:
    """`[T, ...]` each -> `[b, width, ...]`, padded with zeros."""
    rows = parts[0].new_zeros(len(parts), width, *parts[0].shape[1:])
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return rows


def _states_of(text: Text) -> tuple[Tensor, Tensor]:
    assert text.file is not None
    found = read_states_file(text.file)
    piece = slice(text.offset, text.offset + len(text.tokens))
    return found.captured[piece], found.hidden[piece]


def _with_states(file: Path, layers: tuple[int, ...], config: ModelConfig) -> tuple[str, Text]:
    """With the id of its record."""
    found = read_states_file(file)
    found.record.check_tokens(config.vocab_size)
    if found.hidden.shape[1] != config.hidden_size:
        raise ValueError(
            f"{file} has hidden states of {found.hidden.shape[1]} values; the model has "
            f"{config.hidden_size}"
        )
    if found.layers != layers:
        raise ValueError(
            f"{file} has hidden states of the layers {list(found.layers)}; the head reads "
            f"{list(layers)}"
        )
    return found.record.id, _text(found.ids.tolist(), found.record)._replace(file=file)


def _text(tokens: list[int], record: TrafficRecord) -> Text:
    return Text(torch.tensor(tokens), max(1, len(record.prompt)), record=record)


def _pieces(text: Text, max_length: int) -> list[Text]:
    return [
        text._replace(
            tokens=tokens, start=max(1, text.start - index * max_length), offset=index * max_length
        )
        for index, tokens in enumerate(torch.split(text.tokens, max_length))
    ]
