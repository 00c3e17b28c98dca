"""Sampling stays within the memory that the memory plan sets aside for it, and a batch that is
sampled in parts gets the tokens that it gets at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from tests.executor.harness import Harness, draft_target, output_of
from tests.executor.sampling.test_sampler import WAYS
from tests.random_examples import examples
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.executor.request import DecodingRules, LlmRequest
from tllm_spec.executor.resources.interface import SeqSlotManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling import logits as working_memory
from tllm_spec.executor.sampling.logits import (
    LogprobRows,
    apply_penalties,
    log_probabilities,
    mask_stop_ids,
    token_logprobs,
)
from tllm_spec.executor.sampling.row_group import RowPositions, SamplingState
from tllm_spec.executor.sampling.sharded_sampler import sampler_of
from tllm_spec.kernels.sampling.choose_token import choose_best
from tllm_spec.kernels.sampling.logit_filters import filter_cut
from tllm_spec.sampling_params import SamplingParams

INF = float("inf")


def penalise(
    logits: list[float], counts: list[int], in_prompt: list[bool], *penalties: float
) -> list[float]:
    columns = (torch.tensor([[penalty]]) for penalty in penalties)
    return apply_penalties(
        torch.tensor([logits]), torch.tensor([counts]), torch.tensor([in_prompt]), *columns
    )[0].tolist()


def test_repetition_shrinks_positive_and_deepens_negative_logits_of_prompt_and_output() -> None:
    found = penalise(
        [2.0, -2.0, 2.0, -2.0, 3.0],
        [1, 3, 0, 0, 0],
        [False, False, True, True, False],
        2.0,
        0.0,
        0.0,
    )
    assert found == [1.0, -4.0, 1.0, -4.0, 3.0]


def test_presence_counts_once_and_frequency_every_time_and_the_prompt_never() -> None:
    assert penalise([5.0] * 3, [0, 1, 3], [True, False, False], 1.0, 0.5, 0.0) == [5.0, 4.5, 4.5]
    assert penalise([5.0] * 3, [0, 1, 3], [True, False, False], 1.0, 0.0, 0.5) == [5.0, 4.5, 3.5]


def test_stop_ids_are_masked_in_early_rows_only() -> None:
    logits = torch.zeros(4, 6)
    stop_ids = torch.tensor([[2, 5], [2, 5], [3, 3], [-1, -1]])
    mask_stop_ids(logits, stop_ids, torch.tensor([True, False, True, True]))
    assert logits.tolist() == [
        [0, 0, -INF, 0, 0, -INF],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, -INF, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]


def test_choose_returns_the_best_token_and_minus_one_where_there_is_none() -> None:
    rows = torch.tensor(
        [
            [0.0, 2.0, 1.0],
            [0.0, torch.nan, 9.0],
            [-INF, -INF, -INF],
            [-INF, -5.0, -INF],
            [0, INF, 0],
        ]
    )
    assert choose_best(rows).tolist() == [1, -1, -1, 1, 1]


def filter_logits(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Parameters `[R, 1]`; what the filters exclude is -inf."""
    parameters = (column.squeeze(1) for column in (top_k, top_p, min_p))
    cut = filter_cut(logits, torch.ones(len(logits), device=logits.device), *parameters)
    return logits.masked_fill(logits < cut.unsqueeze(1), -INF)


