"""The results of a round: on their way to the host, and what the host learns when it reads them.

Most requests of most rounds only grow by their run of tokens. That is the short way through the
loop over windows, which takes most of the host's time for a round."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter

import torch

from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.device.transfer import DeviceSpan, ToHost
from tllm_spec.executor.request import NO_TOKEN, LlmRequest, RequestState
from tllm_spec.executor.sampling.logits import LogprobRows
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.hindsight import Hindsight
from tllm_spec.kernels.slots.choose_rows import EXPECTED_SCALE
from tllm_spec.outputs import Logprob
from tllm_spec.request_errors import NO_TOKEN_ERROR, described


def joined(parts: Sequence[SampledTokens], width: int, device: torch.device) -> SampledTokens:
    """The results of all requests as one, rows padded to `width` tokens."""
    if len(parts) == 1 and parts[0].new_tokens.shape[1] == width and parts[0].ranks is None:
        return parts[0]
    if not parts:  # chunks of contexts only, and none of them the last
        empty = torch.empty((0, width), dtype=torch.int64, device=device)
        return SampledTokens(empty, empty[:, 0])
    lens = torch.cat([p.new_lens for p in parts])
    tokens = [
        torch.nn.functional.pad(p.new_tokens, (0, width - p.new_tokens.shape[1])) for p in parts
    ]
    counts = [part.num_drafts for part in parts if part.num_drafts is not None]
    num_drafts = None
    if counts:  # contexts had none
        none = counts[0].new_zeros((len(lens) - len(counts[0]), counts[0].shape[1]))
        num_drafts = torch.cat((none, *counts))
    return SampledTokens(torch.cat(tokens), lens, num_drafts=num_drafts)


# A round that was launched on the device, and the way to its results.


@dataclass(frozen=True)
class LaunchedRound:
    """A round that runs on the device, until `wait`."""

    batch: ScheduledBatch
    ended_contexts: list[LlmRequest]
    num_drafts: list[int]  # really proposed as far as the host knows, per generating request
    to_host: ToHost
    logprob_rows: LogprobRows
    # When the results were on the host, by perf_counter; None: not before they are waited for.
    ended_at: float | None
    # What the device does after sending the results; None: nothing.
    post_send: DeviceSpan | None

    def wait(self) -> tuple[list[list[int]], dict[int, list[dict[int, Logprob]]]]:
        """Waits for the device. A row for every ended context, then every generating request: how
        many tokens are new, then the tokens. And log probabilities by request id."""
        table, *logprobs = self.to_host.wait()
        found = self.logprob_rows.per_request(logprobs) if logprobs else {}
        return table.tolist(), found


# How long rounds take, as the host sees it: from the end of one round to the end of the next.
#
# A round ends when its results are on the host; what the device does after sending them is not
# part of the next round. With overlap a round's time is the device's, without it the device's and
# the host's together. On a CPU a round ends when it was launched, however late it is read.


class RoundClock:
    """Measures the time of each round. Call `stop` where a round was abandoned: the next one has no
    time."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._post_send: DeviceSpan | None = None

    def lap(
        self, ended_at: float | None = None, post_send: DeviceSpan | None = None
    ) -> float | None:
        """Seconds since the round before ended; None for the first one.

        ended_at: when the results were on the host, by perf_counter; None: now. post_send: what the
        device does after sending them, before it begins another round."""
        now, last = perf_counter() if ended_at is None else ended_at, self._last
        if last is not None and self._post_send is not None:
            # The host may have seen the results late: a round's time is never negative.
            last = min(last + self._post_send.seconds(), now)
        self._last, self._post_send = now, post_send
        return None if last is None else now - last

    def stop(self) -> None:
        self._last = self._post_send = None


# What a round showed about its drafts, collected while the host reads it, for the draft-length
# controller. A request that had ended before its results were read (overlap) shows nothing.


@dataclass
class RoundOutcome:
    """Filled by `read_round`. seconds: None if the round has no comparable time."""

    seconds: float | None
    # One number for every request that wanted drafts.
    num_accepted: list[int] = field(default_factory=list)
    ranks: list[list[int]] = field(default_factory=list)  # of the same; see `path_ranks`
    num_drafted: int = 0  # drafts of the same, of all together
    # Accepted drafts of the whole batch that each budget of rows was expected to bring; 0: unknown.
    expected: list[float] = field(default_factory=list)
    num_requests: int = 0  # generating ones that had not ended before
    num_tokens: int = 0  # that these were given

    def report_to(
        self,
        controller: AdaptiveController,
        batch: ScheduledBatch,
        hindsight: Hindsight | None = None,
    ) -> None:
        """The time counts only if the whole round belongs to one draft length: no context chunks,
        drafts made and verified of the same length, and no catching up of a draft model."""
        is_pure = batch.shape.depth == batch.made_draft_len and not batch.is_transition
        is_pure = is_pure and not batch.catches_up
        has_time = is_pure and not batch.context_requests
        measured = {} if hindsight is None else hindsight.measure(batch.generation_requests)
        observed = ObservedRound(
            len(batch.generation_requests),
            self.num_accepted,
            batch.made_draft_len if batch.verified_tier is None else batch.verified_tier,
            self.seconds if has_time else None,
            num_requests=self.num_requests,
            num_drafted=self.num_drafted,
            asked_draft_len=batch.asked_draft_len,
            ranks=self.ranks,
            expected=self.expected,
            context_len=batch.context_len,
            hindsight=measured,
            is_cut=batch.cuts_copies,
        )
        controller.observe(observed)


