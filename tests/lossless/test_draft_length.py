"""What decides on the draft length of a round changes windows, and never a text."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.executor.harness import Harness, draft_target, output_of, user_provided
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams, SpeculationParams

MAX_DRAFT_LEN, NUM_REQUESTS = 4, 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("draft"), noise=0.15)


def submit_all(harness: Harness, **options: Any) -> list[LlmRequest]:
    """Requests of 10 to 60 tokens; every second one is sampled."""
    return [
        harness.submit(
            [i + 1, 2, 3], max_tokens=10 + 10 * i, temperature=0.9 if i % 2 else None, seed=i, **options
        )
        for i in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[list[int]]:
    harness = Harness(tiny)
    requests = submit_all(harness)
    harness.run()
    return list(map(output_of, requests))


def windows_by_batch_size(harness: Harness) -> dict[int, set[int]]:
    """Runs to the end. The draft lengths of generation rounds, by how many requests were generating."""
    seen: dict[int, set[int]] = {}
    while True:
        generating = [r for r in harness.parts.scheduler.running if r.state is RequestState.GENERATION]
        if not harness.round():
            return seen
        if generating:
            seen.setdefault(len(generating), set()).add(len(generating[0].py_draft_tokens))


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, {1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4}),
        ({"draft_len_schedule": {1: 4, 3: 2, 5: 0}}, {1: 4, 2: 4, 3: 2, 4: 2, 5: 0, 6: 0}),
        ({"draft_len_schedule": {2: 1, 4: 3}}, {1: 4, 2: 1, 3: 1, 4: 3, 5: 3, 6: 3}),
        ({"max_concurrency": 3}, {1: 4, 2: 4, 3: 4, 4: 0, 5: 0, 6: 0}),
    ],
)
def test_a_schedule_and_a_concurrency_limit_choose_the_windows_and_not_the_text(
    tiny: Path, draft: Path, plain: list[list[int]], options: dict[str, Any], lengths: dict[int, int]
) -> None:
    harness = Harness(tiny, **draft_target(draft, MAX_DRAFT_LEN, **options))
    requests = submit_all(harness)
    assert windows_by_batch_size(harness) == {size: {length} for size, length in lengths.items()}
    assert list(map(output_of, requests)) == plain


def test_a_draft_length_that_is_new_in_every_round_changes_no_text(
    tiny: Path, draft: Path, plain: list[list[int]]
) -> None:
    harness = Harness(tiny, **draft_target(draft, MAX_DRAFT_LEN))
    random = Random(0)
    harness.parts.draft_len_for = lambda batch_size: random.randrange(MAX_DRAFT_LEN + 1)
    requests = submit_all(harness)
    harness.run()
    assert list(map(output_of, requests)) == plain


@pytest.mark.parametrize("host", [True, False], ids=["user_provided", "draft_target"])
def test_requests_with_limits_of_their_own_share_rounds_with_others(
    tiny: Path, draft: Path, plain: list[list[int]], host: bool
) -> None:
    drafts = dict(enumerate(plain))

    def propose(request: LlmRequest) -> list[int]:
        return drafts[request.tokens[0] - 1][request.num_output_tokens :][: request.num_drafts_wanted]

    harness = Harness(tiny, **(user_provided(propose) if host else draft_target(draft, MAX_DRAFT_LEN)))
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


def test_speculation_of_one_request_is_what_its_parameters_say(tiny: Path, draft: Path) -> None:
    wishes: list[dict[str, Any]] = [
        {},
        {"enabled": False},
        {"max_draft_len": 0},
        {"max_draft_len": 2},
        {"max_draft_len": 9},
    ]
    limits = [4, 0, 0, 2, 4]
    all_params = [
        SamplingParams(max_tokens=40, temperature=0.9, seed=1, speculation=SpeculationParams(**wish))
        for wish in wishes
    ]
    with LLM(tiny, skip_tokenizer_init=True, max_batch_size=8, **draft_target(draft, MAX_DRAFT_LEN)) as llm:
        outputs = llm.generate([[1, 2, 3]] * len(wishes), all_params, use_tqdm=False)
    assert isinstance(outputs, list)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    for output, limit in zip(outputs, limits, strict=True):
        stats = output.speculative_decoding
        assert stats is not None
        assert [count > 0 for count in stats.per_position_drafted] == [place < limit for place in range(4)]


def test_the_samples_of_a_request_differ_and_do_not_depend_on_speculation(tiny: Path, draft: Path) -> None:
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