def kept_by_the_rules(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """min_p, then top_k, then top_p, written out for one row without ties."""
    probs = torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept = [token for token in order if probs[token] >= min_p * probs[order[0]]][:top_k]
    total, reached, nucleus = sum(probs[token] for token in kept), 0.0, set()
    for token in kept:
        nucleus.add(token)
        reached += probs[token] / total
        if reached >= top_p:
            break
    return nucleus


@examples(200)
@given(
    order=st.permutations(range(12)),
    spread=st.floats(0.1, 3),
    top_k=st.integers(1, 12),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
)
def test_filters_keep_the_same_tokens_as_a_plain_implementation(
    order: list[int], spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = [spread * rank for rank in order]
    expected = kept_by_the_rules(logits, top_k, top_p, min_p)
    near = {
        len(kept_by_the_rules(logits, top_k, top_p * f, min_p * g))
        for f in (0.9999, 1.0001)
        for g in (0.9999, 1.0001)
    }
    if near != {len(expected)}:
        return  # on the border either answer is right
    columns = torch.tensor([[top_k]]), torch.tensor([[top_p]]), torch.tensor([[min_p]])
    found = filter_logits(torch.tensor([logits]), *columns)[0]
    assert {token for token, logit in enumerate(found.tolist()) if logit > -INF} == expected
    assert all(found[token] == torch.tensor(logits)[token] for token in expected)


def test_each_row_has_its_own_filters_and_off_means_untouched() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    top_k = torch.tensor([[50], [3], [50], [50]])
    top_p = torch.tensor([[1.0], [1.0], [0.3], [1.0]])
    min_p = torch.tensor([[0.0], [0.0], [0.0], [0.5]])
    together = filter_logits(logits, top_k, top_p, min_p)
    assert torch.equal(together[0], logits[0])
    for row in range(4):
        one = slice(row, row + 1)
        assert torch.equal(
            together[one], filter_logits(logits[one], top_k[one], top_p[one], min_p[one])
        )
    assert (together > -INF).sum(1).tolist()[1] == 3


def test_tokens_that_tie_with_the_last_kept_one_are_kept_too() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]])
    found = filter_logits(logits, torch.tensor([[2]]), torch.tensor([[1.0]]), torch.tensor([[0.0]]))
    assert (found > -INF)[0].tolist() == [True, True, True, False, True]


def test_tokens_excluded_before_stay_excluded() -> None:
    logits = torch.tensor([[-INF, 2.0, 1.0, -INF]])
    for top_k, top_p, min_p in ((4, 0.999, 0.0), (4, 1.0, 0.01), (3, 1.0, 0.0)):
        columns = torch.tensor([[top_k]]), torch.tensor([[top_p]]), torch.tensor([[min_p]])
        assert (filter_logits(logits, *columns) > -INF)[0].tolist() == [False, True, True, False]


def test_a_nucleus_of_very_many_tokens_ends_where_exact_sums_end_it() -> None:
    logits = torch.linspace(0, 1, 100_000)[None].flip(1)
    probabilities = logits.double().softmax(-1)
    found = filter_logits(
        logits, torch.tensor([[100_000]]), torch.tensor([[0.7]]), torch.tensor([[0.0]])
    )
    expected = int((probabilities.cumsum(-1) - probabilities < float(torch.tensor(0.7))).sum())
    assert abs(int((found > -INF).sum()) - expected) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1000, 32001, 128256])
def test_filters_and_log_probabilities_of_a_row_do_not_depend_on_other_rows(
    vocab_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (torch.randn(70, vocab_size, generator=generator, device="cuda") * 2).to(dtype)
    whole = torch.full((70, 1), vocab_size, device="cuda")
    columns = whole, torch.full((70, 1), 0.95, device="cuda"), torch.zeros(70, 1, device="cuda")
    tokens = torch.arange(70, device="cuda")
    filtered = filter_logits(logits, *columns)
    values, ids = token_logprobs(log_probabilities(logits), tokens, 20)
    for rows in (slice(0, 1), slice(1, 2), slice(3, 8), slice(5, 69)):
        own = [column[rows] for column in columns]
        assert torch.equal(filter_logits(logits[rows], *own), filtered[rows])
        alone = token_logprobs(log_probabilities(logits[rows]), tokens[rows], 20)
        assert torch.equal(alone[0], values[rows]) and torch.equal(alone[1], ids[rows])


CPU = torch.device("cpu")
VOCAB, NUM_REQUESTS, WINDOW = 1 << 13, 8, 4
EVERYTHING = {name: value for way in WAYS.values() for name, value in way.items()}
PROCESSED = EVERYTHING | {"logprobs_mode": "processed_logprobs"}


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


@pytest.mark.covering
@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("num_greedy", [0, 1])
@pytest.mark.parametrize("way", [*WAYS, "everything", "processed"])
def test_sampling_allocates_no_more_per_logit_than_is_planned(
    way: str, num_greedy: int, rejection: bool
) -> None:
    options = PROCESSED if way == "processed" else (WAYS | {"everything": EVERYTHING})[way]
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


@pytest.mark.covering
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
