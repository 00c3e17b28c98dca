"""What a request returns: texts, tokens, log probabilities, times and speculation figures.

Plain data; `tllm_spec.request_handle` fills it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Literal, NamedTuple

from tllm_spec.request_errors import RequestError

FinishReason = Literal["stop", "length", "timeout", "cancelled", "error"]


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability, and its rank (1 = most probable)."""

    logprob: float
    rank: int | None = None


@dataclass(frozen=True)
class SpeculativeStats:
    """Speculation figures of one request, or of several by `+`.

    A round is one decoding forward of the target for one request; prefill does not count, nor does
    padding. Position 0 is the first draft of a round. A draft counts as accepted only if all before
    it were. `num_emitted_tokens` counts the tokens of these rounds that reached the output: a stop
    or a length limit inside an accepted run drops the rest."""

    rounds: int = 0
    num_emitted_tokens: int = 0
    per_position_drafted: tuple[int, ...] = ()
    per_position_accepted: tuple[int, ...] = ()

    @property
    def num_drafted_tokens(self) -> int:
        """Draft tokens proposed."""
        return sum(self.per_position_drafted)

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens accepted."""
        return sum(self.per_position_accepted)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, the target's own (bonus) token included; 0 without rounds."""
        return self.num_emitted_tokens / self.rounds if self.rounds else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted of proposed draft tokens; 0 without drafts."""
        return (
            self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else 0.0
        )

    @property
    def per_position_acceptance(self) -> tuple[float, ...]:
        """Accepted of proposed draft tokens at each position."""
        pairs = zip(self.per_position_accepted, self.per_position_drafted, strict=True)
        return tuple(accepted / drafted if drafted else 0.0 for accepted, drafted in pairs)

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """Number of rounds that accepted exactly 0, 1, 2, ... drafts."""
        at_least = (self.rounds, *self.per_position_accepted, 0)
        return tuple(more - fewer for more, fewer in pairwise(at_least))

    def __repr__(self) -> str:
        return (
            f"SpeculativeStats(rounds={self.rounds}, acceptance_length="
            f"{self.acceptance_length:.2f}, draft_acceptance_rate={self.draft_acceptance_rate:.2f},"
            f" num_emitted_tokens={self.num_emitted_tokens}, per_position_drafted="
            f"{self.per_position_drafted}, per_position_accepted={self.per_position_accepted})"
        )

    def __add__(self, other: SpeculativeStats) -> SpeculativeStats:
        drafted = zip_longest(self.per_position_drafted, other.per_position_drafted, fillvalue=0)
        accepted = zip_longest(self.per_position_accepted, other.per_position_accepted, fillvalue=0)
        return SpeculativeStats(
            self.rounds + other.rounds,
            self.num_emitted_tokens + other.num_emitted_tokens,
            tuple(map(sum, drafted)),
            tuple(map(sum, accepted)),
        )

    def to_dict(self) -> dict[str, object]:
        """The `speculative_decoding` block of HTTP answers and reports."""
        return {
            "rounds": self.rounds,
            "num_drafted_tokens": self.num_drafted_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance_length": self.acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "per_position_drafted": list(self.per_position_drafted),
            "per_position_accepted": list(self.per_position_accepted),
            "per_position_acceptance": list(self.per_position_acceptance),
            "acceptance_histogram": list(self.acceptance_histogram),
        }


@dataclass
class RequestMetrics:
    """Moments in the life of a request, in seconds of `time.monotonic()`; None = not reached.

    Of several samples the earliest moment counts, and the end of the last one. The first token's is
    when the host read it, also where the answer comes whole."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first round."""
        return self._since_arrival(self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return self._since_arrival(self.first_token_time)

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return self._since_arrival(self.finished_time)

    def _since_arrival(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.arrival_time


FIRST_VERSION = "default"  # of weights, before they are updated


class WeightVersion(NamedTuple):
    """The weights that computed the output tokens from `start` up to `end`, which is not one."""

    version: str
    start: int
    end: int


def spans_of(begins: Sequence[tuple[str, int]], num_tokens: int) -> list[WeightVersion]:
    """begins: versions, each with the output token that it began with."""
    ends = [*(min(start, num_tokens) for _, start in begins[1:]), num_tokens]
    spans = [WeightVersion(*own, end) for own, end in zip(begins, ends, strict=False)]
    return [span for span in spans if span.start < span.end] or spans[-1:]


@dataclass
class CompletionOutput:
    """One of a request's `n` samples; it grows in place while it streams. TensorRT-LLM's
    `request_perf_metrics` is not here: the times are in `RequestOutput.metrics`.

    The `*_diff` properties are what is new since the last `start_next_diff`. `logprobs[i]` maps
    token ids, the chosen one among them, to log probabilities at output position i.
    `prompt_logprobs[i]` does the same for prompt token i, and is None for the first. With
    `logprobs`, `text_offsets[i]` is the character of the text at which token i begins.
    `stop_reason` is the stop string or token id that ended the text, if one did. `weight_begins`
    has the versions of the weights, each with its first token."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    weight_begins: Sequence[tuple[str, int]] = ()
    speculative_decoding: SpeculativeStats | None = None
    _seen_text: int = field(default=0, repr=False, compare=False)
    _seen_tokens: int = field(default=0, repr=False, compare=False)

    @property
    def length(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        """Text since the last `start_next_diff`."""
        return self.text[self._seen_text :]

    @property
    def token_ids_diff(self) -> list[int]:
        """Token ids since the last `start_next_diff`."""
        return self.token_ids[self._seen_tokens :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        """Log probabilities since the last `start_next_diff`."""
        return self.logprobs[self._seen_tokens :]

    @property
    def text_offsets_diff(self) -> list[int]:
        """Text offsets since the last `start_next_diff`."""
        return self.text_offsets[self._seen_tokens :]

    @property
    def weight_versions(self) -> list[WeightVersion]:
        """The weights that computed the tokens; more than one if they were updated meanwhile. Known
        at the end."""
        return spans_of(self.weight_begins, self.length)

    def start_next_diff(self) -> None:
        """Makes the diffs begin after the present text and tokens."""
        self._seen_text, self._seen_tokens = len(self.text), len(self.token_ids)


@dataclass
class RequestOutput:
    """A request and its samples. `error` says why the request failed; its samples then end
    early."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    error: str | None = None
    cached_tokens: int = 0

    @property
    def weight_version(self) -> str | None:
        """The version of the weights that computed the last token; None before the end."""
        return self.weight_versions[-1].version if self.weight_versions else None

    @property
    def weight_versions(self) -> list[WeightVersion]:
        """Those of the first sample; each sample has its own."""
        return self.outputs[0].weight_versions

    @property
    def speculative_decoding(self) -> SpeculativeStats | None:
        """The sum of the samples' speculation figures; None without speculation."""
        figures = [each.speculative_decoding for each in self.outputs]
        known = [each for each in figures if each is not None]
        return sum(known, SpeculativeStats()) if known else None

    def prompt_values(self, first: int) -> list[float]:
        """The prompt's log probabilities, or logits, from its token `first` on. Raises RequestError
        if the request failed."""
        if self.error is not None:
            raise RequestError(self.error)
        entries = self.outputs[0].prompt_logprobs[first:]
        return [next(iter(entry.values())).logprob for entry in entries if entry]
