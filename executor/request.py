"""One request inside the executor: how it is sampled and ends, its tokens and its state.

Every field that a component keeps about a request is declared here. It knows no pages, devices or
models. Names that begin with `py_` are TensorRT-LLM's."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tllm_spec.config.option_checks import LOGITS, PROCESSED, LogprobsMode, check_text
from tllm_spec.grammar.thinking_budget import TextRules
from tllm_spec.logits_processor import LogitsEdit
from tllm_spec.lora_request import CacheSalt
from tllm_spec.outputs import Logprob, SpeculativeStats
from tllm_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tllm_spec.executor.device.transfer import TextStates


class LogprobForm(NamedTuple):
    """Which values of a row are returned: after edits and grammars or before them, over the
    temperature and filtered, and as logits or normalised."""

    is_processed: bool
    is_scaled: bool
    is_logits: bool

    def is_of(self, rules: "DecodingRules") -> bool:
        return rules.logprob_form == self


@dataclass(frozen=True)
class DecodingRules:
    """How one request is sampled and ends. Values that mean off: temperature 0 (greedy), top_k 0,
    top_p 1, min_p 0, repetition 1, presence and frequency 0, logprobs None. What every round asks
    for is cached."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    min_tokens: int
    end_ids: frozenset[int]  # stop without a stop_reason; empty with ignore_eos
    stop_token_ids: frozenset[int]
    token_bias: dict[int, float]  # logit bias, and -inf for bad words of one token
    bad_sequences: tuple[tuple[int, ...], ...]  # bad words of several tokens
    edits: tuple[LogitsEdit, ...]  # the user's logits processors
    logprobs: int | None
    prompt_logprobs: int | None
    logprobs_mode: LogprobsMode

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def logprob_form(self) -> LogprobForm | None:
        """None: no log probabilities. A greedy choice is made without temperature and filters."""
        if self.logprobs is None:
            return None
        is_processed = self.logprobs_mode in PROCESSED
        is_scaled = is_processed and not self.is_greedy
        return LogprobForm(is_processed, is_scaled, self.logprobs_mode in LOGITS)

    @property
    def has_filters(self) -> bool:
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def has_penalties(self) -> bool:
        return bool(self.repetition != 1 or self.presence or self.frequency)

    @cached_property
    def graph_samples(self) -> bool | None:
        """Whether its CUDA graph must sample (False: greedy). None: no graph can follow its
        rules, in which more than temperature and filters lies between logits and token, or log
        probabilities are asked for."""
        needs_more = self.has_penalties or self.min_tokens or self.token_bias
        if needs_more or self.needs_host_edits or self.logprobs is not None:
            return None
        return self.temperature > 0

    @cached_property
    def needs_host_edits(self) -> bool:
        return bool(self.edits or self.bad_sequences)

    @classmethod
    def from_params(
        cls,
        params: SamplingParams,
        *,
        vocab_size: int,
        end_ids: Iterable[int],
        encode: Callable[[str], list[int]] | None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> "DecodingRules":
        """logprobs_mode: where the parameters have none.

        Raises ValueError for token ids outside the vocabulary, for words without a tokenizer,
        and for words with lone surrogates."""
        sequences = list(params.bad_sequences)
        for word in params.bad_strings:
            if encode is None:
                raise ValueError(f"bad = {word!r} needs a tokenizer; use bad_token_ids")
            check_text(word, "bad")
            spelled = {tuple(encode(word)), tuple(encode(" " + word))}
            # Tokens that a tokenizer has and the model lacks cannot be chosen anyway.
            sequences += [each for each in spelled if max(each, default=0) < vocab_size]
        bias = {token: float(value) for token, value in (params.logit_bias or {}).items()}
        stop_token_ids = frozenset(params.stop_token_ids or ())
        own_end = () if params.end_id is None else (params.end_id,) if params.end_id >= 0 else ()
        _check_vocabulary("end_id", own_end, vocab_size)
        end = frozenset(end_ids if params.end_id is None else own_end)
        _check_vocabulary("logit_bias", bias, vocab_size)
        _check_vocabulary("stop_token_ids", stop_token_ids, vocab_size)
        bad = (token for sequence in sequences for token in sequence)
        _check_vocabulary("bad_token_ids", bad, vocab_size)
        bias |= {sequence[0]: float("-inf") for sequence in sequences if len(sequence) == 1}
        if len(bias) == vocab_size and max(bias.values()) == float("-inf"):
            raise ValueError("bad_token_ids and bad exclude every token of the vocabulary")
        return cls(
            temperature=params.effective_temperature,
            top_k=min(params.top_k or 0, vocab_size),
            top_p=1.0 if params.top_p is None else float(params.top_p),
            min_p=float(params.min_p or 0),
            repetition=float(params.repetition_penalty),
            presence=float(params.presence_penalty),
            frequency=float(params.frequency_penalty),
            min_tokens=params.min_tokens,
            end_ids=frozenset() if params.ignore_eos else end,
            stop_token_ids=stop_token_ids,
            token_bias=bias,
            bad_sequences=tuple(sorted(sequence for sequence in sequences if len(sequence) > 1)),
            edits=tuple(map(LogitsEdit.of, params.logits_processors)),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            logprobs_mode=params.logprobs_mode or logprobs_mode,
        )


def _check_vocabulary(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            last = vocab_size - 1
            raise ValueError(f"{name} names token id {token}; the model has ids 0 to {last}")


NO_TOKEN = -1  # stands for a token that could not be chosen
MIN_SHARE = 0.1  # of a request's rounds with an accepted draft, below which it pauses drafting
MAX_PAUSE = 64  # rounds


class RequestState(Enum):
    WAITING = auto()  # not scheduled yet, or preempted
    CONTEXT = auto()  # its known tokens are being prefilled
    GENERATION = auto()
    FINISHED = auto()


@dataclass(frozen=True)
class StopMatch:
    """A completed stop string: the string, the text before it, and the number of output tokens
    before it."""

    stop: str
    text: str
    num_tokens: int


@dataclass(frozen=True)
class StopOptions:
    """A request's stop strings, from which every rank makes a `StopChecker`."""

    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool


class StopChecker(Protocol):
    """Looks for stop strings in the output text, one token at a time."""

    def feed(self, token: int) -> StopMatch | None: ...


class DraftCounters:
    """A request's rounds, by how many tokens were drafted and how many of these were accepted.

    Padding and prefill do not count."""

    __slots__ = ("num_unfinished", "rounds_by_outcome", "width")

    def __init__(self, max_draft_len: int = 0) -> None:
        self.width = max_draft_len + 1
        # At index drafted * width + accepted. One list: every round of every request writes to it.
        self.rounds_by_outcome = [0] * self.width**2
        self.num_unfinished = 0  # rounds whose bonus token was dropped: a stop came before it

    @property
    def by_drafted(self) -> list[int]:
        width, rounds = self.width, self.rounds_by_outcome
        return [sum(rounds[i * width :][:width]) for i in range(width)]

    @property
    def by_accepted(self) -> list[int]:
        return [sum(self.rounds_by_outcome[i :: self.width]) for i in range(self.width)]

    def stats(self) -> SpeculativeStats:
        """The figures so far. A round of n drafts counts for positions 0 to n - 1."""
        by_drafted, by_accepted = self.by_drafted, self.by_accepted
        rounds, num_lost = sum(by_drafted), self.num_unfinished
        num_emitted = rounds - num_lost + sum(n * count for n, count in enumerate(by_accepted))
        drafted = tuple(sum(by_drafted[i + 1 :]) for i in range(len(by_drafted) - 1))
        accepted = tuple(sum(by_accepted[i + 1 :]) for i in range(len(by_accepted) - 1))
        return SpeculativeStats(rounds, num_emitted, drafted, accepted)


class RequestPause:
    """When a request pauses drafting: its share of drafted rounds with an accepted draft is too
    small. The share starts at 1 and falls below MIN_SHARE after exactly `patience` rejected rounds
    in a row; one accepted draft among many rejected ones does not make up for them. The one round
    after a pause decides whether the request pauses twice as long or is drafted for as before.
    patience None: never."""

    __slots__ = ("_keep", "_next_pause", "num_pauses", "patience", "rounds_left", "share")

    def __init__(self, patience: int | None = None) -> None:
        self.patience = patience
        # Just enough: the share is above MIN_SHARE after patience - 1 rejections, below after
        # patience.
        self._keep = MIN_SHARE ** (1 / ((patience or 1) - 0.5))
        self._next_pause = patience or 0
        self.rounds_left = 0  # of a pause, in which rounds should have no drafts
        self.num_pauses = 0  # that have begun
        self.share = 1.0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """What a round brought; called once a round. Outside a pause a round without drafts says
        nothing."""
        if self.patience is None:
            return
        if self.rounds_left:
            self.rounds_left -= 1
            return
        if not num_drafted:
            return
        if self.share < MIN_SHARE and num_accepted:  # after a pause
            self.share, self._next_pause = 1.0, self.patience
            return
        self.share = self._keep * self.share + (1 - self._keep) * (num_accepted > 0)
        if self.share < MIN_SHARE:
            self.rounds_left, self.num_pauses = self._next_pause, self.num_pauses + 1
            self._next_pause = min(2 * self._next_pause, MAX_PAUSE)


@dataclass(eq=False, slots=True)
class LlmRequest:
    """A sequence being generated. `tokens` is prompt plus output and only ever grows."""

    request_id: int
    tokens: list[int]
    rules: DecodingRules
    seed: int  # 64 bits; the key of all noise of this request
    index: int = 0  # which of a prompt's n samples it is
    max_tokens: int = 32
    priority: float = 0.5
    cache_salt: str | None = None  # the client's own
    salt: CacheSalt = None  # made of it; only requests with the same one share KV and draft sources
    client: tuple[str, ...] = ()  # who takes turns: a name, or that of a group and of its member
    arrival: int = 0  # order of arrival, the tie-break of every queue
    stop_options: StopOptions | None = None
    stop_checker: StopChecker | None = None  # made of them
    grammar: TextRules | None = None
    streaming: bool = False
    draft_limit: int = 0  # longest draft this request wants; 0 = never speculate
    store: bool | None = None  # what its client says about recording; None: nothing
    scored_from: int = 0  # token of the prompt; see `RequestOptions`
    adapter: str | None = None  # its LoRA adapter: the name; from its arrival on, the version
    arrived_at: float = field(default_factory=monotonic)  # in the engine's process

    state: RequestState = RequestState.WAITING
    prompt_len: int = 0
    slot: int = -1
    kv_len: int = 0  # tokens whose KV is final: all but the bonus token of a generating request
    # Tokens that the draft network has not read, at most, up to the last one of the rounds launched
    # or, in a context, the one after `kv_len`. Below 0: it has read so many more of the context.
    draft_backlog: int = 0
    tokens_in_flight: int = 0  # upper bound of what launched rounds that are not read will add
    context_chunk: int = 0  # tokens of the context scheduled in this round
    cached_tokens: int = 0  # reused from the prefix cache at first admission
    reported_cached_tokens: int = 0  # of these, what the answer and the metrics say
    num_preemptions: int = 0
    first_scheduled_time: float | None = None  # time.monotonic()
    first_token_time: float | None = None  # when the host read it

    py_draft_tokens: list[int] = field(default_factory=list)  # placeholders; then drafts, padded
    py_draft_parents: list[int] | None = None  # of a tree's tokens, from a drafter on the host
    py_num_draft_tokens: int = 0  # of these, how many were proposed by the drafter
    num_drafts_ready: int = 0  # drafts that the latest launched round made for the next one

    counters: DraftCounters = field(default_factory=DraftCounters)
    draft_pause: RequestPause = field(default_factory=RequestPause)
    draft_version: int = 0  # how often draft weights had been swapped when it began
    # The target's, each with the first output token that it computed.
    weight_versions: list[tuple[str, int]] = field(default_factory=list)
    # The recorder's: microseconds since the arrival, tokens, drafts; None for a context.
    recorded_rounds: list[tuple[int, int, int | None]] = field(default_factory=list)
    text_states: "TextStates | None" = None  # where hidden states are recorded
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    num_responded: int = 0  # output tokens that the front end has
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stop_match: StopMatch | None = None
    error: str | None = None

    # Derived once from the rules, since every round asks for them:
    watched_ids: frozenset[int] = frozenset()  # tokens that may finish the request
    graph_samples: bool | None = None
    needs_host_tokens: bool = False
    may_pause: bool = False
    # Not for prompt log probabilities, which need every position of the prompt computed.
    reuses_prefix: bool = True

    def __post_init__(self) -> None:
        self.prompt_len, self.salt = len(self.tokens), self.cache_salt
        self.watched_ids = self.rules.end_ids | self.rules.stop_token_ids | {NO_TOKEN}
        self.graph_samples = self.rules.graph_samples
        self.needs_host_tokens = self.rules.needs_host_edits
        self.may_pause = self.draft_pause.patience is not None
        self.reuses_prefix = self.rules.prompt_logprobs is None

    # TensorRT-LLM's names, for drafters that were written for it.

    py_request_id = property(attrgetter("request_id"))
    py_batch_idx = property(attrgetter("slot"))
    py_prompt_len = py_orig_prompt_len = property(attrgetter("prompt_len"))
    py_max_new_tokens = property(attrgetter("max_tokens"))

    def get_tokens(self, beam: int | None = None) -> Any:
        """A copy of the tokens; without `beam` a list with the only beam's."""
        assert not beam, "there is no beam search"
        return [list(self.tokens)] if beam is None else list(self.tokens)

    def get_last_tokens(self, beam: int | None = None) -> Any:
        """The last token; without `beam` a list with the only beam's."""
        assert not beam, "there is no beam search"
        return [self.tokens[-1]] if beam is None else self.tokens[-1]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_tokens_bound(self) -> int:
        """Upper bound of the tokens once the rounds in flight have been read."""
        return len(self.tokens) + self.tokens_in_flight

    @property
    def is_last_context_chunk(self) -> bool:
        return self.kv_len + self.context_chunk == len(self.tokens)

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def num_drafts_wanted(self) -> int:
        """Drafts worth proposing in this round: at most the placeholders, the request's limit and
        what can be emitted next to the target's own token. 0 while speculation is paused for the
        request, because its drafts keep being rejected."""
        if self.draft_pause.rounds_left:
            return 0
        wanted = self.max_tokens - self.num_output_tokens - 1
        # Every round asks it of every request, and `min` and `max` take longer than comparing.
        if wanted > self.draft_limit:
            wanted = self.draft_limit
        if wanted > len(self.py_draft_tokens):
            wanted = len(self.py_draft_tokens)
        return wanted if wanted > 0 else 0

    def note_weights(self, version: str) -> None:
        """The tokens from here on are those of weights with this version."""
        versions, start = self.weight_versions, self.num_output_tokens
        if versions and versions[-1][1] == start:
            versions.pop()
        versions.append((version, start))

    def append_run(self, run: list[int]) -> None:
        """Appends the tokens of one round and applies the stop rules after each, up to the one that
        finishes the request."""
        for token in run:
            self.tokens.append(token)
            match = self.stop_checker.feed(token) if self.stop_checker else None
            if token in self.rules.end_ids:
                self.finish("stop")
            elif token in self.rules.stop_token_ids:
                self.finish("stop", token)
            elif match is not None and self.num_output_tokens > self.rules.min_tokens:
                self.stop_match = match
                self.finish("stop", match.stop)
            elif self.num_output_tokens >= self.max_tokens:
                self.finish("length")
            if self.is_finished:
                return

    def finish(
        self, reason: str, stop_reason: int | str | None = None, *, error: str | None = None
    ) -> None:
        self.state = RequestState.FINISHED
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error


def samples_of(
    tokens: Sequence[int],
    rules: DecodingRules,
    ids: Sequence[int],
    seeds: Sequence[int],
    grammars: Sequence[TextRules | None],
    *,
    max_draft_len: int,
    pause_patience: int | None,
    **options: Any,
) -> list[LlmRequest]:
    """The requests of one prompt, with an id, a seed and a grammar each. The first one brings the
    log probabilities of the prompt, which are the same for all."""
    return [
        LlmRequest(
            request_id=request_id,
            tokens=list(tokens),
            rules=rules if index == 0 else replace(rules, prompt_logprobs=None),
            seed=seed,
            index=index,
            arrival=request_id,
            counters=DraftCounters(max_draft_len),
            draft_pause=RequestPause(pause_patience),
            grammar=grammar,
            **options,
        )
        for index, (request_id, seed, grammar) in enumerate(zip(ids, seeds, grammars, strict=True))
    ]


# What the executor sends to the front end: what is new of one request since the last response.


@dataclass(slots=True)
class Response:
    """New tokens of a request; the last response has a finish reason.

    Not frozen: streaming builds one for every request in every round, and a frozen dataclass takes
    twice as long to build."""

    request_id: int
    token_ids: list[int]
    index: int = 0  # which of a prompt's n samples it is
    logprobs: Sequence[dict[int, Logprob]] = ()
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # with the first tokens
    cached_tokens: int = 0
    first_scheduled_time: float | None = None  # time.monotonic()
    first_token_time: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stop_match: StopMatch | None = None
    error: str | None = None
    weight_versions: Sequence[tuple[str, int]] = ()  # each with the output token it began with
    speculative: SpeculativeStats | None = None


def response_of(request: LlmRequest, *, speculating: bool) -> Response:
    """The response for all tokens after `num_responded`, which is updated."""
    start, request.num_responded = request.num_responded, request.num_output_tokens
    finished = request.is_finished
    return Response(
        request_id=request.request_id,
        token_ids=request.tokens[request.prompt_len + start :],
        index=request.index,
        logprobs=request.logprobs[start:],
        prompt_logprobs=request.prompt_logprobs if start == 0 and request.prompt_logprobs else None,
        cached_tokens=request.reported_cached_tokens,
        first_scheduled_time=request.first_scheduled_time,
        first_token_time=request.first_token_time,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        stop_match=request.stop_match,
        error=request.error,
        weight_versions=request.weight_versions if finished else (),
        speculative=request.counters.stats() if finished and speculating else None,
    )
