"""Draft lengths that change at any time: every drafter gives the tokens of plain decoding."""

from collections.abc import Callable
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any

import pytest

from tests.executor.harness import Harness, ScriptedDrafter, draft_target, output_of, user_provided
from tests.executor.hooks import before_launch
from tests.lossless.cases import Case, assert_same, generate
from tests.lossless.engines import DRAFT_MODEL, HEAD, MODES, engine, tiny_engine
from tests.lossless.oracle import GetOracle
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.building import rounds
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput, SpeculativeStats
from tllm_spec.sampling_params import SamplingParams, SpeculationParams

MAX_DRAFT_LEN = 4
# Seconds by batch size and draft length: long drafts are cheap for small batches.
ROUND_TIMES = MeasuredRoundTimes({1: {0: 1, 1: 1.2, 4: 0.9}, 7: {0: 1, 1: 1.5, 4: 3}})
DRAFTING = ("user_provided", *(mode for mode in MODES if mode != "plain"))
RUNS = list(product(DRAFTING, (True, False)))
EVERY_ROUND = {"update_interval": 1, "warmup_batches": 0, "ema_alpha": 0.9}
STRATEGIES: dict[str, dict[str, Any]] = {
    "cost_model": {
        "adaptive": {"candidate_steps": [0, 1, 4], "window_trials": 32.0, "probe_time_share": 1.0}
    },
    "cost_model_without_0": {"adaptive": {"candidate_steps": [1, 3], "window_trials": 32.0}},
    "ema": {
        "adaptive": {
            "strategy": "ema",
            **EVERY_ROUND,
            1: {"candidate_steps": [0, 1, 2, 4]},
            "3": {"candidate_steps": [1, 3]},
            5: {"candidate_steps": [2, 0]},
        }
    },
    "gate": {"acceptance_rate_threshold": 1.0, "acceptance_rate_window_size": 3},
    "gate_over_ema": {
        "acceptance_rate_threshold": 1.0,
        "acceptance_rate_window_size": 3,
        "adaptive": {"strategy": "ema", **EVERY_ROUND, 1: {"candidate_steps": [1, 3]}},
    },
    "context_buckets": {
        "adaptive": {
            "candidate_steps": [0, 1, 4],
            "window_trials": 32.0,
            "probe_time_share": 1.0,
            "context_buckets": [12, 30],
        }
    },
}


def submit_all(harness: Harness) -> list[LlmRequest]:
    """Seven requests of 8 to 56 tokens; every second one is sampled."""
    return [
        harness.submit(
            [i + 1, 2, 3], max_tokens=8 + 8 * i, temperature=0.9 if i % 2 else None, seed=i
        )
        for i in range(7)
    ]


@pytest.fixture(scope="module")
def tiny_plain(tiny: Path) -> list[list[int]]:
    harness = Harness(tiny, disable_overlap_scheduler=True)
    requests = submit_all(harness)
    harness.run()
    return list(map(output_of, requests))


def half_right(plain: list[list[int]]) -> ScriptedDrafter:
    """Right tokens at even output positions; at odd ones wrong tokens, or none at every third."""

    def propose(request: LlmRequest) -> list[int]:
        place, wanted = request.num_output_tokens, request.num_drafts_wanted
        right = plain[request.tokens[0] - 1][place : place + wanted]
        return right if place % 2 == 0 else [63 - token for token in right] if place % 3 else []

    return ScriptedDrafter(propose)


def options_of(
    mode: str, overlap: bool, drafts: tuple[Path, Path], plain: list[list[int]], **speculation: Any
) -> dict[str, Any]:
    if mode == "user_provided":
        own = {
            "decoding_type": "User_Provided",
            "drafter": half_right(plain),
            "max_draft_len": MAX_DRAFT_LEN,
        }
        options: dict[str, Any] = {"speculative_config": own | speculation}
    else:
        options = tiny_engine(mode, drafts, MAX_DRAFT_LEN, **speculation)
    return options | {"disable_overlap_scheduler": not overlap}


def chosen_lengths(harness: Harness, choose: Callable[[int], int] | None = None) -> list[int]:
    """The draft lengths of the rounds to come, as `choose` or the controller chooses them."""
    lengths: list[int] = []
    choose = choose or harness.parts.controller.tier_for

    def chosen(batch_size: int) -> int:
        lengths.append(choose(batch_size))
        return lengths[-1]

    harness.parts.tier_for = chosen
    return lengths


