"""`speculative_token_map` through the engine: drafts are limited to its tokens and mapped back to
the target's ids, for draft models and heads, chains and trees, on both paths."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import (
    HOT,
    assert_texts_are,
    eagle3,
    generating,
    network_of,
    one_model,
    slow_drafters,
    submit_traffic,
)
from tests.executor.harness import Harness, all_pages_are_back, draft_target, output_of
from tests.executor.tiny_llama import write_tiny_llama
from tests.models.tiny_eagle3 import rewrite, write_tiny_eagle3
from tllm_spec.executor.request import LlmRequest
from tllm_spec.models.linear import OutputLinear

PROMPT = [3, 14, 15, 9, 26]
HOT_IDS = Random(0).sample(range(64), 40)
PATHS = {"eagle": "eagle_two_model", "draft_target": "draft_target_two_model"}
MODES = [*PATHS, *PATHS.values()]
WITH_TREES = [*MODES, *(f"{mode}_tree" for mode in MODES)]


def write_map(folder: Path, ids: list[int]) -> str:
    torch.save(torch.tensor(ids), folder / "hot.pt")
    return str(folder / "hot.pt")


def figures(requests: list[LlmRequest]) -> list[Any]:
    return [(output_of(each), each.counters.stats()) for each in requests]


@pytest.mark.thinned
@pytest.mark.parametrize("mode", WITH_TREES)
def test_a_map_of_all_tokens_in_any_order_changes_no_draft(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, tmp_path: Path
) -> None:
    token_map, found = write_map(tmp_path, Random(1).sample(range(64), 64)), []
    for options in ({}, {"speculative_token_map": token_map}):
        harness = Harness(tiny, **one_model(tiny_draft, head, mode, **options))
        requests = submit_traffic(harness, Random(2), 8)
        harness.run()
        found.append(figures(requests))
    assert found[0] == found[1]
    assert sum(stats.num_accepted_tokens for _, stats in found[0]) > 0


@pytest.mark.thinned
@pytest.mark.parametrize("ending", ["", "_tree"])
@pytest.mark.parametrize("mode", PATHS)
def test_the_text_is_plain_decodings_and_both_paths_draft_only_tokens_of_the_map(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, ending: str, tmp_path: Path
) -> None:
    token_map, found = write_map(tmp_path, HOT_IDS), []
    plain = Harness(tiny)
    expected = submit_traffic(plain, Random(2), 8)
    plain.run()
    for path in (mode, PATHS[mode]):
        options = one_model(tiny_draft, head, path + ending, speculative_token_map=token_map)
        harness, drafted = Harness(tiny, **options), set[int]()
        requests, slots = submit_traffic(harness, Random(2), 8), harness.parts.slots
        while harness.round():
            for request in generating(harness):
                num_drafts = request.py_num_draft_tokens
                drafted |= set(slots.window[request.slot, 1 : 1 + num_drafts].tolist())
        assert_texts_are(requests, expected)
        assert all_pages_are_back(harness.executor)
        assert len(drafted) > 20 and drafted <= set(HOT_IDS)
        found.append(figures(requests))
    assert found[0] == found[1]
    assert sum(stats.num_accepted_tokens for _, stats in found[0]) > 0


@pytest.mark.thinned
@pytest.mark.parametrize("sampling", ["coupled", "greedy"])
@pytest.mark.parametrize("mode", PATHS)
def test_drafts_are_those_of_a_slow_loop_over_the_maps_tokens(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, sampling: str, tmp_path: Path
) -> None:
    own = {"speculative_token_map": write_map(tmp_path, HOT_IDS), "draft_sampling": sampling}
    options = one_model(tiny_draft, head, mode, 3, **own)
    harness, num_checked = Harness(tiny, **options, disable_overlap_scheduler=True), 0
    net, slots = network_of(harness).net, harness.parts.slots
    assert net.token_map is not None and net.token_map.tolist() == HOT_IDS
    for number in range(3):
        harness.submit([number, *PROMPT], 20, temperature=HOT if number else None, seed=number)
    while harness.round():
        running = generating(harness)
        for request, slow in zip(running, slow_drafters(harness, running), strict=True):
            temperature = request.rules.temperature if sampling == "coupled" else None
            assert slow._logits.shape == (40,)
            expected = slow.drafts(3, temperature or None, request.seed)
            assert slots.window[request.slot, 1:].tolist() == expected
            num_checked += 1
    assert num_checked > 20


@pytest.mark.parametrize("mode", PATHS)
def test_for_rejection_sampling_a_drafts_distribution_is_over_the_targets_ids(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, tmp_path: Path
) -> None:
    own = {"speculative_token_map": write_map(tmp_path, HOT_IDS), "use_rejection_sampling": True}
    options = one_model(tiny_draft, head, mode, **own)
    harness = Harness(tiny, **options, disable_overlap_scheduler=True)
    request = harness.submit(PROMPT, 30, temperature=0.8)
    absent = [token for token in range(64) if token not in HOT_IDS]
    for _ in range(5):
        harness.round()
        group = harness.parts.sampler.groups.get([request], 4)
        probs = network_of(harness).draft_probs(group)
        assert probs is not None and probs.shape == (1, 3, 64)
        assert torch.allclose(probs.sum(-1), torch.ones(1, 3)) and not probs[..., absent].any()
        first = slow_drafters(harness, [request])[0]._logits / 0.8
        assert torch.allclose(probs[0, 0, HOT_IDS], first.softmax(-1), atol=1e-4)


def test_the_output_layer_of_the_draft_has_the_maps_rows_and_the_targets_has_all(
    tiny: Path, tiny_draft: Path, head: Path, tmp_path: Path
) -> None:
    token_map = write_map(tmp_path, HOT_IDS)
    for mode in ("draft_target", "eagle"):
        harness = Harness(
            tiny, **one_model(tiny_draft, head, mode, speculative_token_map=token_map)
        )
        net: Any = network_of(harness).net
        draft = net._model if mode == "draft_target" else net.head
        sizes = [
            len(module.weight) for module in draft.modules() if isinstance(module, OutputLinear)
        ]
        assert sizes == [40] and net.vocab_size == draft.num_logits == 40
        assert len(harness.parts.runner.engine.model.lm_head.weight) == 64


def test_ids_are_those_of_the_smaller_of_both_vocabularies(tiny: Path, tmp_path: Path) -> None:
    draft = write_tiny_llama(tmp_path / "draft", vocab_size=50)
    token_map = write_map(tmp_path, [3, 49, 50])
    with pytest.raises(ValueError, match=r"token_map: .*hot\.pt has the token id 50; .* 0 to 49"):
        Harness(tiny, **draft_target(draft, speculative_token_map=token_map))
    token_map = write_map(tmp_path, [3, 49, 20])
    harness = Harness(tiny, **draft_target(draft, speculative_token_map=token_map))
    request = harness.submit(PROMPT, 20, temperature=HOT)
    harness.run()
    assert request.num_output_tokens == 20 and request.counters.stats().num_drafted_tokens > 20


def test_an_eagle3_head_with_a_vocabulary_of_its_own_refuses_a_map_with_the_reason(
    tiny: Path, head: Path, tmp_path: Path
) -> None:
    token_map = write_map(tmp_path, HOT_IDS)
    with pytest.raises(ValueError, match=r"hot\.pt' is refused: .* 48 tokens that its d2t maps"):
        Harness(tiny, **eagle3(head, speculative_token_map=token_map))


@pytest.mark.parametrize("draft_vocab_size", [64, None], ids=["own layer", "the target's layer"])
def test_an_eagle3_head_with_all_tokens_takes_a_map(
    tiny: Path, tmp_path: Path, draft_vocab_size: int | None
) -> None:
    whole = write_tiny_eagle3(tmp_path / "head", num_captured=2, draft_vocab_size=draft_vocab_size)
    reordered = write_tiny_eagle3(tmp_path / "other", num_captured=2, draft_vocab_size=64)
    rewrite(reordered, lambda tensors: tensors.update(d2t=63 - 2 * torch.arange(64)))
    token_map, found = write_map(tmp_path, Random(1).sample(range(64), 64)), []
    with pytest.raises(ValueError, match="d2t of the head already says which tokens it drafts"):
        Harness(tiny, **eagle3(reordered, speculative_token_map=token_map))
    for options in ({}, {"speculative_token_map": token_map}):
        harness = Harness(tiny, **eagle3(whole, **options))
        requests = submit_traffic(harness, Random(2), 8)
        harness.run()
        found.append(figures(requests))
    assert found[0] == found[1]
