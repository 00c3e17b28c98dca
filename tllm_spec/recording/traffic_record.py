"""One served request as a line of recorded traffic: what replaying it needs, and what happened."""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import NonNegativeInt

from tllm_spec.config.config_base import ConfigModel
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.outputs import SpeculativeStats

FORMAT = "tllm_spec traffic 1"
NOT_SHOWN = {"model", "record_traffic", "record_traffic_mib", "record_hidden_states"}


class TrafficRecord(ConfigModel):
    """A request and its output. Times are in microseconds."""

    id: str
    client: str  # hashes; see `TrafficFolder.hash_of`
    user: str
    arrived_us: NonNegativeInt  # since 1970
    prompt: list[NonNegativeInt]
    output: list[NonNegativeInt]
    seed: int  # the request's own, or the one that was drawn
    sampling: dict[str, Any]  # the fields of `DecodingRules`
    max_tokens: int
    draft_limit: int | None  # longest draft that the request wanted, if it wanted shorter ones
    guided: bool | str  # what compiled its grammar, with its version; True: xgrammar; False: none
    finish_reason: str
    # The rounds that brought tokens: microseconds since the arrival, tokens, and how many drafts
    # were verified; None for drafts: the first token, which the prompt's forward brings.
    rounds: list[list[int | None]]
    # As `SpeculativeStats` has them, drafted and accepted by position.
    num_rounds: int
    num_emitted: int
    drafted: list[int]
    accepted: list[int]
    cached_tokens: int
    num_preemptions: int
    draft_version: int  # how often draft weights had been swapped when it began

    def to_line(self) -> bytes:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return json.dumps(values, separators=(",", ":")).encode() + b"\n"

    @property
    def stats(self) -> SpeculativeStats:
        counts = tuple(self.drafted), tuple(self.accepted)
        return SpeculativeStats(self.num_rounds, self.num_emitted, *counts)


def header_of(args: LlmArgs) -> bytes:
    """The first line of a file: which model was served, with which options of `LLM`; none where
    one of them is an object of the user's."""
    try:
        options = args.as_options()
    except TypeError:
        options = {}
    kept = {name: value for name, value in options.items() if name not in NOT_SHOWN}
    header = {"format": FORMAT, "model": args.model, "options": kept}
    return json.dumps(header, separators=(",", ":")).encode() + b"\n"


def read_line(line: str) -> TrafficRecord | dict[str, Any]:
    """A record, or the header of a file. Raises ValueError for any other line."""
    tree: Any = json.loads(line)
    if not isinstance(tree, dict):
        raise ValueError("a JSON object is needed")
    if "format" not in tree:
        return TrafficRecord(**tree)
    if tree["format"] != FORMAT:
        raise ValueError(f"format = {tree['format']!r}: {FORMAT!r} is accepted")
    return tree


def rounds_until(
    rounds: Sequence[tuple[int, int, int | None]], num_tokens: int
) -> list[list[int | None]]:
    """The rounds that brought the first `num_tokens` tokens: a stop inside a round drops the rest
    of it, and with overlap a round more was launched."""
    kept: list[list[int | None]] = []
    left = num_tokens
    for offset, number, drafts in rounds:
        if left <= 0:
            break
        kept.append([offset, min(number, left), drafts])
        left -= number
    return kept
