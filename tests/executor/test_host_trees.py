"""Trees of drafts from the user's own drafter."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.harness import Harness, ScriptedDrafter, output_of
from tests.executor.hooks import before_launch
from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape, chain_of
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import NGramDecodingConfig, UserProvidedDecodingConfig
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.kernels.drafts.draft_layout import HostTree

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 11]
DEPTH, NUM_NODES = 3, 10
TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2}
TREE_OF_3 = {"max_draft_len": 2, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 3}


def push(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor for which a row that sees other drafts than its path has another token."""
    logits[sum(tokens[-4:]) * 7 % len(logits)] += 20.0
    return logits


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95},
    "edited": {
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "frequency_penalty": 1.0,
        "bad_token_ids": [[3, 5], [7]],
    },
    "processed": {"temperature": 0.8, "logits_processor": push},
}


def wrong_draft(text: list[int], place: int, draft: int) -> int:
    """A wrong draft next to another: the token that follows in the text, which a penalty for drafts
    of other paths would hit."""
    following = text[place + 1] if place + 1 < len(text) else draft
    return (text[place] + 1) % 64 if following in (text[place], draft) else following


class Trees(Drafter):
    """Knows the texts: the right path is the last child everywhere, next to wrong ones. In some
    rounds it is right only at first, or there are no drafts."""

    def __init__(self, texts: dict[int, list[int]], as_parents: bool) -> None:
        self._texts, self._as_parents = texts, as_parents

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        for request in scheduled_requests.generation_requests:
            self._propose(request)

    def _propose(self, request: LlmRequest) -> None:
        text = self._texts[request.seed][request.num_output_tokens :]
        right = text[: request.num_drafts_wanted]
        turn = request.num_output_tokens % 5
        if turn == 3 or not right:
            return
        if turn == 1:
            right = [right[0], *((token + 5) % 64 for token in right[1:])]
        wrong = [[*right[:i], wrong_draft(text, i, right[i])] for i in range(len(right))]
        if not self._as_parents:
            request.py_draft_tokens = [*wrong, right]  # type: ignore[list-item] # a list of paths
            return
        # The right path comes first: node n continues node n - 1.
        tokens = right + [path[-1] for path in wrong]
        request.py_draft_tokens = tokens
        request.py_draft_parents = [*range(len(right)), *range(len(right))]


def trees(drafter: Drafter, **options: Any) -> dict[str, Any]:
    config = {
        "decoding_type": "User_Provided",
        "drafter": drafter,
        "max_draft_len": DEPTH,
        "max_total_draft_tokens": NUM_NODES,
        "max_rejected_rounds": None,
    }
    return {"speculative_config": config | options}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("as_parents", [False, True], ids=["paths", "parents"])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("page_size", [2, 32])
def test_the_text_is_plain_decodings_and_the_right_path_is_accepted(
    tiny: Path, sampling: str, as_parents: bool, page_size: int
) -> None:

    def submit_to(harness: Harness) -> list[LlmRequest]:
        return [
            harness.submit(prompt, 25, seed=i, **SAMPLING[sampling])
            for i, prompt in enumerate(PROMPTS)
        ]

    plain = Harness(tiny)
    expected = submit_to(plain)
    plain.run()
    texts = dict(enumerate(map(output_of, expected)))
    pages = {"kv_cache_config": {"tokens_per_block": page_size}}
    harness = Harness(tiny, **pages, **trees(Trees(texts, as_parents)))
    requests = submit_to(harness)
    harness.run()
    assert list(map(output_of, requests)) == list(texts.values())
    for request in requests:
        accepted = request.counters.by_accepted
        assert accepted[0] > 0 and accepted[1] > 0 and accepted[3] > 0 and not accepted[2]


def test_paths_with_equal_beginnings_become_one_tree_ordered_by_depth() -> None:
    tree = HostTree.of_paths([[5, 6, 7], [5, 8], [9], [5, 6, 7]])
    assert tree.tokens == [5, 9, 6, 8, 7] and tree.parents == [-1, 0, 0, 1, 1, 3]
    assert tree.depths == [0, 1, 1, 2, 2, 3] and tree.bits == [1, 3, 5, 11, 19, 43]
    assert tree.up_to(2) == HostTree.of_paths([[5, 6], [5, 8], [9]])
    assert HostTree.of_parents([5, 6, 7, 9, 8], [0, 1, 2, 0, 1]) == tree
    assert not HostTree.of_paths([]).tokens and not HostTree.of_paths([[]]).tokens


