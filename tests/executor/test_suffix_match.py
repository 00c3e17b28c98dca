"""Drafts from texts, looked up on the device in the target's round."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import HOT, SMALL_POOL, submit_traffic
from tests.executor.graph_rounds import keys_of_build, num_replays, with_graphs
from tests.executor.harness import Harness, output_of, user_provided
from tests.executor.hooks import before_launch
from tests.kernels.test_suffix_match import paths_of
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.text_search import SHARED_WIDTH
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.building.memory import reserved_bytes
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.request import DecodingRules, LlmRequest, RequestState
from tllm_spec.executor.resources.interface import SharedTexts, pieces_of, rows_of
from tllm_spec.executor.speculative.drafting.suffix_match import read_corpus
from tllm_spec.kernels.drafts.path_trees import path_trees
from tllm_spec.kernels.drafts.suffix_match import NO_TOKEN, TextTable
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import load_tokenizer

RULES = DecodingRules.from_params(SamplingParams(), vocab_size=64, end_ids=(), encode=None)
Others = Sequence[tuple[int, list[int]]]
NO_OVERLAP = {"disable_overlap_scheduler": True}


def sa(draft_len: int = 3, **options: Any) -> dict[str, Any]:
    own = {"decoding_type": "SA", "max_draft_len": draft_len}
    return {"speculative_config": own | options}


def ngram(**options: Any) -> dict[str, Any]:
    return sa(decoding_type="NGram", **options)


def watch_drafts(
    harness: Harness, others: Callable[[LlmRequest], Others | None] = lambda _: ()
) -> dict[tuple[int, int], list[Any]]:
    """Checks the drafts of every round that is launched after the one before was read, against the
    text that the host has. Returns them, by request id and length of the text. others: the texts
    that a request shares, as `paths_of` takes them; None: its drafts are not checked."""
    seen: dict[tuple[int, int], list[Any]] = {}
    slots, search = harness.parts.slots, harness.text_search
    assert search is not None

    def look(batch: ScheduledBatch) -> None:
        for request in batch.generation_requests:
            slot, number = request.slot, int(slots.num_drafts[request.slot])
            drafts = slots.window[slot, 1 : 1 + min(number, batch.shape.num_nodes)].tolist()
            shared = others(request)
            if not request.tokens_in_flight and shared is not None:
                ready = min(request.num_drafts_ready, batch.shape.depth, request.draft_limit)
                how = (3, search.max_match, 8 if slots.shapes.has_trees else 1, search.oldest)
                paths, _ = paths_of(request.tokens, *how, shared)
                assert drafts == expected_drafts(paths, ready, slots.shapes)
            seen[request.request_id, request.num_tokens] = drafts

    before_launch(harness.executor, look)
    return seen


def expected_drafts(paths: list[list[int]], ready: int, shapes: DraftShapes) -> list[int]:
    """A tree gives its nodes' tokens."""
    shape = shapes.of(ready)
    if not shape.is_tree:
        return paths[0][:ready]
    cut = [path[:ready] for path in paths]
    rows = torch.tensor([[path + [0] * (ready - len(path)) for path in cut]])
    tree = path_trees(rows, torch.tensor([list(map(len, cut))]), shape.num_nodes, shape.topk)
    assert tree.num_drafts is not None
    return tree.tokens[0, : int(tree.num_drafts)].tolist()


TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 5}
SEARCHES = {
    "longest": sa(),
    "of_2": sa(max_matching_ngram_size=2),
    "oldest": ngram(),
    "newest": ngram(is_use_oldest=False, max_matching_ngram_size=1),
    "tree": ngram(max_matching_ngram_size=3, **TREE),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("options", [{}, SMALL_POOL], ids=["undisturbed", "small_pool"])
def test_a_rounds_drafts_follow_the_best_matches_in_the_requests_text(
    tiny: Path, options: dict[str, Any], search: str
) -> None:
    """Also after prefix hits, prompts in chunks and preemptions."""
    harness, plain = Harness(tiny, **options, **NO_OVERLAP, **SEARCHES[search]), Harness(tiny)
    seen = watch_drafts(harness)
    requests, expected = (submit_traffic(each, Random(4), 20) for each in (harness, plain))
    harness.run()
    plain.run()
    assert bool(harness.parts.scheduler.num_preemptions) == bool(options)
    assert list(map(output_of, requests)) == list(map(output_of, expected))
    assert sum(len(drafts) >= 3 for drafts in seen.values()) > 15
    assert not all(seen.values())  # there are texts without a match


POOLS = {
    "ngram": ngram(is_public_pool=True),
    "tree": ngram(is_public_pool=True, **TREE),
    "sa": sa(enable_global_pool=True, global_pool_size=1),
}


@pytest.mark.parametrize("mode", POOLS)
def test_requests_of_one_salt_share_running_and_finished_texts(tiny: Path, mode: str) -> None:
    """Checked are the drafts of the last one, which begins after one has finished and while another
    one runs."""
    harness, requests = Harness(tiny, **NO_OVERLAP, **POOLS[mode]), list[LlmRequest]()

    def others(request: LlmRequest) -> list[tuple[int, list[int]]] | None:
        if request is not requests[-1] or len(requests) < 4:
            return None
        return [(1, requests[1].tokens), (10**6, requests[0].tokens)]  # their order in memory

    seen = watch_drafts(harness, others)
    lengths = 14, 80, 80, 14
    for number, salt in enumerate("aaba"):
        prompt = [7, 8, number, 9]
        requests.append(harness.submit(prompt, lengths[number], cache_salt=salt))
        harness.run_until(requests[-1], RequestState.GENERATION)
        if not number:
            harness.run()
    harness.run()
    last = requests[-1]
    drafts = {key[1]: each for key, each in seen.items() if key[0] == last.request_id}
    new = [number for number in drafts if last.tokens[number - 1] not in last.tokens[: number - 1]]
    assert any(drafts[number] for number in new), "they are from the other texts"
    alone = Harness(tiny)
    texts = [
        alone.submit([7, 8, number, 9], lengths[number], seed=each.seed)
        for number, each in enumerate(requests)
    ]
    alone.run()
    assert list(map(output_of, requests)) == list(map(output_of, texts))


def table_with_rows(num_rows: int) -> TextTable:
    memory = torch.full((2 * 8 + num_rows * SHARED_WIDTH,), NO_TOKEN, dtype=torch.int32)
    salts = torch.full((2 + num_rows,), -1, dtype=torch.int32)
    return TextTable(memory, 8, torch.zeros(2, dtype=torch.int64), salts)


def finish(shared: SharedTexts, tokens: list[int], salt: str | None = None) -> None:
    request = LlmRequest(1, tokens, RULES, seed=0, cache_salt=salt)
    request.finish("stop")
    shared.free_resources(request)


def test_finished_texts_fill_the_rows_of_their_salt_and_the_oldest_row_goes_first() -> None:
    table = table_with_rows(2)
    shared, salts = SharedTexts(table, 2), table.salts
    assert salts is not None
    finish(shared, [1, 2, 3])
    finish(shared, [4, 5], "a")
    finish(shared, [6, 7])
    assert table.shared[:, :7].tolist() == [[1, 2, 3, -1, 6, 7, -1], [4, 5, -1, -1, -1, -1, -1]]
    assert len({*salts[2:].tolist(), -1}) == 3
    finish(shared, [8, 9], "b")  # takes the first row
    finish(shared, [10, 11])  # and this the second
    assert table.shared[:, :3].tolist() == [[8, 9, -1], [10, 11, -1]]
    assert len({*salts[2:].tolist(), -1}) == 3
    shared.free_resources(LlmRequest(1, [1, 2, 3], RULES, seed=0))  # preempted, not finished
    assert table.shared[1, :4].tolist() == [10, 11, -1, -1]


def test_a_long_text_is_kept_in_pieces_that_overlap() -> None:
    table, text = table_with_rows(3), list(range(9000))
    finish(SharedTexts(table, 3), text)
    first, second, third = (row[row >= 0].tolist() for row in table.shared)
    assert first == text[: SHARED_WIDTH - 1] and first[-64:] == second[:64]
    assert second[-64:] == third[:64] and third[-1] == text[-1]


def test_a_corpus_is_in_rows_of_its_own() -> None:
    texts = [[1, 2, 3], [9], list(range(4000)), list(range(5000))]
    rows = rows_of(texts)
    pieces = [piece for text in texts for piece in pieces_of(text)]
    assert [len(piece) for piece in pieces] == [3, 4000, 4095, 969]  # one token has no next one
    assert [each for row in rows for each in row] == [
        each for piece in pieces for each in [*piece, NO_TOKEN]
    ]
    assert list(map(len, rows)) == [4 + 4001, 4096, 970]


def write_corpus(folder: Path, *lines: Any) -> str:
    path = folder / "corpus.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n\n" for line in lines))
    return str(path)


CORPORA = {
    "ngram": ngram(max_matching_ngram_size=3),
    "tree": ngram(max_matching_ngram_size=3, **TREE),
    "sa": sa(),
    "pool": sa(enable_global_pool=True, global_pool_size=1),
}


@pytest.mark.parametrize("mode", CORPORA)
def test_drafts_of_the_first_request_come_from_the_corpus(
    tiny: Path, tmp_path: Path, mode: str
) -> None:
    """Requests of any salt find it, also when the pool's only row has been filled by others."""
    alone = Harness(tiny)
    text = alone.submit([7, 8, 9], max_tokens=60)
    alone.run()
    expected = output_of(text)
    options = CORPORA[mode]["speculative_config"]
    options |= {"external_corpus_path": write_corpus(tmp_path, [1, 2], text.tokens)}
    harness = Harness(tiny, speculative_config=options, **NO_OVERLAP)
    for salt in (None, "a"):
        request = harness.submit([7, 8, 9], max_tokens=60, cache_salt=salt)
        harness.run()
        assert output_of(request) == expected
        assert request.counters.stats().acceptance_length > 3.5  # of 4
        for number in range(3):
            harness.submit([number], max_tokens=40, temperature=HOT, cache_salt=f"{salt}{number}")
        harness.run()


