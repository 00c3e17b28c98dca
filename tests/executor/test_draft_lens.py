"""Draft lengths at start-up: which rounds are timed and captured, and what limits leave."""

import json
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.executor.conftest import Clock
from tests.executor.draft_caches import one_model
from tests.executor.graph_rounds import keys_of_build
from tests.executor.harness import Harness, output_of
from tests.lossless.engines import tiny_engine
from tests.models.helpers import MAX_POSITIONS, reference_logits, save_checkpoint
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec import LLM, SamplingParams
from tllm_spec.config.draft_shape import DraftShape, DraftShapes, chain_of
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import NGramDecodingConfig
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.building.rounds import RoundTimer, without_outliers
from tllm_spec.executor.engine.rows import AttentionGroups, PagedGroup
from tllm_spec.executor.graphs.context_graphs import ContextLimits, DummyContexts
from tllm_spec.executor.graphs.slot_graphs import CudaGraphs, GraphKey, graph_keys
from tllm_spec.executor.speculative.draft_length.adaptive import controller_for
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.drafting.draft_net import DraftNet

LADDER = {"candidate_steps": [0, 1, 4]}
NGRAM: dict[str, Any] = {"decoding_type": "NGram", "max_draft_len": 4, "adaptive": LADDER}
OF_OTHERS = {"token_counts", "step_time_ms", "batch_sizes", "batch_overhead_ms"}
SECONDS = "tllm_spec.executor.rounds.round_runner.RoundRunner.seconds"


@pytest.mark.parametrize(
    "mode", ["draft_target_one_model", "draft_target", "eagle3_two_model", "ngram"]
)
def test_start_up_times_every_length_of_the_ladder_and_charges_separate_drafters(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, drafts: tuple[Path, Path], mode: str
) -> None:
    timed: list[tuple[int, int]] = []

    def seconds(_: Any, key: Any, *__: Any) -> float:
        timed.append((key.batch_size, key.shape.depth))
        return 1.0 + 0.01 * key.shape.depth

    monkeypatch.setattr(SECONDS, seconds)
    monkeypatch.setattr(
        "tllm_spec.executor.speculative.drafting.model_drafter.ModelDrafter.seconds_before",
        lambda _, key, *__: 0.5 * key.shape.depth,
    )
    harness = Harness(tiny, **tiny_engine(mode, drafts, 4, adaptive=LADDER))
    assert timed == [(size, steps) for size in (1, 2, 4, 8) for steps in (0, 1, 4, 4, 1, 0)]
    controller = harness.parts.controller
    controller.observe(ObservedRound(1, [], 0))
    charged = 0.5 if mode == "draft_target" else 0.0
    row = controller.state()["round_ms"]["1"]
    assert row["4"] - row["0"] == pytest.approx(1e3 * 4 * (0.01 + charged))


