"""DFlash heads through the engine."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.executor.draft_caches import (
    HOT,
    SMALL_POOL,
    TOLERANCE,
    TREE,
    assert_cached_pages_are_whole,
    assert_texts_are,
    generating,
    network_of,
    random_lengths,
    spoil_free_pages,
    submit_traffic,
    watch_logits,
    with_lengths,
)
from tests.executor.harness import Harness, all_pages_are_back
from tests.models.eagle3_runner import captured_states
from tests.models.tiny_dflash import SIZES, DFlashReference, write_tiny_dflash
from tests.models.tiny_eagle3 import edit_config
from tllm_spec.models.dflash import DFlashConfig

LAYERS, DRAFT_LEN = (0, 1), 3
HEADS: dict[str, dict[str, Any]] = {
    "z-lab": {},
    "speculators, a reduced vocabulary": {"speculators": True, "draft_vocab_size": 48},
    "another width": {"sizes": SIZES | {"hidden_size": 48}, "target_hidden_size": 32},
}


def dflash(head: Path, draft_len: int = DRAFT_LEN, **options: Any) -> dict[str, Any]:
    own = {"decoding_type": "DFlash", "speculative_model": str(head), "max_draft_len": draft_len}
    return {"speculative_config": own | options}


@pytest.mark.parametrize("name", HEADS)
def test_the_engine_fills_in_the_block_of_the_plain_torch_transcription(
    name: str, tiny: Path, tmp_path: Path
) -> None:
    head = write_tiny_dflash(tmp_path, **HEADS[name])
    harness = Harness(tiny, **dflash(head), disable_overlap_scheduler=True)
    spec = harness.parts.runner.engine.spec
    assert spec is not None and spec.layers == LAYERS
    target, slots = harness.parts.runner.engine.model, harness.parts.slots
    reference, net = DFlashReference(head, target), network_of(harness).net
    seen = watch_logits(net)
    for number in range(4):
        prompt, temperature = [number, 3, 14, 15, 9, 26], HOT if number % 2 else None
        harness.submit(prompt, 24, temperature=temperature, seed=number)
    num_checked = 0
    while harness.round():
        running = generating(harness)
        for place, request in enumerate(running):
            captured = captured_states(target, request.tokens[:-1], LAYERS)
            logits = reference.block(request.tokens[-1], captured, DRAFT_LEN)
            own = seen[-1].view(DRAFT_LEN, -1, logits.shape[1])
            if own.shape[1] == len(running):
                assert (own[:, place] - logits).abs().max() < TOLERANCE
                num_checked += 1
            if not request.rules.temperature:
                best = logits.argmax(-1)
                drafts = best if net.token_map is None else net.token_map[best]
                assert slots.window[request.slot].tolist() == [request.tokens[-1], *drafts.tolist()]
    assert num_checked > 20


@pytest.mark.thinned
@pytest.mark.parametrize("drafting", ["chain", "tree", "copies"])
@pytest.mark.parametrize("overlap", [True, False])
def test_texts_are_those_of_plain_decoding_with_any_draft_lengths(
    drafting: str, overlap: bool, tiny: Path, tmp_path: Path
) -> None:
    """With chunks, prefix hits, preemption and rounds without drafts; what was not written is
    NaN."""
    head = write_tiny_dflash(tmp_path)
    own = {"chain": {}, "tree": TREE, "copies": {"sa_config": {}}}[drafting]
    pool = {"kv_cache_config": {"tokens_per_block": 4, "max_tokens": 112}}
    runs = []
    for speculation in ({}, dflash(head, **own)):
        options = SMALL_POOL | pool | {"max_num_tokens": 60, **speculation}
        harness = Harness(tiny, **options, disable_overlap_scheduler=not overlap)
        spoil_free_pages(harness)
        if speculation and drafting == "chain":
            with_lengths(harness, random_lengths(Random(3)))
        runs.append(submit_traffic(harness, Random(5), 24))
        harness.run()
        assert all_pages_are_back(harness.executor)
    assert_texts_are(runs[1], runs[0])
    assert harness.parts.scheduler.num_preemptions and assert_cached_pages_are_whole(harness)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a layer of others": ({"conv_kernel_size": 2}, "conv_kernel_size is 2, which is not served"),
    "DSpark": ({"architectures": ["DSparkDraftModel"]}, "The draft weights are a DSpark head"),
    "Domino": (
        {"dflash_config": {"projector_type": "domino", "gru_hidden_dim": 8}},
        "The draft weights are a Domino head",
    ),
    "nested": ({"dflash_config": {"causal": True}}, "causal is True, and only False is served"),
    "rows that sample": ({"sample_from_anchor": True}, "sample_from_anchor is True"),
    "a window": (
        {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
        "sliding_window of the DFlash head is 8",
    ),
    "another format": ({"speculators_model_type": "dflash2"}, "is 'dflash2'; served is 'dflash'"),
    "another layer": ({"model_type": "gpt_oss"}, "model_type of the DFlash head is 'gpt_oss'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_named(name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    edit_config(write_tiny_dflash(tmp_path), **changes)
    with pytest.raises(ValueError, match=message):
        DFlashConfig.from_pretrained(tmp_path)


def test_more_drafts_than_the_block_has_and_a_missing_mask_token_are_refused(
    tiny: Path, tmp_path: Path
) -> None:
    head = write_tiny_dflash(tmp_path, block_size=4)
    with pytest.raises(ValueError, match=r"max_draft_len = 4 is refused: .* block_size 4"):
        Harness(tiny, **dflash(head, 4))
    edit_config(head, dflash_config={"target_layer_ids": [0, 1]})
    with pytest.raises(ValueError, match="mask_token_id is needed"):
        Harness(tiny, **dflash(head))
    (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(ValueError, match=r"mask_embedding\.pt: mask embeddings are not served"):
        Harness(tiny, **dflash(head))


def test_layers_that_are_not_named_are_spread_evenly(tmp_path: Path) -> None:
    config = DFlashConfig.from_pretrained(write_tiny_dflash(tmp_path, num_hidden_layers=5))
    layers = {number: config.default_layers(number) for number in (36, 64, 28)}
    assert layers == {36: (1, 9, 17, 25, 33), 64: (1, 16, 31, 46, 61), 28: (1, 7, 13, 19, 25)}
