"""Pieces of a text as a whole."""

from collections.abc import Sequence
from itertools import groupby

from tllm_spec.chat_formats.pieces import CALL, Piece


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces without empty ones, and with neighbours of the same kind joined."""
    kept = [piece for piece in pieces if piece.text]
    groups = groupby(enumerate(kept), lambda each: (each[1].kind, each[1].kind == CALL and each[0]))
    return [Piece(kind, "".join(piece.text for _, piece in group)) for (kind, _), group in groups]