def test_without_a_pool_requests_share_the_corpus_only(tiny: Path, tmp_path: Path) -> None:
    harness = Harness(tiny, **sa(external_corpus_path=write_corpus(tmp_path, [1, 2])), **NO_OVERLAP)
    seen = watch_drafts(harness, lambda _: [(0, [1, 2])])
    requests = submit_traffic(harness, Random(4), 20)
    harness.run()
    alone = sum(len(drafts) > 0 for drafts in seen.values())
    assert alone > 15 and len(requests) == 20


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([[1, 64]], "line 1 has the token id 64; ids are 0 to 63"),
        (["text"], "line 1 is text, which skip_tokenizer_init leaves without a tokenizer"),
        ([[1], {"text": [2]}], "line 3 must be a JSON string, or a list of token ids"),
        ([[1, 2, 3], [4, 5]], "has more tokens than external_corpus_max_tokens = 4"),
        ([], "has no text"),
    ],
)
def test_a_corpus_that_cannot_be_served_is_refused(
    tiny: Path, tmp_path: Path, lines: list[Any], sentence: str
) -> None:
    options = {"external_corpus_path": write_corpus(tmp_path, *lines)}
    with pytest.raises(ValueError, match=f"corpus.jsonl.*{sentence}"):
        Harness(tiny, **sa(**options, external_corpus_max_tokens=4))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (r'"half \ud800"', "line 1: character 5 is U.D800"),
        ("[" * 100_000, "line 1 is no JSON"),
        (f"[{'9' * 5000}]", "line 1 is no JSON"),
    ],
    ids=["surrogate", "deep", "long"],
)
def test_a_line_of_a_corpus_that_no_tokenizer_reads_is_refused_by_its_number(
    tmp_path: Path, line: str, sentence: str
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=f"corpus.jsonl.*{sentence}"):
        read_corpus((str(path), 9), load_tokenizer("zoo:llama"), 2048)


def test_the_host_learns_how_many_drafts_a_request_really_had(tiny: Path) -> None:
    """The first prompt has no token twice, the second ends as it begins."""
    harness = Harness(tiny, **sa(), **NO_OVERLAP)
    seen = watch_drafts(harness)
    requests = [harness.submit(prompt, max_tokens=20) for prompt in ([1, 2, 3], [4, 5, 4])]
    harness.run()
    for request in requests:
        numbers = [len(drafts) for key, drafts in seen.items() if key[0] == request.request_id]
        assert request.counters.by_drafted == [numbers.count(number) for number in range(4)]
    assert len({len(drafts) for drafts in seen.values()}) == 2


def run_in_step(harness: Harness) -> list[LlmRequest]:
    requests = submit_traffic(harness, Random(5), 14)
    harness.run()
    return requests


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_rounds_overlap_with_the_same_texts_and_figures(
    tiny: Path, eager_graphs: None, graphs: bool
) -> None:
    options = {"max_batch_size": 8, **sa()}
    harness = with_graphs(tiny, (1, 4, 8), {0, 3}, **options) if graphs else None
    harness, in_turn = harness or Harness(tiny, **options), Harness(tiny, **options, **NO_OVERLAP)
    assert harness.parts.max_in_flight == 1 and harness.parts.overlaps
    ours, theirs = run_in_step(harness), run_in_step(in_turn)
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    assert [r.counters.by_accepted for r in ours] == [r.counters.by_accepted for r in theirs]
    assert sum(sum(r.counters.by_accepted) for r in ours) > 20
    assert not graphs or len(num_replays(harness)) > 2


def test_a_changing_draft_length_leaves_the_texts_complete(tiny: Path) -> None:
    """Rounds without drafts add their tokens, too."""
    harness = Harness(tiny, **sa(), **NO_OVERLAP)
    seen, lengths = watch_drafts(harness), [0, 0, 3, 1, 0, 2, 3]
    request = harness.submit([7, 8, 9, 7, 8], max_tokens=40)
    harness.run_until(request, RequestState.GENERATION)
    for number in range(14):
        harness.parts.tier_for = lambda *_, number=number: lengths[number % 7]
        harness.round()
    assert {len(drafts) for drafts in seen.values()} >= {0, 1, 2}


def test_graphs_are_captured_for_the_draft_lengths_that_are_asked_for(tiny: Path) -> None:
    keys = keys_of_build(tiny, **sa())
    assert {key.shape.depth for key in keys} == {0, 3}


def test_the_memory_plan_counts_the_texts(tiny: Path, tmp_path: Path) -> None:
    plans = [
        BuildPlan(LlmArgs.from_kwargs(tiny, max_batch_size=8, cuda_graph_config=None, **options))
        for options in (
            user_provided(lambda _: [], 3),
            sa(),
            sa(enable_global_pool=True),
            sa(external_corpus_path=write_corpus(tmp_path, list(range(60)) * 100)),
        )
    ]
    none, own, shared, with_corpus = (reserved_bytes(plan, None, ()) for plan in plans)
    assert own - none == 9 * plans[0].max_len * 4
    assert shared - own == 64 * SHARED_WIDTH * 4
    assert with_corpus - own == 2 * SHARED_WIDTH * 4
