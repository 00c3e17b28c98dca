"""Drafting with the MTP module of the target's checkpoint: in every situation the drafts are those
of a slow loop over the true tokens, so its cache misses nothing."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.executor.draft_caches import (
    PREEMPTS,
    assert_all_is_there,
    eagle3,
    generating,
    network_of,
    slow_drafters,
    with_lengths,
)
from tests.executor.graph_rounds import num_replays, with_graphs
from tests.executor.harness import Harness, all_pages_are_back
from tests.executor.test_tree_drafting import Candidate, paths_in_slot, slow_tree
from tests.lossless.small_models import by_default
from tests.models.deepseek import save_deepseek
from tests.models.gpt_oss import save_gpt_oss
from tests.models.helpers import random_tokens, save_checkpoint
from tests.models.mtp_reference import PlainMTP, module_tensors, save_predictable, save_with_mtp
from tests.models.test_gemma3 import save_gemma3
from tests.models.test_llama4 import save_llama4
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.executor.request import LlmRequest

PAGES = {"tokens_per_block": 4}
SITUATIONS: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "chunked_prefill": {"enable_chunked_prefill": True, "max_num_tokens": 12},
    "preemption": PREEMPTS,
}

# The drafts of each request by its tokens.
SlowDrafts = Callable[[Harness, list[LlmRequest]], list[list[int]]]


def mtp(draft_len: int = 3, **options: Any) -> dict[str, Any]:
    own = {"decoding_type": "MTP", "max_draft_len": draft_len, **options}
    return {"speculative_config": own}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlainMTP]:
    folder = tmp_path_factory.mktemp("mtp")
    return folder, PlainMTP(*save_with_mtp(folder), folder)


@pytest.fixture(scope="module")
def vanilla(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[PlainMTP]]:
    """A checkpoint with three different modules."""
    folder = tmp_path_factory.mktemp("vanilla")
    model, _ = save_with_mtp(folder, num_modules=3)
    return folder, [PlainMTP(model, module_tensors(folder, index), folder) for index in range(3)]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("one_model", [True, False])
def test_each_draft_comes_from_its_own_module_as_in_a_slow_loop(
    one_model: bool, situation: str, vanilla: tuple[Path, list[PlainMTP]]
) -> None:
    folder, (first, *later) = vanilla
    spec = mtp(mtp_eagle_one_model=one_model, use_mtp_vanilla=True)
    check_drafts(
        folder,
        situation,
        lambda _, some: [first.drafts(each.tokens, 3, later) for each in some],
        spec,
    )


@pytest.fixture(scope="module")
def glm5(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlainMTP]:
    """Only the first step of a round chooses keys, of which rows soon see more than index_topk."""
    folder = tmp_path_factory.mktemp("glm5")
    model, tensors = save_with_mtp(folder, family="GlmMoeDsa")
    return folder, PlainMTP(model, tensors, folder)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("one_model", [True, False])
@pytest.mark.parametrize("checkpoint", ["plain", "glm5"])
def test_drafts_are_those_of_a_slow_loop(
    checkpoint: str, one_model: bool, situation: str, request: pytest.FixtureRequest
) -> None:
    folder, slow = request.getfixturevalue(checkpoint)
    spec = mtp(mtp_eagle_one_model=one_model)
    check_drafts(
        folder, situation, lambda _, some: [slow.drafts(each.tokens, 3) for each in some], spec
    )


def check_drafts(folder: Path, situation: str, slow: SlowDrafts, spec: dict[str, Any]) -> None:
    options = {"max_batch_size": 3, "max_seq_len": 64, "kv_cache_config": PAGES}
    options |= {"disable_overlap_scheduler": True} | SITUATIONS[situation]
    harness = Harness(folder, **options, **spec)
    shared, num_checked = random_tokens(19), 0  # a prefix ends within a page
    requests = [harness.submit(shared + [i] * i, max_tokens=12) for i in range(6)]
    while harness.round():
        running = generating(harness)
        for request, drafts in zip(running, slow(harness, running), strict=True):
            window = harness.parts.slots.window[request.slot].tolist()
            assert window == [request.tokens[-1], *drafts]
            num_checked += 1
    assert num_checked > 20 and all(request.num_output_tokens == 12 for request in requests)
    assert any(request.cached_tokens % 4 for request in requests)
    assert bool(harness.parts.scheduler.num_preemptions) == (situation == "preemption")
    assert all_pages_are_back(harness.executor)


@pytest.mark.parametrize("is_vanilla", [pytest.param(False, marks=pytest.mark.slow), True])
def test_after_rounds_without_drafts_or_with_fewer_no_module_misses_anything(
    is_vanilla: bool, vanilla: tuple[Path, list[PlainMTP]]
) -> None:
    folder, (first, *later) = vanilla
    spec = mtp(use_mtp_vanilla=is_vanilla)
    harness = Harness(folder, max_seq_len=64, disable_overlap_scheduler=True, **spec)

    def lengths() -> Iterator[int]:
        yield from cycle([3, 0, 0, 0, 3, 1, 3, 0])

    with_lengths(harness, lengths())
    requests = [harness.submit(random_tokens(9, seed=i), max_tokens=30) for i in range(2)]
    num_drafted = 0
    while harness.round():
        for request in generating(harness):
            if count := int(harness.parts.slots.num_drafts[request.slot]):
                window = harness.parts.slots.window[request.slot].tolist()
                drafts = first.drafts(request.tokens, count, later if is_vanilla else ())
                assert window[: 1 + count] == [request.tokens[-1], *drafts]
                num_drafted += 1
    assert num_drafted > 10 and all(request.num_output_tokens == 30 for request in requests)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("is_vanilla", [False, True])
@pytest.mark.parametrize("one_model", [True, False])
def test_every_tree_is_that_of_a_slow_reference(
    one_model: bool, is_vanilla: bool, vanilla: tuple[Path, list[PlainMTP]]
) -> None:
    folder, (first, *later) = vanilla
    options = {"mtp_eagle_one_model": one_model, "use_mtp_vanilla": is_vanilla}
    check_trees(folder, first, later if is_vanilla else (), **options)


@pytest.mark.slow
def test_nodes_of_glm_5s_trees_attend_to_their_ancestors_and_the_first_choice(
    glm5: tuple[Path, PlainMTP],
) -> None:
    check_trees(*glm5, ())


def check_trees(folder: Path, first: PlainMTP, later: Sequence[PlainMTP], **options: Any) -> None:
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 8}
    harness = Harness(
        folder,
        max_seq_len=64,
        kv_cache_config=PAGES,
        disable_overlap_scheduler=True,
        **mtp(3, **options, **tree),
    )
    prompts = [random_tokens(9, seed=5) * 2, random_tokens(7, seed=6)]
    requests = [harness.submit(prompt, max_tokens=10) for prompt in prompts]
    num_checked = 0
    while harness.round():
        for request in generating(harness):

            def children_of(
                parent: Candidate, tokens: Sequence[int] = request.tokens
            ) -> list[Candidate]:
                best = first.best_after(list(tokens), parent.path, 3, later)
                return [
                    Candidate((*parent.path, token), parent.score * probability)
                    for token, probability in best
                ]

            assert paths_in_slot(harness, request) == slow_tree(children_of, 3, 3, 8)
            num_checked += 1
    assert num_checked > 8 and all(request.num_output_tokens == 10 for request in requests)
    assert all_pages_are_back(harness.executor)


@pytest.mark.thinned(32)
@pytest.mark.parametrize("one_model", [True, False])
def test_replayed_rounds_of_chains_and_trees_give_the_texts_of_eager_rounds(
    one_model: bool, tmp_path: Path, eager_graphs: None
) -> None:
    """Tier 3 is a chain, tier 4 a tree; they take turns."""
    save_predictable(tmp_path)
    tree = {"max_draft_len": 3, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 5}
    spec = mtp(
        mtp_eagle_one_model=one_model,
        use_dynamic_tree=True,
        adaptive={"candidate_steps": [0, 3], "candidate_trees": [tree]},
        **{name: value for name, value in tree.items() if name != "max_draft_len"},
    )
    graphs = with_graphs(tmp_path, (1, 4), {0, 3, 4}, max_seq_len=64, **spec)
    found = []
    for harness in (graphs, Harness(tmp_path, max_seq_len=64)):
        if harness is graphs:
            with_lengths(harness, cycle([3, 4, 4, 0, 4]))
        requests = [harness.submit(random_tokens(9, seed=i), max_tokens=20) for i in range(3)]
        harness.run()
        found.append([request.tokens for request in requests])
    assert found[0] == found[1]
    shapes = {key.shape.is_tree for key in num_replays(graphs)}
    assert shapes == {True, False}


def test_the_module_reads_the_targets_state_after_its_final_norm(
    plain: tuple[Path, PlainMTP],
) -> None:
    folder, slow = plain
    harness = Harness(folder, max_seq_len=64, **mtp())
    prompt = random_tokens(9)
    harness.submit(prompt, max_tokens=4)
    harness.round()
    captured = network_of(harness).net.captured(len(prompt))
    assert captured is not None
    assert (captured - slow.target_states(prompt)).abs().max() < 1e-4


def test_rejection_sampling_keeps_the_modules_distributions(tmp_path: Path) -> None:
    save_predictable(tmp_path)
    options = {"use_rejection_sampling": True}
    harness = Harness(tmp_path, max_seq_len=64, **mtp(**options))
    request = harness.submit(random_tokens(9), max_tokens=40, temperature=0.5)
    harness.run()
    stats = request.counters.stats()
    assert request.num_output_tokens == 40 and stats.acceptance_length > 1.2


def test_a_target_without_a_module_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"num_nextn_predict_layers of this LlamaForCausalLM is 0"):
        Harness("zoo:llama", **mtp())


# EAGLE-3 heads for targets with another attention than the head's: latents, chunks, windows and
# scaled embeddings, sinks, experts. In every situation the drafts are those of a slow loop over
# the true tokens.


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# A request has 34 tokens at most: three chunks, and two changes of the temperature.
CHUNKS = {"attention_chunk_size": 14, "floor_scale": 12, "no_rope_layer_interval": 2}
SAVERS: dict[str, Callable[[Path], Any]] = {
    "latents": lambda folder: save_deepseek(folder, "DeepseekV3"),
    "chunks": lambda folder: save_llama4(folder, num_hidden_layers=3, **CHUNKS),
    "windows": save_gemma3,
    "sinks": save_gpt_oss,
    "experts": lambda folder: save_checkpoint(folder, "Qwen3Moe", num_hidden_layers=3, **EXPERTS),
}
DRAFT_LEN = 3


@pytest.fixture(scope="module")
def write_head(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    sizes: dict[str, Any] = {"hidden_size": 64, "vocab_size": 128, "draft_vocab_size": 100}

    @cache
    def write(latent: bool) -> Path:
        folder = tmp_path_factory.mktemp("head")
        return write_tiny_eagle3(folder, num_captured=2, latent=latent, **sizes)

    return write


@pytest.mark.thinned(12)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("target", SAVERS)
@pytest.mark.parametrize("one_model", [True, False])
def test_drafts_are_those_of_a_slow_loop_with_eagle3_targets(
    one_model: bool, target: str, situation: str, write_head: Callable[[bool], Path], tmp_path: Path
) -> None:
    check_head(one_model, target, situation, write_head(False), tmp_path)


@pytest.mark.parametrize(
    ("one_model", "target", "situation"),
    by_default(
        [(True, "latents", "preemption")],
        *((True, False), ("latents", "experts", "windows"), SITUATIONS),
    ),
)
def test_drafts_of_a_head_with_latents_are_those_of_a_slow_loop(
    one_model: bool, target: str, situation: str, write_head: Callable[[bool], Path], tmp_path: Path
) -> None:
    check_head(one_model, target, situation, write_head(True), tmp_path)


def check_head(one_model: bool, target: str, situation: str, head: Path, tmp_path: Path) -> None:
    SAVERS[target](tmp_path)
    spec = eagle3(head, DRAFT_LEN, eagle3_one_model=one_model, eagle3_layers_to_capture=[0, 2])

    def slow_drafts(harness: Harness, requests: list[LlmRequest]) -> list[list[int]]:
        references = slow_drafters(harness, requests)
        assert_all_is_there(harness, references, requests)
        return [slow.drafts(DRAFT_LEN, None, 0) for slow in references]

    check_drafts(tmp_path, situation, slow_drafts, spec)
