"""Graphs of rounds whose requests share their rows: the device chooses in the graph."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import HOT
from tests.executor.draft_graphs import DUMMY, assert_same
from tests.executor.graph_rounds import (
    MODES,
    Speculate,
    num_replays,
    on_cuda,
    replays_of,
    with_graphs,
)
from tests.executor.guided_rounds import grammar_of, submit_guided
from tests.executor.harness import Harness, output_of
from tests.executor.row_rounds import DRAFT_LEN, PROMPT, rows_and_batches
from tests.lossless.engines import tiny_engine
from tests.models import qwen3_next
from tests.models.mtp_reference import save_predictable
from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape, DraftShapes
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.kernels.slots.round_rows import RoundRows

SIZES, BUDGET = (1, 2, 4, 8), 2.5
SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {}, {"temperature": 0.5}, {}]
MTP = {"decoding_type": "MTP", "max_draft_len": DRAFT_LEN, "verify_budget": BUDGET}
SAVED = {"latents": save_predictable, "states": qwen3_next.save_predictable}
ROWS = {3, 5, 10, 20}  # of these sizes


def submit(harness: Harness, *ways: dict[str, Any]) -> list[LlmRequest]:
    return [
        harness.submit([*PROMPT, i], 30 + 2 * i, seed=i, draft_limit=limit, **way)
        for i, (limit, way) in enumerate(
            zip((DRAFT_LEN, 0, DRAFT_LEN, 2, DRAFT_LEN), ways, strict=True)
        )
    ]


@pytest.mark.thinned(9)
@pytest.mark.parametrize("attn_backend", ["VANILLA", "TRITON"])
@pytest.mark.parametrize("mode", ["eagle3", "eagle3_two_model", "sa", *SAVED])
def test_graphs_have_a_budget_of_rows_and_the_text_of_plain_decoding(
    tiny: Path,
    drafts: tuple[Path, Path],
    tmp_path: Path,
    mode: str,
    attn_backend: str,
    eager_graphs: None,
) -> None:
    target, options = tiny, {"speculative_config": MTP}
    if mode in SAVED:
        SAVED[mode](tmp_path)
        target = tmp_path
    else:
        options = tiny_engine(mode, drafts, DRAFT_LEN, verify_budget=BUDGET)
    common = {"max_seq_len": 64, "attn_backend": attn_backend}
    plain = Harness(target, **common)
    expected = submit(plain, *SAMPLING)
    plain.run()
    harness = with_graphs(target, SIZES, {0, DRAFT_LEN}, **common, **options)
    seen = rows_and_batches(harness)
    requests = submit(harness, *SAMPLING)
    harness.run()
    assert list(map(output_of, requests)) == list(map(output_of, expected))
    replays = num_replays(harness)
    assert sum(number for key, number in replays.items() if key.shape.is_ragged) > 5
    alone = [rows for rows, batch in seen if batch.shape.depth and not batch.context_requests]
    assert ROWS >= set(alone) >= {20}


def test_graphs_of_shared_and_of_whole_windows_follow_each_other(
    tiny: Path, drafts: tuple[Path, Path], eager_graphs: None
) -> None:
    plain = Harness(tiny)
    expected = submit(plain, *SAMPLING)
    plain.run()
    options = tiny_engine("eagle3", drafts, DRAFT_LEN, enable_adaptive_verification=True)
    names = ("4@3", "4", "4", "3@2.5", "2", "4@3", "0")
    shapes = DraftShapes.with_budgets(DRAFT_LEN, range(DRAFT_LEN + 1))
    tiers = {str(shapes.name(tier)): tier for tier in range(shapes.further_tiers.stop)}
    harness = with_graphs(tiny, SIZES[-1:], {tiers[name] for name in names}, **options)
    coming = cycle(tiers[name] for name in names)
    harness.parts.tier_for = lambda _: next(coming)
    requests = submit(harness, *SAMPLING)
    harness.run()
    assert list(map(output_of, requests)) == list(map(output_of, expected))
    assert {key.shape.name for key in num_replays(harness)} == set(names)


@pytest.mark.parametrize("way", ["whole", "tail"])
def test_graphs_draft_what_eager_rounds_draft(
    tiny: Path, drafts: tuple[Path, Path], way: str, eager_graphs: None
) -> None:
    """They begin at the last row that each request has read, whatever rows the others have."""
    options = tiny_engine("eagle3", drafts, DRAFT_LEN, verify_budget=BUDGET)
    options["disable_overlap_scheduler"] = True
    windows = []
    for harness in (Harness(tiny, **options), with_graphs(tiny, (4,), {0, DRAFT_LEN}, **options)):
        for i in range(4):
            grammar = grammar_of("[a-zA-Z0-9]*") if way == "tail" and i == 3 else None
            harness.submit([*PROMPT, i], 60, seed=i, temperature=HOT, grammar=grammar)
        for _ in range(8):
            harness.round()
            windows.append(harness.parts.slots.window[:4].tolist())
    assert windows[:8] == windows[8:]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("mode", ["eagle3", "eagle3_two_model", "sa"])
def test_a_tail_reads_the_rows_that_its_forward_has_chosen(
    tiny: Path, drafts: tuple[Path, Path], mode: str, eager_graphs: None
) -> None:
    """Grammars have a tail in a graph, penalties one without."""
    ways: list[dict[str, Any]] = [{}, {}, {"presence_penalty": 0.5}, {}, {}]
    plain = Harness(tiny)
    expected = submit_guided(plain, 3) + submit(plain, *ways)
    plain.run()
    options = tiny_engine(mode, drafts, DRAFT_LEN, verify_budget=BUDGET)
    harness = with_graphs(tiny, SIZES, {0, DRAFT_LEN}, **options)
    seen = rows_and_batches(harness)
    requests = submit_guided(harness, 3) + submit(harness, *ways)
    harness.run()
    assert list(map(output_of, requests)) == list(map(output_of, expected))
    alone = [rows for rows, batch in seen if batch.shape.depth and not batch.context_requests]
    assert ROWS >= set(alone) >= {20}
    accepted = sum(request.counters.stats().num_accepted_tokens for request in requests)
    assert accepted > 0


def test_a_request_without_drafts_has_one_row_in_a_graph(
    tiny: Path, drafts: tuple[Path, Path], eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[int, int]] = []
    choose = SlotState.choose_rows

    def watched(
        slots: SlotState, slot_ids: torch.Tensor, shape: DraftShape, num_rows: int
    ) -> RoundRows:
        rows = choose(slots, slot_ids, shape, num_rows)
        assert rows.offsets is not None
        given.append(dict(zip(slot_ids.tolist(), rows.offsets.diff().tolist(), strict=False)))
        return rows

    options = tiny_engine("eagle3", drafts, DRAFT_LEN, verify_budget=BUDGET)
    harness = with_graphs(tiny, SIZES, {0, DRAFT_LEN}, **options)
    limits = (DRAFT_LEN, 0, DRAFT_LEN, DRAFT_LEN)
    requests = [harness.submit([*PROMPT, i], 60, draft_limit=n) for i, n in enumerate(limits)]
    for request in requests:
        harness.run_until(request, RequestState.GENERATION)
    harness.round()
    monkeypatch.setattr(SlotState, "choose_rows", watched)
    before = sum(num_replays(harness).values())
    harness.rounds(5)
    assert sum(num_replays(harness).values()) == before + 5 == before + len(given)
    assert [rows[requests[1].slot] for rows in given] == [1] * 5
    assert all(sum(rows.values()) == 4 * BUDGET for rows in given)
    harness.run()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eagle3", "eagle3_two_model", "sa", "eagle3 chooses"])
def test_on_a_gpu_graphs_choose_rows_and_have_the_text_of_plain_decoding(
    tiny: Path, drafts: tuple[Path, Path], mode: str
) -> None:
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {}, {"presence_penalty": 0.5}, {}]
    texts = []
    name, *chooses = mode.split()
    sharing = {"enable_adaptive_verification": True} if chooses else {"verify_budget": BUDGET}
    options = tiny_engine(name, drafts, DRAFT_LEN, **sharing)
    for sizes, own in ((None, {}), (list(SIZES), options)):
        harness = on_cuda(tiny, sizes, **own)
        requests = submit_guided(harness, 2) + submit(harness, *ways)
        harness.run()
        assert not any(request.error for request in requests)
        texts.append(list(map(output_of, requests)))
    assert texts[0] == texts[1]


# A round in which a request's rules need more than a round's graph knows: its forward is a graph
# nevertheless; text, drafts and log probabilities are those of eager rounds.


FORWARD_GRAPHS_SIZES = (1, 4, 8)
RULES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    "log probabilities": {"logprobs": 3},
    "bias": {"logit_bias": {7: 4.0, 9: -3.0}},
    "bad words": {"bad_token_ids": [[3, 5], [8]]},
}


def submit_rules(harness: Harness, rules: dict[str, Any]) -> list[LlmRequest]:
    """Seven requests that end one by one; the third and the last, which is alone in the end, have
    the rules."""
    return [
        harness.submit(
            [3 + i, 5, 2 * i],
            max_tokens=6 + 5 * i + 20 * (i == 6),
            temperature=HOT if i % 2 else None,
            seed=i,
            **(rules if i in (2, 6) else {}),
        )
        for i in range(7)
    ]


def forwards_of(harness: Harness) -> dict[tuple[int, int], int]:
    """Replays by batch size and draft length."""
    graphs = harness.parts.runner.graphs
    assert graphs is not None
    found = replays_of(graphs.forwards)
    return {(key.batch_size, key.shape.depth): number for key, number in found.items()}


def logprobs_of(harness: Harness, request: LlmRequest) -> list[dict[int, Any]]:
    """Ranks, and values but for their rounding: a padded batch has another number of rows."""
    return [
        {
            token: (found.rank, pytest.approx(found.logprob, abs=1e-4))
            for token, found in entry.items()
        }
        for response in harness.responses[request.request_id]
        for entry in response.logprobs
    ]


def forbid_eager_windows(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, depth: list[int]
) -> None:
    """From now on a forward of windows only fails, if it is not in a graph."""
    engine = harness.parts.runner.engine
    forward = engine.forward

    def watched(contexts: Any, windows: Any, *others: Any) -> torch.Tensor:
        assert contexts or depth, "windows were launched kernel by kernel"
        return forward(contexts, windows, *others)

    monkeypatch.setattr(engine, "forward", watched)


@pytest.mark.thinned(36)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("mode", MODES)
def test_the_forward_of_any_windows_is_a_graph_and_the_text_that_without(
    tiny: Path,
    speculate: Speculate,
    depth: list[int],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    rules: str,
) -> None:
    speculation = speculate(mode)
    lengths = {0, 1, 2, 3} if speculation else {0}
    harness, eager = (
        with_graphs(tiny, FORWARD_GRAPHS_SIZES, lengths, **speculation),
        Harness(tiny, **speculation),
    )
    ours, theirs = (submit_rules(each, RULES[rules]) for each in (harness, eager))
    forbid_eager_windows(harness, monkeypatch, depth)
    harness.run()
    eager.run()
    assert_same(ours, theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert logprobs_of(harness, mine) == logprobs_of(eager, other)
        assert bool(logprobs_of(harness, mine)) == (mine.rules.logprobs is not None)
    assert {size for size, _ in forwards_of(harness)} == set(FORWARD_GRAPHS_SIZES)


@torch.inference_mode()
def test_all_forward_graphs_write_their_hidden_states_to_one_buffer(
    tiny: Path, depth: list[int]
) -> None:
    runner = with_graphs(tiny, FORWARD_GRAPHS_SIZES, {0}).parts.runner
    left = [
        runner.decode._forward(torch.tensor(slots), NO_DRAFTS, False)
        for slots in ([DUMMY], [DUMMY, DUMMY])
    ]
    assert left[0].data_ptr() == left[1].data_ptr() and list(map(len, left)) == [1, 2]


def test_requests_without_such_rules_still_have_rounds_that_are_one_graph(
    tiny: Path, depth: list[int]
) -> None:
    harness = with_graphs(tiny, FORWARD_GRAPHS_SIZES, {0})
    submit_rules(harness, {})
    harness.run()
    assert not forwards_of(harness)


@pytest.mark.gpu
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_a_replayed_forward_is_the_eager_one(
    tiny: Path, speculate: Speculate, mode: str, rules: str
) -> None:
    speculation = speculate(mode)
    harness, eager = (
        on_cuda(tiny, sizes, **speculation) for sizes in (list(FORWARD_GRAPHS_SIZES), None)
    )
    rounds, num_replayed = harness.parts.runner.graphs, list[int]()
    assert rounds is not None
    graphs, run = rounds.forwards, rounds.forwards.run

    def watched(slots: list[int], draft_len: int, sampled: bool) -> Any:
        found = run(slots, draft_len, sampled)
        num_replayed.append(0 if found is None else len(slots))
        return found

    graphs.run = watched  # type: ignore[method-assign] # a spy on this one object
    ours, theirs = (submit_rules(each, RULES[rules]) for each in (harness, eager))
    harness.run()
    eager.run()
    assert_same(ours, theirs)
    assert len(num_replayed) > 10 and {1, 7} <= set(num_replayed)