@pytest.mark.thinned(12)
@pytest.mark.parametrize(("mode", "overlap"), RUNS)
def test_another_tier_in_every_round_changes_no_text(
    tiny: Path, drafts: tuple[Path, Path], tiny_plain: list[list[int]], mode: str, overlap: bool
) -> None:
    """The controller has chosen none of these lengths, and some are not in its ladder."""
    ladder = {"candidate_steps": [0, 1, 4]}
    harness = Harness(tiny, **options_of(mode, overlap, drafts, tiny_plain, adaptive=ladder))
    assert harness.parts.max_in_flight == overlap
    trees = harness.parts.slots.shapes.further_tiers
    copied = "_sa" in mode and not mode.endswith("_static")
    assert len(trees) == 3 * (mode.endswith("_tree") and mode != "ngram_tree") + copied
    coming = cycle((4, 0, 3, 1, 4, 2, 0, *trees, *[1, 0] * bool(trees), *reversed(trees), 4, 0))
    lengths = chosen_lengths(harness, lambda *_: next(coming))
    requests = submit_all(harness)
    harness.run()
    assert list(map(output_of, requests)) == tiny_plain
    assert {(0, MAX_DRAFT_LEN), (MAX_DRAFT_LEN, 0)} <= set(pairwise(lengths))
    assert set(trees) <= set(lengths)
    estimate = harness.parts.controller.state()["slots"]["1"]["acceptance"]
    assert all(0 < rate < 1 for rate in estimate)