def test_round_times_are_written_and_read_again_by_this_engine_and_by_others(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    """The others add what rows take and what requests add."""

    def seconds(_: Any, key: Any, *__: Any) -> float:
        return 1.0 + 0.01 * key.batch_size * key.shape.window + 0.1 * key.batch_size

    file = tmp_path / "times.json"
    given = {"speculative_config": NGRAM | {"round_times_path": str(file)}}
    monkeypatch.setattr(SECONDS, seconds)
    measured = Harness(tiny, **given).parts.controller
    monkeypatch.delattr(SECONDS)
    table, rows = json.loads(file.read_text()), []
    of_others = {name: each for name, each in table.items() if name != "round_ms"}
    for content in (table, of_others):
        file.write_text(json.dumps(content))
        read = Harness(tiny, **given).parts.controller
        for controller in (measured, read):
            controller.observe(ObservedRound(8, [], 0))
            rows.append(controller.state()["round_ms"]["8"])
    assert all(row == pytest.approx(rows[0]) for row in rows) and len(rows[0]) == 3
    steps = dict(zip(table["token_counts"], table["step_time_ms"], strict=True))
    added = dict(zip(table["batch_sizes"], table["batch_overhead_ms"], strict=True))
    assert steps[40] + added[8] == pytest.approx(rows[0]["4"])
    assert min(added.values()) == 0 and of_others.keys() == OF_OTHERS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no JSON", "round_times_path = .*: it is not JSON"),
        ('{"token_counts": [1, 2], "step_time_ms": [1.0]}', "needed: .*step_time_ms"),
        ('{"round_ms": {"1": {"0": 1.0, "1": 1.1}}}', "it has no times of draft lengths 4"),
        ("[]", "needed: .*step_time_ms"),
    ],
)
def test_files_of_other_round_times_are_refused(
    content: str, message: str, tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "times.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        Harness(tiny, speculative_config=NGRAM | {"round_times_path": str(file)})


def test_a_drifting_clock_favours_no_length(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    """Each round takes 1 ms more than the one before. The order of timing is mirrored."""
    calls = count()

    def seconds(_: Any, key: Any, *__: Any) -> float:
        return 1.0 + 0.01 * key.shape.depth + 0.001 * next(calls)

    monkeypatch.setattr(SECONDS, seconds)
    controller = Harness(tiny, speculative_config=NGRAM).parts.controller
    controller.observe(ObservedRound(1, [], 0))
    row = controller.state()["round_ms"]["1"]
    assert [row[steps] - row["0"] for steps in ("1", "4")] == pytest.approx([10, 40])


def test_times_without_graphs_have_no_contexts_and_are_not_corrected(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    monkeypatch.setattr(SECONDS, lambda _, key, *__: 1.0)
    controller = Harness(tiny, speculative_config=NGRAM).parts.controller
    controller.observe(ObservedRound(1, [], 0, seconds=3.0))
    assert controller.state()["round_ms"]["1"]["0"] == pytest.approx(1000)


@pytest.mark.parametrize("mode", ["draft_target", "eagle3_two_model"])
def test_without_graphs_a_separate_drafter_is_timed_with_dummy_requests(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, tiny: Path, drafts: tuple[Path, Path], mode: str
) -> None:
    """Each forward of its network takes 10 ms. The dummy requests leave nothing behind."""
    forward = DraftNet.forward

    def slow(*args: Any, **keywords: Any) -> Any:
        clock.now += 0.01
        return forward(*args, **keywords)

    monkeypatch.setattr(DraftNet, "forward", slow)
    monkeypatch.setattr("tllm_spec.executor.building.rounds.EAGER_SIZES", (1,))
    monkeypatch.setattr("tllm_spec.executor.graphs.slot_graphs.TIMED_RUNS", 4)  # as when it serves
    harness = Harness(tiny, **tiny_engine(mode, drafts, 4, adaptive=LADDER))
    harness.parts.controller.observe(ObservedRound(1, [], 0))
    row = harness.parts.controller.state()["round_ms"]["1"]
    assert [row[steps] - row["0"] for steps in ("1", "4")] == pytest.approx([10, 40])
    monkeypatch.setattr(DraftNet, "forward", forward)
    request, plain = harness.submit([3, 1, 4], 20, seed=5), Harness(tiny)
    reference = plain.submit([3, 1, 4], 20, seed=5)
    harness.run()
    plain.run()
    assert output_of(request) == output_of(reference)


def test_drafts_are_not_free_next_to_batches_that_have_none(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    """Batches of 5 are on a line between 4 and 8, and rounds of 8 never have drafts."""
    monkeypatch.setattr(SECONDS, lambda _, key, *__: key.batch_size * (1.0 + key.shape.depth))
    harness = Harness(tiny, speculative_config=NGRAM | {"max_concurrency": 5})
    controller = harness.parts.controller
    controller.observe(ObservedRound(5, [], 0))
    row = controller.state()["round_ms"]["5"]
    assert row["4"] == pytest.approx(5 * row["0"]) and controller.tier_for(6) == 0


def test_start_up_times_rounds_on_as_many_threads_as_they_will_run_on(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    """A small model runs on one thread; the caller's thread has two, before and after."""
    seen: set[int] = set()

    def seconds(_: Any, key: Any, *__: Any) -> float:
        seen.add(torch.get_num_threads())
        return 1.0 + 0.01 * key.shape.depth

    monkeypatch.setattr(SECONDS, seconds)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        harness = Harness(tiny, speculative_config=NGRAM)
        assert seen == {1} == {harness.parts.cpu_threads} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_without_adaptive_nothing_is_timed(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    monkeypatch.setattr("tllm_spec.executor.building.rounds.RoundTimer", None)
    for own in ({}, {"adaptive": "conservative"}):
        config = {"decoding_type": "NGram", "max_draft_len": 7, **own}
        assert Harness(tiny, speculative_config=config).parts.controller.tier_for(1) in (3, 7)


def test_windows_of_a_full_batch_fit_one_forward() -> None:
    config = NGramDecodingConfig(max_draft_len=4)
    controller = controller_for(config, max_num_tokens=12)
    assert [controller.tier_for(n) for n in (1, 2, 3, 4, 5, 6, 12, 13)] == [4, 4, 3, 2, 1, 1, 0, 0]
    assert controller.tiers_at(4) == {2}
    adaptive = controller_for(
        NGramDecodingConfig(max_draft_len=4, adaptive=LADDER), max_num_tokens=12
    )
    assert [adaptive.tiers_at(size) for size in (2, 3, 13)] == [{0, 1, 4}, {0, 1}, {0}]
    scheduled = NGramDecodingConfig(max_draft_len=4, draft_len_schedule={1: 4, 3: 2})
    limited = controller_for(scheduled, max_num_tokens=12)
    assert [limited.tier_for(size) for size in (2, 3, 5)] == [4, 2, 1]


def test_graphs_of_an_adaptive_draft_length_end_where_a_limit_begins(
    tiny: Path, drafts: tuple[Path, Path]
) -> None:
    """At 5 requests, or where the windows of longer drafts fill a forward. Every length at a size
    is timed."""
    ladder = {"adaptive": {"candidate_steps": [1, 3]}}

    def pairs(options: dict[str, Any], **more: Any) -> set[tuple[int, int]]:
        keys = keys_of_build(tiny, **tiny_engine("eagle3", drafts, 3, **options), **more)
        return {(key.batch_size, key.shape.depth) for key in keys}

    short = {(size, steps) for size in (1, 2, 4, 5) for steps in (1, 3)}
    plain = {(size, 0) for size in (1, 2, 4, 8)}  # where no request wants drafts
    assert pairs(ladder | {"max_concurrency": 5}) == short | plain | {(5, 0)}
    small = {
        (size, steps) for size in (1, 2, 3) for steps in (1, 3)
    }  # of 12 rows: 4 are the contexts'
    assert pairs(ladder, max_num_tokens=16) == small | plain | {(3, 0), (4, 1), (8, 1)}


def test_times_without_graphs_are_taken_without_outliers(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, drafts: tuple[Path, Path]
) -> None:
    times = {0: 1.0, 1: 9.0, 4: 1.5}
    monkeypatch.setattr(SECONDS, lambda _, key, *__: times[key.shape.depth])
    harness = Harness(tiny, **tiny_engine("eagle3", drafts, 4, adaptive=LADDER))
    controls = harness.parts.controller
    controls.tier_for(1)
    assert controls.state()["round_ms"]["1"] == pytest.approx({"0": 1000, "1": 1500, "4": 1500})


def test_a_time_above_that_of_more_drafts_is_replaced_by_it() -> None:
    row = {0: 9.0, 1: 19.0, 3: 12.0, 5: 14.0}
    found = without_outliers(row, DraftShapes.chains(5))
    assert found == {0: 9.0, 1: 12.0, 3: 12.0, 5: 14.0}


def test_a_shallow_tree_says_nothing_about_the_time_of_a_longer_chain() -> None:
    trees = [DraftShape(2, 6, 3), DraftShape(5, 12, 3)]
    shapes = DraftShapes(list(map(chain_of, range(6))), trees, trees[1])
    row = {2: 12.0, 5: 15.0, 6: 11.0, 7: 14.0}
    assert without_outliers(row, shapes) == {2: 11.0, 5: 14.0, 6: 11.0, 7: 14.0}
    copied = {0: 12.0, 1: 14.0, 3: 18.0, 4: 11.0}  # the last are 3 copied ones
    found = without_outliers(copied, DraftShapes.chains(3, copies=True))
    assert found == {0: 11.0, 1: 14.0, 3: 18.0, 4: 11.0}


# Rounds that are timed with contexts before the first request: what they read, and that they leave
# nothing.


CPU = torch.device("cpu")
DUMMY = 8
LIMITS = ContextLimits(300, 10)
DUMMY_CONTEXTS_LADDER = {"adaptive": {"candidate_steps": [0, 1, 3]}}


@pytest.fixture
def harness(tiny: Path, tmp_path: Path, eager_graphs: None) -> Harness:
    head = write_tiny_eagle3(tmp_path / "head", num_captured=2)
    harness = Harness(
        tiny, max_seq_len=300, **one_model(tiny, head, "eagle3", **DUMMY_CONTEXTS_LADDER)
    )
    with torch.inference_mode():
        keys = graph_keys((2, 4), lambda _: {0, 1, 3})
        harness.parts.runner.capture_graphs(keys, pads=True)
    return harness


@torch.inference_mode()
def test_each_round_reads_its_own_pages_at_the_same_lengths(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = harness.parts
    seen: list[tuple[list[int], list[int], set[int]]] = []

    def seconds(graphs: CudaGraphs, key: GraphKey, slots: list[int], renew: Any) -> float:
        for _ in range(3):
            renew()
            tables = parts.kv.groups[0].table.device_rows[: key.batch_size]
            seen.append((slots, parts.slots.kv_lens[:5].tolist(), set(tables[tables > 0].tolist())))
            graphs.replay(slots, key.shape, key.sampled)
        return 2.0

    monkeypatch.setattr(CudaGraphs, "seconds", seconds)
    assert parts.runner.seconds_with_contexts(GraphKey(4, chain_of(3), False), LIMITS) == 2.0
    assert seen == [([0, 1, 2, 3], [300] * 4 + [0], set(range(1, 1 + 4 * 10)))] * 3
    assert not parts.slots.kv_lens[:DUMMY].any() and not parts.kv.groups[0].table.device_rows.any()


@torch.inference_mode()
def test_texts_after_timing_are_those_of_an_engine_that_was_not_timed(
    harness: Harness, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(graphs: CudaGraphs, key: GraphKey, slots: list[int], renew: Any) -> float:
        renew()
        graphs.replay(slots, key.shape, key.sampled)
        return 1.0

    monkeypatch.setattr(CudaGraphs, "seconds", seconds)
    for key in graph_keys((2, 4), lambda _: {0, 1, 3}):
        assert harness.parts.runner.seconds_with_contexts(key, LIMITS) == 1.0
    plain = Harness(tiny, max_seq_len=300)
    requests = [
        each.submit([5, 9, 2, i], max_tokens=40) for each in (harness, plain) for i in range(4)
    ]
    for each in (harness, plain):
        each.run()
    assert list(map(output_of, requests[:4])) == list(map(output_of, requests[4:]))


def test_contexts_are_as_long_as_there_is_place_for_them(harness: Harness) -> None:
    parts = harness.parts
    slots, rows = parts.slots, parts.runner.engine.rows

    def length(batch_size: int, num_pages: int) -> int:
        backend = Mock(pool=Mock(num_pages=num_pages))
        attention = AttentionGroups([PagedGroup(backend, rows)])
        return DummyContexts(slots, attention, LIMITS).length(batch_size)

    assert length(1, 1000) == 300
    assert length(4, 1 + 4 * 9) == 9 * 32 - 10
    assert length(4, 1 + 4 * 8) == 0  # shorter than what can be told from nothing
    assert length(DUMMY + 1, 1000) == 0  # more requests than slots


@torch.inference_mode()
def test_start_up_times_rounds_with_contexts_where_there_is_room_for_them(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, controller = harness.parts.runner, harness.parts.controller

    def seconds(graphs: CudaGraphs, key: GraphKey, slots: Any = None, renew: Any = None) -> float:
        return 1.0 + 0.1 * key.shape.depth + (0.2 if slots is not None else 0.0)

    monkeypatch.setattr(CudaGraphs, "seconds", seconds)
    for limits, added in ((LIMITS, 0.2), (ContextLimits(200, 10), 0.0)):  # the second: too short
        times = RoundTimer(runner, DraftShapes.chains(3), limits).measure(controller, (2, 4))
        found = [times.round_time(3, steps) for steps in (0, 1, 3)]
        assert found == pytest.approx([1.0 + added, 1.1 + added, 1.3 + added])
        assert times.has_contexts


# Which lengths a model is served with.


PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu"}


def plan_of(folder: Path, **options: Any) -> BuildPlan:
    return BuildPlan(LlmArgs(model=str(folder), device="cpu", **options))


def greedy(model: Any, tokens: list[int], number: int) -> list[int]:
    text = list(tokens)
    for _ in range(number):
        text.append(int(reference_logits(model, text)[-1].argmax()))
    return text[len(tokens) :]


def test_a_window_of_a_draft_model_does_not_limit_the_target(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "target", "Llama")
    save_checkpoint(tmp_path / "draft", "Mistral", sliding_window=8, max_position_embeddings=16)
    spec = {"decoding_type": "Draft_Target", "max_draft_len": 2}
    spec["speculative_model"] = str(tmp_path / "draft")
    prompt = list(range(5, 35))
    texts = []
    for each in (None, spec):
        with LLM(str(tmp_path / "target"), speculative_config=each, **OPTIONS) as llm:
            texts.append(llm.generate(prompt, PARAMS, use_tqdm=False).outputs[0].token_ids)
            llm.check_integrity()
    assert texts[0] == texts[1]


def test_a_context_that_yarn_extends_is_served_in_full(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    rope["original_max_position_embeddings"] = MAX_POSITIONS
    model = save_checkpoint(tmp_path, "Llama", rope_parameters=rope)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["max_position_embeddings"] == MAX_POSITIONS
    plan = plan_of(tmp_path)
    assert plan.max_seq_len == 4 * MAX_POSITIONS
    with pytest.raises(ValueError, match="max_seq_len = 257 exceeds the model's 256 positions"):
        plan_of(tmp_path, max_seq_len=257)
    prompt = torch.arange(100).tolist()
    with LLM(str(tmp_path), **OPTIONS) as llm:
        found = llm.generate(prompt, PARAMS, use_tqdm=False).outputs[0].token_ids
        llm.check_integrity()
    assert found == greedy(model, prompt, 8)
