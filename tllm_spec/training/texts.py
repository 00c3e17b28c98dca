"""Texts that a head is trained on: outputs of recorded traffic, or a text file."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from tllm_spec.recording.traffic_folder import read_records
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.training.head_loss import ALIGNMENT, Batch

HELD_OUT_ONE_IN = 20
MAX_HELD_OUT = 1 << 15  # tokens


class Text(NamedTuple):
    """A prompt and its output, or a piece of them."""

    tokens: Tensor
    """`[T]` int64, on the CPU."""
    start: int
    """The first token of the output, 1 or more: what is drafted follows it."""


def read_texts(data: Path, model: str, max_length: int, unroll: int) -> list[Text]:
    """The texts of a folder of recorded traffic, or of a text file, in pieces of `max_length`
    tokens or a few less. Those that have no whole round of `unroll` drafts are left out. Raises
    ValueError for a file that cannot be read."""
    if data.is_dir():
        texts = [
            Text(torch.tensor(each.prompt + each.output), max(1, len(each.prompt)))
            for each in read_records(data)
        ]
    else:
        texts = [Text(torch.tensor(load_tokenizer(model).encode(_read(data))), 1)]
    max_length = max(1, max_length // ALIGNMENT) * ALIGNMENT
    pieces = [piece for text in texts for piece in _pieces(text, max_length)]
    return [text for text in pieces if len(text.tokens) - text.start > unroll + 1]


def split(texts: list[Text], data: Path, unroll: int) -> tuple[list[Text], list[Text]]:
    """Training and held-out texts. A text's content decides, so a longer recording holds out the
    same ones, and equal texts are on the same side. Raises ValueError for fewer than two."""
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
    return ordered[number:], held_out


def draw(texts: Sequence[Text], num_tokens: int, unroll: int, share: slice) -> Batch:
    """Texts drawn by chance, one or more for each rank, that have at most `num_tokens` with their
    padding. Only outputs count."""
    at_least = share.step or 1
    chosen: list[Text] = []
    longest = 0
    for index in torch.randperm(len(texts)).tolist():
        longest = max(longest, len(texts[index].tokens))
        if len(chosen) >= at_least and (len(chosen) + 1) * longest > num_tokens:
            break
        chosen.append(texts[index])
    return padded(chosen, unroll, share)


def padded(texts: Sequence[Text], unroll: int, share: slice = slice(None)) -> Batch:
    """The texts as rows, with a chain from every token."""
    longest = max(len(text.tokens) for text in texts)
    width = -(-longest // ALIGNMENT) * ALIGNMENT + unroll
    tokens = torch.zeros(len(texts), width, dtype=torch.int64)
    counts = torch.zeros(len(texts), width, dtype=torch.bool)
    for row, (own, start) in enumerate(texts):
        tokens[row, : len(own)] = own
        counts[row, start - 1 : len(own) - 1] = True
    return Batch(tokens, counts, share)


def _pieces(text: Text, max_length: int) -> list[Text]:
    return [
        Text(tokens, max(1, text.start - index * max_length))
        for index, tokens in enumerate(torch.split(text.tokens, max_length))
    ]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
