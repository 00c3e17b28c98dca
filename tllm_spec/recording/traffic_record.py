"""One served request as a line of recorded traffic: what replaying it needs, and what happened."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PrivateAttr
from typing_extensions import TypedDict

from tllm_spec.config.config_base import ConfigModel, check
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.outputs import SpeculativeStats

FORMAT = "tllm_spec traffic 1"
NOT_SHOWN = {"model", "record_traffic", "record_traffic_mib", "record_hidden_states"}


Count = Annotated[int, Field(ge=0, lt=1 << 62)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Sampling(TypedDict):
    """Those fields of `DecodingRules` that are replayed. It has the others, too."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]  # pydantic's

    temperature: Number
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)]
    top_p: Share
    min_p: Share
    end_ids: list[TokenId]
    stop_token_ids: list[TokenId]


class WeightSpan(TypedDict):
    """As `WeightVersion` of the outputs has it."""

    version: str
    start: Count
    end: Count


class TrafficHeader(ConfigModel):
    """The first line of a file: which model was served, with which options of `LLM`."""

    format: str
    model: str
    options: dict[str, Any]

    @check
    def _check_format(self) -> Iterator[str]:
        if self.format != FORMAT:
            yield f"format = {self.format!r}: {FORMAT!r} is accepted"


class TrafficRecord(ConfigModel):
    """A request and its output. Times are in microseconds."""

    id: str
    client: str  # hashes; see `TrafficFolder.hash_of`
    user: str
    arrived_us: Count  # since 1970
    prompt: Tokens
    output: Tokens
    # The request's own, or the one that was drawn.
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
    sampling: Sampling
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 62)]
    draft_limit: Count | None  # longest draft that the request wanted, if it wanted shorter ones
    # What compiled its grammar, with its version; True: xgrammar; False: none.
    guided: bool | str
    finish_reason: str
    # The rounds that brought tokens: microseconds since the arrival, tokens, and how many drafts
    # were verified; None for drafts: the first token, which the prompt's forward brings.
    rounds: list[Annotated[list[Count | None], Field(min_length=3, max_length=3)]]
    # As `SpeculativeStats` has them, drafted and accepted by position.
    num_rounds: Count
    num_emitted: Count
    drafted: list[Count]
    accepted: list[Count]
    cached_tokens: Count
    num_preemptions: Count
    draft_version: Count  # how often draft weights had been swapped when it began
    # None and empty: the target's weights could not be updated.
    weight_version: str | None = None  # of the last token
    weight_versions: list[WeightSpan] = Field(default_factory=list)
    adapter: str | None = None  # its LoRA adapter's name and content, as "NAME@HASH"

    _place: str = PrivateAttr("")

    def __eq__(self, other: object) -> bool:
        """Wherever they were read."""
        return isinstance(other, TrafficRecord) and vars(self) == vars(other)

    @check
    def _check_together(self) -> Iterator[str]:
        if len(self.drafted) != len(self.accepted):
            yield f"drafted has {len(self.drafted)} numbers, and accepted {len(self.accepted)}"
        if any(None in each[:2] for each in self.rounds):
            yield "rounds: only the number of drafts may be null"

    @property
    def place(self) -> str:
        """Where it was read, for messages."""
        return self._place or f"record {self.id}"

    def check_tokens(self, vocab_size: int) -> None:
        """Raises ValueError for a token id that the model does not have."""
        most = max(max(self.prompt), max(self.output))
        if most >= vocab_size:
            raise ValueError(f"{self.place}: token id {most}; the model has 0 to {vocab_size - 1}")

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


def read_line(line: str, place: str = "") -> TrafficRecord | TrafficHeader:
    """A record, or the header of a file. Raises ValueError for any other line, with its `place`."""
    with named(place):
        tree = json_object(line)
        if "format" in tree:
            return TrafficHeader(**tree)
        record = TrafficRecord(**tree)
    record._place = place
    return record


def json_object(line: str | bytes) -> dict[str, Any]:
    """Raises ValueError for anything else."""
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(tree, dict):
        raise ValueError("a JSON object is needed")
    return tree


@contextmanager
def named(place: str) -> Iterator[None]:
    """A ValueError within begins with the place, if there is one."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}" if place else str(error)) from error


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