def test_the_bits_of_63_drafts_fill_a_signed_number() -> None:
    tree = HostTree.of_parents(range(63), range(63))
    assert tree.bits == [2**row - 1 for row in range(1, 64)] + [-1] and tree.is_chain


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([[1, 2, 3, 4]], None, "4 tokens on paths of up to 4; .* is 10 and max_draft_len 3"),
        ([[i] for i in range(11)], None, "11 tokens on paths of up to 1; max_total_.* is 10"),
        ([[1, 64]], None, "the model has token ids 0 to 63"),
        ([[1, "x"]], None, "which are no tree of token ids"),
        ([1, 2], [0, 2], "node 2 has the parent 2; accepted are 0 to 1"),
        ([1, 2], [0], "2 tokens have 1 parents"),
        ([7, 8, 7], [0, 1, 0], "nodes 1 and 3 are both 7 after node 0"),
        ([1, "x"], [0, 0], "which are no tree of token ids"),
        ([1] * 70, range(70), "a tree has at most 63 tokens, not 70"),
    ],
)
def test_what_is_no_tree_fails_its_request_and_no_other(
    tiny: Path, tokens: Any, parents: Any, message: str
) -> None:

    class Wrong(Drafter):
        def prepare_draft_tokens(
            self,
            scheduled_requests: ScheduledBatch,
            resource_manager: ResourceManager | None = None,
        ) -> None:
            for request in scheduled_requests.generation_requests:
                if request.seed == 1:
                    request.py_draft_tokens, request.py_draft_parents = tokens, parents

    harness = Harness(tiny, **trees(Wrong()))
    good, bad = (harness.submit([1, 2, 3], 8, seed=seed) for seed in (0, 1))
    harness.run()
    assert good.error is None and good.num_output_tokens == 8
    assert bad.error is not None
    assert re.search(message, bad.error)


def test_more_nodes_than_a_row_has_bits_for_are_refused() -> None:
    with pytest.raises(ValueError, match="max_total_draft_tokens = 64 is more than 63"):
        UserProvidedDecodingConfig(
            drafter=Trees({}, False), max_draft_len=4, max_total_draft_tokens=64
        )


def test_a_round_without_branches_has_the_window_of_a_chain(tiny: Path) -> None:
    def propose(request: LlmRequest) -> Any:
        branches = request.seed == 1 and request.num_output_tokens % 2
        return [[1, 2], [3]] if branches else [1, 2]

    harness = Harness(tiny, **trees(ScriptedDrafter(propose)))
    shapes = list[DraftShape]()
    before_launch(harness.executor, lambda batch: shapes.append(batch.shape))
    for seed in (0, 1):
        harness.submit([1, 2, 3], 12, seed=seed)
    harness.run()
    assert {shape for shape in shapes if shape.depth == 2} == {
        chain_of(2),
        DraftShape(2, NUM_NODES, NUM_NODES),
    }


def test_rounds_of_chains_have_graphs_next_to_those_of_trees(tiny: Path) -> None:
    own = trees(Trees({}, as_parents=False), max_draft_len=2, max_total_draft_tokens=5)
    args = LlmArgs.from_kwargs(str(tiny), **own, skip_tokenizer_init=True)
    keys = BuildPlan(args).round_keys([4])
    assert {key.shape for key in keys} == {
        NO_DRAFTS, chain_of(1), chain_of(2), DraftShape(1, 5, 5), DraftShape(2, 5, 5)
    }  # fmt: skip
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic_tree_max_topK": 2}, "dynamic_tree_max_topK = 2 needs use_dynamic_tree: true"),
        ({"use_dynamic_tree": True}, "needs dynamic_tree_max_topK"),
        (TREE | {"is_use_oldest": True}, "is_use_oldest = True is refused: a tree has the newest"),
        (TREE | {"is_keep_all": False}, "is_keep_all = False is refused: a tree has the newest"),
        (TREE | {"max_total_draft_tokens": 3}, "= 3 is not in 4..30, what a tree of depth 4 with"),
        (TREE | {"max_total_draft_tokens": 31}, "= 31 is not in 4..30, what a tree of depth 4"),
        (TREE | {"dynamic_tree_max_topK": 17}, "dynamic_tree_max_topK = 17 is more than 16"),
        ({"max_total_draft_tokens": 8}, "max_total_draft_tokens = 8 is refused: drafts are"),
        (
            TREE | {"adaptive": {"candidate_trees": [TREE_OF_3]}},
            r"candidate_trees needs .*, and draft weights \(Draft_Target, Eagle, Eagle3 or MTP\)",
        ),
    ],
)
def test_an_impossible_tree_of_ngrams_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NGramDecodingConfig(max_draft_len=4, **options)


def test_a_tree_of_ngrams_has_topk_times_depth_nodes_unless_it_says_otherwise() -> None:
    config = NGramDecodingConfig(max_draft_len=4, **TREE)
    assert config.max_total_draft_tokens == 8 and config.is_use_oldest is False
    shapes = config.shapes
    assert [shapes.of(n).num_nodes for n in range(5)] == [0, 2, 6, 8, 8]
    assert NGramDecodingConfig(max_draft_len=4).is_use_oldest is True
