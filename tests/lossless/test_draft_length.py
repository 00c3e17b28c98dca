"""What decides on the draft length of a round changes windows, and never a text."""

from itertools import cycle, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.executor.harness import Harness, draft_target, output_of, user_provided
from tests.executor.hooks import before_launch
from tests.lossless.engines import tiny_engine
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.llm import LLM
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.sampling_params import SamplingParams, SpeculationParams

MAX_DRAFT_LEN, NUM_REQUESTS = 4, 6
WITH_DRAFT_WEIGHTS = ("draft_target", "draft_target_one_model", "eagle3", "eagle3_two_model")
WITH_DRAFT_WEIGHTS += ("draft_target_one_model_tree", "eagle3_tree", "eagle3_static")
WITH_DRAFT_WEIGHTS += ("draft_target_onnxruntime", "eagle3_onnxruntime")


@pytest.fixture(scope="module")
def draft(drafts: tuple[Path, Path]) -> Path:
    return drafts[0]


def submit_all(harness: Harness, **options: Any) -> list[LlmRequest]:
    """Requests of 10 to 60 tokens; every second one is sampled."""
    return [
        harness.submit(
            [i + 1, 2, 3],
            max_tokens=10 + 10 * i,
            temperature=0.9 if i % 2 else None,
            seed=i,
            **options,
        )
        for i in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[list[int]]:
    harness = Harness(tiny, disable_overlap_scheduler=True)
    requests = submit_all(harness)
    harness.run()
    return list(map(output_of, requests))


def windows_by_batch_size(harness: Harness) -> dict[int, set[int]]:
    """Runs to the end. The draft lengths of generation rounds, by how many requests were
    generating."""
    seen: dict[int, set[int]] = {}

    def look(batch: ScheduledBatch) -> None:
        if requests := batch.generation_requests:
            seen.setdefault(len(requests), set()).add(len(requests[0].py_draft_tokens))

    before_launch(harness.executor, look)
    harness.run()
    return seen


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mode", WITH_DRAFT_WEIGHTS)
@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, {1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4}),
        ({"draft_len_schedule": {1: 4, 3: 2, 5: 0}}, {1: 4, 2: 4, 3: 2, 4: 2, 5: 0, 6: 0}),
        ({"draft_len_schedule": {1: 4, 2: 1, 4: 3}}, {1: 4, 2: 1, 3: 1, 4: 3, 5: 3, 6: 3}),
        ({"max_concurrency": 3}, {1: 4, 2: 4, 3: 4, 4: 0, 5: 0, 6: 0}),
    ],
)
def test_a_schedule_and_a_concurrency_limit_choose_the_windows_and_not_the_text(
    tiny: Path,
    drafts: tuple[Path, Path],
    plain: list[list[int]],
    mode: str,
    options: dict[str, Any],
    lengths: dict[int, int],
) -> None:
    harness = Harness(tiny, **tiny_engine(mode, drafts, MAX_DRAFT_LEN, **options))
    requests = submit_all(harness)
    seen = windows_by_batch_size(harness)
    assert len(seen) >= 4 and seen == {size: {lengths[size]} for size in seen}
    assert list(map(output_of, requests)) == plain


@pytest.mark.thinned
@pytest.mark.parametrize("mode", WITH_DRAFT_WEIGHTS)
def test_a_draft_length_that_is_new_in_every_round_changes_no_text(
    tiny: Path, drafts: tuple[Path, Path], plain: list[list[int]], mode: str
) -> None:
    harness = Harness(tiny, **tiny_engine(mode, drafts, MAX_DRAFT_LEN))
    random, chosen = Random(0), []

    def tier_for(batch_size: int) -> int:
        chosen.append(random.randrange(MAX_DRAFT_LEN + 1))
        return chosen[-1]

    harness.parts.tier_for = tier_for
    requests = submit_all(harness)
    harness.run()
    assert list(map(output_of, requests)) == plain
    assert {(0, MAX_DRAFT_LEN), (MAX_DRAFT_LEN, 0)} <= set(pairwise(chosen))