# The log probabilities of a run's tokens, by request id.
RunLogprobs = dict[int, list[dict[int, Logprob]]]


def read_round(
    launched: LaunchedRound,
    table: list[list[int]],
    logprobs: RunLogprobs,
    outcome: RoundOutcome,
    *,
    speculating: bool,
    counts_drafts: bool,
) -> list[LlmRequest]:
    """Gives a round's results to its requests. Returns those that may need a response: those
    with a first token, streamed ones and finished ones. table: as `LaunchedRound.wait`.
    speculating: accepted and rejected drafts are counted. counts_drafts: the results have a
    column of how many there were.

    The round's tokens are no longer in flight afterwards, even where reading raises: a request
    that was preempted meanwhile would wait for them forever."""
    path, num_contexts = launched.batch.shape.path, len(launched.ended_contexts)
    contexts, generating = iter(launched.ended_contexts), iter(launched.batch.generation_requests)
    try:
        responding = _read_contexts(contexts, table, logprobs)
        num_drafts, ranks_from = launched.num_drafts, 1 + path + counts_drafts
        has_budgets = counts_drafts and not launched.batch.shape.is_copied
        if counts_drafts:
            num_drafts = [row[1 + path] for row in table[num_contexts:]]
        if has_budgets:
            columns = zip(*(row[ranks_from:] for row in table[num_contexts:]), strict=True)
            outcome.expected = [sum(column) / EXPECTED_SCALE for column in columns]
        shows_ranks = not has_budgets and len(table) > 0 and len(table[0]) > ranks_from
        rows = zip(generating, num_drafts, table[num_contexts:], strict=True)
        first = ranks_from if shows_ranks else None
        return responding + _read_windows(
            rows, path, logprobs, outcome, ranks_from=first, speculating=speculating
        )
    finally:
        for request in contexts:
            request.tokens_in_flight -= 1
        for request in generating:
            request.tokens_in_flight -= path


def _read_windows(
    rows: Iterable[tuple[LlmRequest, int, list[int]]],
    path: int,
    logprobs: RunLogprobs,
    outcome: RoundOutcome,
    *,
    ranks_from: int | None,
    speculating: bool,
) -> list[LlmRequest]:
    """rows: requests, the number of drafts that each really had, and their tokens. The tokens
    of requests that ended meanwhile are dropped. ranks_from: column of the first rank, if they are
    shown."""
    responding: list[LlmRequest] = []
    generation, finished = RequestState.GENERATION, RequestState.FINISHED
    num_requests = num_tokens = 0
    for request, num_drafts, row in rows:
        request.tokens_in_flight -= path
        num_new = num_emitted = row[0]
        if request.state is generation:
            request.kv_len += num_new
        elif request.state is finished:
            continue  # any other was preempted, and starts again at 0
        run, tokens = row[1 : 1 + num_new], request.tokens
        if (
            request.stop_checker is None
            and len(tokens) + num_new < request.prompt_len + request.max_tokens
            and request.watched_ids.isdisjoint(run)
            and not logprobs
        ):
            tokens += run
            responds = request.streaming
        else:
            num_emitted = _emit(request, run, logprobs)
            responds = request.streaming or request.state is finished
        if responds:
            responding.append(request)
        num_requests += 1
        num_tokens += num_emitted
        if speculating:
            num_accepted = num_new - 1 if num_emitted == num_new else min(num_new - 1, num_emitted)
            counters = request.counters
            counters.rounds_by_outcome[num_drafts * counters.width + num_accepted] += 1
            if num_emitted < num_new:
                counters.num_unfinished += 1
            pauses = request.may_pause and request.draft_pause.rounds_left > 0
            if request.draft_limit and not pauses:
                outcome.num_accepted.append(num_new - 1)
                if ranks_from is not None:
                    outcome.ranks.append(row[ranks_from:])
                outcome.num_drafted += num_drafts
            if request.may_pause:
                request.draft_pause.observe(num_drafts, num_accepted)
    outcome.num_requests, outcome.num_tokens = num_requests, num_tokens
    return responding


def _read_contexts(
    requests: Iterable[LlmRequest], table: list[list[int]], logprobs: RunLogprobs
) -> list[LlmRequest]:
    """The first token of each request; the table's other rows are those of windows."""
    responding = []
    for request, row in zip(requests, table, strict=False):
        request.tokens_in_flight -= 1
        if not request.is_finished:
            num_emitted = _emit(request, row[1 : 1 + row[0]], logprobs)
            if num_emitted and request.first_token_time is None:  # preempted ones have it
                request.first_token_time = monotonic()
            responding.append(request)
    return responding


def _emit(request: LlmRequest, run: list[int], logprobs: RunLogprobs) -> int:
    """Appends a run and returns how many tokens of it are kept: a stop inside the run drops the
    rest."""
    before = request.num_tokens
    good = run[: run.index(NO_TOKEN)] if NO_TOKEN in run else run
    try:
        request.append_run(good)
    except BaseException as error:  # noqa: BLE001 (the user's tokenizer raised it)
        request.finish("error", error=described(error))
    if len(good) < len(run) and not request.is_finished:
        _end_without_token(request)
    num_emitted = request.num_tokens - before
    if request.request_id in logprobs:
        request.logprobs += logprobs[request.request_id][:num_emitted]
    return num_emitted


def _end_without_token(request: LlmRequest) -> None:
    """No token could be chosen next."""
    if request.grammar is None:
        request.finish("error", error=NO_TOKEN_ERROR)
    elif error := request.grammar.why_no_token(request.tokens, request.prompt_len):
        request.finish("error", error=error)
    else:
        request.finish("stop")
