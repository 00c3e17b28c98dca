"""Sampling stays within the memory that the memory plan sets aside for it, and a batch that is
sampled in parts gets the tokens that it gets at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.executor.harness import Harness, draft_target, output_of
from tests.executor.sampling.test_sampler import WAYS
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.executor.request import DecodingRules, LlmRequest
from tllm_spec.executor.resources.interface import SeqSlotManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling import logits as working_memory
from tllm_spec.executor.sampling.logits import LogprobRows
from tllm_spec.executor.sampling.row_group import RowPositions, SamplingState
from tllm_spec.executor.sampling.sharded_sampler import sampler_of
from tllm_spec.sampling_params import SamplingParams

CPU = torch.device("cpu")
VOCAB, NUM_REQUESTS, WINDOW = 1 << 13, 8, 4
EVERYTHING = {name: value for way in WAYS.values() for name, value in way.items()}


def allocated_bytes(work: Callable[[], object]) -> int:
    """The most CPU memory that torch has allocated at once while `work` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    held = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def sampling(params: list[dict[str, Any]], *, rejection: bool) -> Callable[[], object]:
    """Sampling of one window of each request, on bfloat16 logits as a GPU's model leaves them."""
    slots = SeqSlotManager(len(params))
    state, windows = (
        SamplingState(slots, VOCAB, CPU),
        SlotState(slots, DraftShapes.chains(WINDOW - 1), CPU),
    )
    sampler = sampler_of(None, windows, state, rejection=rejection)
    requests = []
    for number, options in enumerate(params):
        rules = DecodingRules.from_params(
            SamplingParams(**options), vocab_size=VOCAB, end_ids=(), encode=None
        )
        requests.append(LlmRequest(number, [1, 2, 3], rules, seed=number, max_tokens=99))
        slots.acquire(requests[-1])
        sampler.start(requests[-1])
    group = sampler.groups.get(requests, WINDOW)
    logits = torch.randn(len(params) * WINDOW, VOCAB, dtype=torch.bfloat16)
    probs = torch.full((len(params), WINDOW - 1, VOCAB), 1 / VOCAB) if rejection else None
    at = RowPositions(torch.full((len(params),), 3), 1)
    return lambda: sampler.sample(group, logits, at, probs, LogprobRows())


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("num_greedy", [0, 1])
@pytest.mark.parametrize("way", [*WAYS, "everything"])
def test_sampling_allocates_no_more_per_logit_than_is_planned(
    way: str, num_greedy: int, rejection: bool
) -> None:
    options = EVERYTHING if way == "everything" else WAYS[way]
    params = [options] * (NUM_REQUESTS - num_greedy) + [{}] * num_greedy
    with torch.inference_mode():
        work = sampling(params, rejection=rejection)
        work()  # what is made once
        found = allocated_bytes(work) / (NUM_REQUESTS * WINDOW * VOCAB)
    assert found <= working_memory.BYTES_PER_LOGIT
    if way == "everything":  # the bound is no more than a third too high
        assert found > 0.75 * working_memory.BYTES_PER_LOGIT


@pytest.mark.parametrize("rejection", [False, True])
def test_a_batch_that_is_sampled_in_parts_allocates_less_at_once(
    monkeypatch: pytest.MonkeyPatch, rejection: bool
) -> None:
    peaks = []
    for rows in (1000, 2 * WINDOW):
        budget = rows * VOCAB * working_memory.BYTES_PER_LOGIT
        monkeypatch.setattr(working_memory, "SAMPLING_BYTES", budget)
        with torch.inference_mode():
            work = sampling([EVERYTHING] * NUM_REQUESTS, rejection=rejection)
            work()
            peaks.append(allocated_bytes(work))
    assert peaks[1] < budget < peaks[0]


@pytest.mark.parametrize("num_rows", [1, 3, 7])
@pytest.mark.parametrize("options", [{}, {"use_rejection_sampling": True}])
def test_a_batch_that_is_sampled_in_parts_emits_the_same_text(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, num_rows: int, options: dict[str, Any]
) -> None:
    speculation = draft_target(tiny, 2, draft_target_one_model=True, **options)
    found = []
    for rows in (10**6, num_rows):
        budget = rows * 64 * working_memory.BYTES_PER_LOGIT
        monkeypatch.setattr(working_memory, "SAMPLING_BYTES", budget)
        harness = Harness(tiny, **speculation)
        requests = [
            harness.submit([5, i, *range(i)], 12, seed=i, prompt_logprobs=1, **WAYS[way])
            for i, way in enumerate(("temperature", "filters", "penalties", "logprobs", "greedy"))
        ]
        harness.run()
        found.append(requests)
    for whole, cut in zip(*found, strict=True):
        assert (output_of(whole), whole.logprobs) == (output_of(cut), cut.logprobs)
        assert len(cut.prompt_logprobs) == cut.prompt_len and cut.prompt_logprobs[0] is None
        for entry, expected in zip(cut.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
            assert entry is not None and expected is not None and entry.keys() == expected.keys()
            for token, found_one in entry.items():
                assert found_one.logprob == pytest.approx(expected[token].logprob, abs=1e-5)
                assert found_one.rank == expected[token].rank