@pytest.mark.thinned(12)
@pytest.mark.parametrize(("mode", "overlap"), RUNS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_moves_between_draft_lengths_and_changes_no_text(
    monkeypatch: pytest.MonkeyPatch,
    tiny: Path,
    drafts: tuple[Path, Path],
    tiny_plain: list[list[int]],
    mode: str,
    overlap: bool,
    strategy: str,
) -> None:
    monkeypatch.setattr(rounds.RoundTimer, "measure", lambda *_, **__: ROUND_TIMES)
    harness = Harness(tiny, **options_of(mode, overlap, drafts, tiny_plain, **STRATEGIES[strategy]))
    lengths = chosen_lengths(harness)
    requests = submit_all(harness)
    harness.run()
    assert list(map(output_of, requests)) == tiny_plain
    assert len(set(lengths)) > 1 and max(lengths) > 0
    assert set(lengths) <= set(harness.parts.controller.tiers)
    if strategy == "context_buckets":
        assert harness.parts.controller.context_len > 30
    if strategy.startswith("gate"):
        assert harness.parts.controller.state()["limits"]["gate"]["is_closed"] and 0 in lengths


@pytest.mark.slow  # as the test above, with the models of the zoo
@pytest.mark.parametrize(
    ("mode", "overlap"),
    [
        ("ngram", True),
        ("eagle3", True),
        ("draft_target", False),
        ("eagle3_two_model", True),
        ("eagle3_onnxruntime", True),
    ],
)
def test_sampled_texts_are_those_of_plain_decoding_while_tiers_change(
    cases: list[Case], plain: list[RequestOutput], oracle: GetOracle, mode: str, overlap: bool
) -> None:
    options = engine(mode, 5, overlap=overlap, adaptive={})
    with LLM("zoo:llama", max_batch_size=8, **options) as llm:
        lengths = cycle([5, 0, 2, 5, 1, 0, 0, 3, *[0] * 18])
        llm._executor.parts.tier_for = lambda *_: next(lengths)
        outputs = generate(llm, cases, 5)
        llm.check_integrity()
    for case, output, expected in zip(cases, outputs, plain, strict=True):
        assert_same(case, output, expected, oracle)


@pytest.mark.parametrize(
    "draft",
    [None, *(pytest.param(each, marks=pytest.mark.slow) for each in (HEAD, DRAFT_MODEL))],
)
def test_sampled_texts_are_those_of_plain_decoding_in_every_tier_of_auto(
    monkeypatch: pytest.MonkeyPatch,
    cases: list[Case],
    plain: list[RequestOutput],
    oracle: GetOracle,
    draft: str | None,
) -> None:
    monkeypatch.setattr(rounds.RoundTimer, "measure", lambda *_, **__: ROUND_TIMES)
    spec = {"decoding_type": "AUTO", "speculative_model": draft}
    with LLM("zoo:llama", max_batch_size=8, speculative_config=spec) as llm:
        tiers = llm._executor.parts.controller.tiers
        assert len(tiers) == (5 if draft is None else 10)
        coming = cycle([*tiers, 0, *reversed(tiers)])
        llm._executor.parts.tier_for = lambda *_: next(coming)
        outputs = generate(llm, cases[:4], 3)
        llm.check_integrity()
    stats = [each.speculative_decoding or SpeculativeStats() for each in outputs]
    assert sum(each.num_accepted_tokens for each in stats)
    for case, output, expected in zip(cases, outputs, plain, strict=False):
        assert_same(case, output, expected, oracle)


# What decides on the draft length of a round changes windows, and never a text.


WITH_DRAFT_WEIGHTS = ("draft_target", "draft_target_one_model", "eagle3", "eagle3_two_model")
WITH_DRAFT_WEIGHTS += ("draft_target_one_model_tree", "eagle3_tree", "eagle3_static")
WITH_DRAFT_WEIGHTS += ("draft_target_onnxruntime", "eagle3_onnxruntime")


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
        ({}, dict.fromkeys(range(1, 8), 4)),
        ({"draft_len_schedule": {1: 4, 3: 2, 5: 0}}, {1: 4, 2: 4, 3: 2, 4: 2, 5: 0, 6: 0, 7: 0}),
        ({"draft_len_schedule": {1: 4, 2: 1, 4: 3}}, {1: 4, 2: 1, 3: 1, 4: 3, 5: 3, 6: 3, 7: 3}),
        ({"max_concurrency": 3}, {1: 4, 2: 4, 3: 4, 4: 0, 5: 0, 6: 0, 7: 0}),
    ],
)
def test_a_schedule_and_a_concurrency_limit_choose_the_windows_and_not_the_text(
    tiny: Path,
    drafts: tuple[Path, Path],
    tiny_plain: list[list[int]],
    mode: str,
    options: dict[str, Any],
    lengths: dict[int, int],
) -> None:
    harness = Harness(tiny, **tiny_engine(mode, drafts, MAX_DRAFT_LEN, **options))
    requests = submit_all(harness)
    seen = windows_by_batch_size(harness)
    assert len(seen) >= 4 and seen == {size: {lengths[size]} for size in seen}
    assert list(map(output_of, requests)) == tiny_plain


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mode", WITH_DRAFT_WEIGHTS)
@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_are_right_again_at_once_after_rounds_without_drafts(
    tiny: Path, drafts: tuple[Path, Path], tiny_plain: list[list[int]], mode: str, overlap: bool
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
    assert list(map(output_of, requests)) == tiny_plain
    stats = sum((request.counters.stats() for request in requests), SpeculativeStats())
    assert stats.num_drafted_tokens > 50
    if mode.startswith("draft_target"):
        # Drafts of a request's last round may lie after its end.
        assert stats.num_drafted_tokens - stats.num_accepted_tokens <= 7 * MAX_DRAFT_LEN


@pytest.mark.thinned(8)
@pytest.mark.parametrize("mode", ["user_provided", *WITH_DRAFT_WEIGHTS])
def test_requests_with_limits_of_their_own_share_rounds_with_others(
    tiny: Path, drafts: tuple[Path, Path], tiny_plain: list[list[int]], mode: str
) -> None:
    def propose(request: LlmRequest) -> list[int]:
        text = tiny_plain[request.tokens[0] - 1]
        return text[request.num_output_tokens :][: request.num_drafts_wanted]

    own = mode == "user_provided"
    harness = Harness(
        tiny,
        **(user_provided(propose) if own else tiny_engine(mode, drafts, MAX_DRAFT_LEN)),
    )
    requests = submit_all(harness)
    for request in requests:
        request.draft_limit = request.tokens[0] % 4
    harness.run()
    assert list(map(output_of, requests)) == tiny_plain
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
    tiny: Path, drafts: tuple[Path, Path]
) -> None:
    usual: dict[str, Any] = {"skip_tokenizer_init": True, "max_batch_size": 8}
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=4, n=5)
    found = []
    for options in ({}, draft_target(drafts[0], 2)):
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
