"""Rounds without drafts leave the draft side where it would have been: acceptance is back at once
after them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.executor.harness import Harness
from tests.executor.hooks import around_reads
from tests.lossless.cases import heldout_prompts
from tests.lossless.engines import engine
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.rounds.round_reader import LaunchedRound
from tllm_spec.executor.speculative.drafting.network_drafter import BACKLOG_LEN
from tllm_spec.text.tokenizer import Tokenizer

DRAFT_LEN, PLAIN_ROUNDS, ROUNDS_AFTER, NUM_REQUESTS = 3, 32, 5, 8
MODES = ("eagle3", "draft_target_one_model", "eagle3_two_model", "draft_target")
OUTSIDE_TORCH = ("eagle3_onnxruntime", "draft_target_onnxruntime")
REACHES_0 = {"max_concurrency": NUM_REQUESTS - 1}  # the tests choose the lengths themselves
NO_REUSE = {"kv_cache_config": {"enable_block_reuse": False}, "max_seq_len": 512}


@dataclass(frozen=True)
class Seen:
    num_tokens: int  # before the round
    drafts: tuple[int, ...]
    num_accepted: int

    @property
    def num_drafted(self) -> int:
        return len(self.drafts)


def watch(harness: Harness) -> dict[int, list[Seen]]:
    """Every generation round of every request, as it is read."""
    seen: dict[int, list[Seen]] = {}
    drafts: dict[int, dict[LlmRequest, tuple[int, ...]]] = {}  # of rounds in flight
    launch = harness.parts.runner.launch

    def watched_launch(batch: ScheduledBatch) -> LaunchedRound:
        windows = [harness.parts.slots.window[r.slot].tolist() for r in batch.generation_requests]
        launched = launch(batch)
        drafts[id(launched)] = {
            request: tuple(window[1 : 1 + num_drafts])
            for request, window, num_drafts in zip(
                batch.generation_requests, windows, launched.num_drafts, strict=True
            )
        }
        return launched

    def look(launched: LaunchedRound) -> Callable[[], None]:
        requests = [
            request for request in launched.batch.generation_requests if not request.is_finished
        ]
        own = drafts.pop(id(launched))
        before = {request: request.num_tokens for request in requests}

        def note() -> None:
            for request in requests:
                num_accepted = request.num_tokens - before[request] - 1
                found = Seen(before[request], own[request], num_accepted)
                seen.setdefault(request.request_id, []).append(found)

        return note

    around_reads(harness.executor, look)
    harness.parts.runner.launch = watched_launch  # type: ignore[method-assign] # the test looks on
    return seen


def submit(harness: Harness, prompts: list[list[int]], **lengths: Any) -> list[LlmRequest]:
    """Every second one is sampled; a request's noise depends on its seed and on places in the text
    only."""
    return [
        harness.submit(prompt, 120, temperature=0.8 if number % 2 else None, seed=number, **lengths)
        for number, prompt in enumerate(prompts)
    ]


def drafted_rounds(seen: list[Seen], after: int) -> list[Seen]:
    return [each for each in seen if each.num_drafted and each.num_tokens > after]


def rounds_after_a_pause(
    tokenizer: Tokenizer,
    mode: str,
    num_plain: int,
    *,
    overlap: bool,
    num_requests: int = NUM_REQUESTS,
) -> tuple[list[list[Seen]], list[list[Seen]], float]:
    """The first drafted rounds after `num_plain` rounds without drafts, of each request; those of
    requests whose prompts end there; and how many drafts a round accepted before the pause."""
    prompts = heldout_prompts(tokenizer, num_requests, 60)
    options = engine(mode, DRAFT_LEN, overlap=overlap, **REACHES_0) | NO_REUSE
    paused = Harness("zoo:llama", **options)
    seen = watch(paused)
    lengths = iter([DRAFT_LEN] * 8 + [0] * num_plain)
    paused.parts.tier_for = lambda *_: next(lengths, DRAFT_LEN)
    requests = submit(paused, prompts)
    while min(len(seen.get(request.request_id, [])) for request in requests) < num_plain + 18:
        assert paused.round()
    after: list[list[Seen]] = []
    for request in requests:
        rounds = seen[request.request_id]
        assert num_plain - 2 <= sum(not each.num_drafted for each in rounds) <= num_plain + 2
        end = max(i for i, each in enumerate(rounds) if not each.num_drafted)
        after.append(rounds[end + 1 :][:ROUNDS_AFTER])
        assert len(rounds) - end > ROUNDS_AFTER

    fresh = Harness("zoo:llama", **options)
    fresh.parts.tier_for = lambda *_: DRAFT_LEN
    seen_fresh = watch(fresh)
    again = [
        request.tokens[: rounds[0].num_tokens - 1]
        for request, rounds in zip(requests, after, strict=True)
    ]
    references = submit(fresh, again)
    while (
        min(len(seen_fresh.get(reference.request_id, [])) for reference in references)
        < ROUNDS_AFTER + 2
    ):
        assert fresh.round()
    never_paused = [
        drafted_rounds(seen_fresh[reference.request_id], 0)[:ROUNDS_AFTER]
        for reference in references
    ]
    before = [each for request in requests for each in seen[request.request_id][1:6]]
    return after, never_paused, sum(each.num_accepted for each in before) / len(before)


@pytest.mark.parametrize(
    "mode",
    [
        "eagle3",
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in (*MODES[1:], *OUTSIDE_TORCH)),
    ],
)
def test_acceptance_after_plain_rounds_equals_acceptance_without_them(
    tokenizer: Tokenizer, mode: str
) -> None:
    """The rounds after the return draft the same tokens, and accept as many, as those of a request
    whose prompt ends there."""
    after, never_paused, level = rounds_after_a_pause(tokenizer, mode, PLAIN_ROUNDS, overlap=True)
    total, expected = (
        sum(each.num_accepted for run in runs for each in run) for runs in (after, never_paused)
    )
    print(
        f"{mode}: {total} drafts accepted in {ROUNDS_AFTER} rounds after the return, {expected} "
        "without a pause"
    )
    assert after == never_paused
    # The old level: that of the rounds before the pause, 8 requests and other places of the same
    # texts.
    assert total / (NUM_REQUESTS * ROUNDS_AFTER) >= 0.75 * level > 0.4


PAUSES = (
    (1, True),
    (BACKLOG_LEN - 1, False),
    (BACKLOG_LEN, True),
    (BACKLOG_LEN, False),
    (BACKLOG_LEN + 1, True),
    (3 * BACKLOG_LEN + 2, False),
)


# The other combinations are slow.
QUICK = ((3, 4),)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "num_plain", "overlap"),
    [
        pytest.param(mode, *pause, marks=[pytest.mark.slow] if (i, j) not in QUICK else [])
        for i, mode in enumerate(MODES + OUTSIDE_TORCH)
        for j, pause in enumerate(PAUSES)
    ],
)
def test_acceptance_after_a_pause_does_not_depend_on_its_length(
    tokenizer: Tokenizer, mode: str, num_plain: int, overlap: bool
) -> None:
    after, never_paused, _ = rounds_after_a_pause(
        tokenizer, mode, num_plain, overlap=overlap, num_requests=3
    )
    assert after == never_paused