@pytest.mark.thinned
@pytest.mark.parametrize("mode", WITH_DRAFT_WEIGHTS)
@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_are_right_again_at_once_after_rounds_without_drafts(
    tiny: Path, drafts: tuple[Path, Path], plain: list[list[int]], mode: str, overlap: bool
) -> None:
    """A target that drafts for itself is always right, unless its draft cache is stale."""
    if mode.startswith("draft_target"):
        drafts = (tiny, drafts[1])
    options = tiny_engine(mode, drafts, MAX_DRAFT_LEN) | {"disable_overlap_scheduler": not overlap}
    harness = Harness(tiny, **options)
    lengths = cycle([4, 4, 4, *[0] * 8, 1, 4, 2, 3, *[0] * 6])
    harness.parts.tier_for = lambda *_: next(lengths)
    requests = submit_all(harness)
    harness.run()
    assert list(map(output_of, requests)) == plain
    stats = sum((request.counters.stats() for request in requests), SpeculativeStats())
    assert stats.num_drafted_tokens > 50
    if mode.startswith("draft_target"):
        # Drafts of a request's last round may lie after its end.
        assert stats.num_drafted_tokens - stats.num_accepted_tokens <= NUM_REQUESTS * MAX_DRAFT_LEN


@pytest.mark.thinned
@pytest.mark.parametrize("mode", ["user_provided", *WITH_DRAFT_WEIGHTS])
def test_requests_with_limits_of_their_own_share_rounds_with_others(
    tiny: Path, drafts: tuple[Path, Path], plain: list[list[int]], mode: str
) -> None:
    def propose(request: LlmRequest) -> list[int]:
        text = plain[request.tokens[0] - 1]
        return text[request.num_output_tokens :][: request.num_drafts_wanted]

    own = mode == "user_provided"
    harness = Harness(
        tiny, **(user_provided(propose) if own else tiny_engine(mode, drafts, MAX_DRAFT_LEN))
    )
    requests = submit_all(harness)
    for request in requests:
        request.draft_limit = request.tokens[0] % 4
    harness.run()
    assert list(map(output_of, requests)) == plain
    for request in requests:
        drafted = request.counters.stats().per_position_drafted
        assert [count > 0 for count in drafted] == [
            place < request.draft_limit for place in range(MAX_DRAFT_LEN)
        ]


@pytest.mark.thinned
@pytest.mark.parametrize("mode", WITH_DRAFT_WEIGHTS)
def test_each_request_speculates_as_its_parameters_say(
    tiny: Path, drafts: tuple[Path, Path], mode: str
) -> None:
    wishes: list[dict[str, Any]] = [
        {},
        {"enabled": False},
        {"max_draft_len": 0},
        {"max_draft_len": 2},
        {"max_draft_len": 9},
    ]
    limits = [4, 0, 0, 2, 4]
    all_params = [
        SamplingParams(
            max_tokens=40, temperature=0.9, seed=1, speculation=SpeculationParams(**wish)
        )
        for wish in wishes
    ]
    options = tiny_engine(mode, drafts, MAX_DRAFT_LEN)
    with LLM(tiny, skip_tokenizer_init=True, max_batch_size=8, **options) as llm:
        outputs = llm.generate([[1, 2, 3]] * len(wishes), all_params, use_tqdm=False)
    assert isinstance(outputs, list)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    for output, limit in zip(outputs, limits, strict=True):
        stats = output.speculative_decoding
        assert stats is not None
        assert [count > 0 for count in stats.per_position_drafted] == [
            place < limit for place in range(4)
        ]


def test_the_samples_of_a_request_differ_and_do_not_depend_on_speculation(
    tiny: Path, draft: Path
) -> None:
    usual: dict[str, Any] = {"skip_tokenizer_init": True, "max_batch_size": 8}
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=4, n=5)
    found = []
    for options in ({}, draft_target(draft, 2)):
        with LLM(tiny, **usual, **options) as llm:
            for _ in range(2):
                several = llm.generate([1, 2, 3], params)
                assert not isinstance(several, list)
                found.append([sample.token_ids for sample in several.outputs])
            first = llm.generate([1, 2, 3], SamplingParams(max_tokens=30, temperature=1.0, seed=4))
            assert not isinstance(first, list) and first.outputs[0].token_ids == found[-1][0]
            llm.check_integrity()
    assert found[0] == found[1] == found[2] == found[3]
    assert len({tuple(sample) for sample in found[0]}) == 5
