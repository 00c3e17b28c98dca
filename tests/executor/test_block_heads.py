"""DFlash, DFlash2 and DSpark heads through the engine: which drafts they make, that the text is
plain decoding's, and which folders and options are refused."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.draft_caches import (
    HOT,
    SMALL_POOL,
    TOLERANCE,
    TREE,
    assert_cached_pages_are_whole,
    assert_drafts_at_once,
    assert_texts_are,
    captured_states,
    generating,
    random_lengths,
    spoil_free_pages,
    submit_traffic,
    with_lengths,
)
from tests.executor.draft_graphs import assert_same
from tests.executor.graph_rounds import on_cuda, submit_mixture
from tests.executor.harness import Harness, all_pages_are_back, output_of
from tests.executor.test_split_rounds import watch_windows
from tests.models.helpers import load
from tests.models.tiny_dflash import SIZES, DFlashReference, write_tiny_dflash
from tests.models.tiny_eagle3 import edit_config
from tllm_spec.kernels.slots.choose_rows import NUM_PROBABILITIES
from tllm_spec.models.automatic import with_drafter
from tllm_spec.models.dflash import DFlashConfig, load_dflash_head
from tllm_spec.models.draft_head import HeadSource

LAYERS, DRAFT_LEN = (0, 1), 3
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
SELECTOR = {
    "conv_kernel_size": 2,
    "conv_group_size": 8,
    "selector_rank": 6,
    "selector_top_k": 5,
}
HEADS: dict[str, dict[str, Any]] = {
    "z-lab": {},
    "speculators, a reduced vocabulary": {"speculators": True, "draft_vocab_size": 48},
    "another width": {"sizes": SIZES | {"hidden_size": 48}, "target_hidden_size": 32},
    "a window in some layers": MIXED,
    "a window in all layers": SLIDING,
    "a window longer than any text, in some layers": MIXED | {"sliding_window": 999},
    "a window that shows the whole block": MIXED | {"sliding_window_non_causal": True},
    "a window by its other name": {"use_swa": True, "swa_window_size": 9},
    "causal": {"is_causal": True},
    "DSpark": {"markov": "vanilla"},
    "DSpark, gated, in speculators": {"markov": "gated", "speculators": True},
    "DSpark, recurrent, a reduced vocabulary": {"markov": "rnn", "draft_vocab_size": 48},
    "DSpark that fills in": {"markov": "vanilla", "sample_from_anchor": False},
    "DSpark without a correction": {"markov": "vanilla", "markov_rank": 0},
    "DSpark with windows": {"markov": "vanilla", **MIXED},
    "DFlash2": {"selector": SELECTOR},
    "DFlash2, three taps, in speculators": {
        "selector": SELECTOR | {"conv_kernel_size": 3},
        "speculators": True,
    },
    "DFlash2 with windows": {"selector": SELECTOR, **MIXED},
}


def dflash(head: Path, draft_len: int = DRAFT_LEN, **options: Any) -> dict[str, Any]:
    """The type is what the folder says."""
    own = {"speculative_model": str(head), "max_draft_len": draft_len} | options
    return with_drafter("", {"speculative_config": own})


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", HEADS)
def test_the_engine_fills_in_the_block_of_the_plain_torch_transcription(
    name: str, tiny: Path, tmp_path: Path
) -> None:
    head = write_tiny_dflash(tmp_path, **HEADS[name])
    harness = Harness(tiny, **dflash(head), disable_overlap_scheduler=True)
    spec = harness.parts.runner.engine.spec
    assert spec is not None and spec.layers == LAYERS
    reference = DFlashReference(head, harness.parts.runner.engine.model)
    for number in range(4):
        prompt, temperature = [number, 3, 14, 15, 9, 26], HOT if number % 2 else None
        harness.submit(prompt, 24, temperature=temperature, seed=number)

    def block(tokens: list[int], captured: torch.Tensor, drafts: list[int]) -> torch.Tensor:
        return reference.block(tokens[-1], captured, drafts)

    assert_drafts_at_once(harness, LAYERS, block, DRAFT_LEN)


@torch.inference_mode()
def test_trees_continue_each_path_by_what_the_correction_says_after_it(
    tiny: Path, tmp_path: Path
) -> None:
    """Which differs from path to path."""
    head = write_tiny_dflash(tmp_path, markov="rnn")
    harness = Harness(tiny, **dflash(head, **TREE), disable_overlap_scheduler=True)
    target, slots = harness.parts.runner.engine.model, harness.parts.slots
    reference, topk = DFlashReference(head, target), TREE["dynamic_tree_max_topK"]
    request, later, num_alike = harness.submit([3, 14, 15, 9, 26], 16), 0, 0
    assert slots.trees is not None
    while harness.round():
        if not generating(harness):
            continue
        captured, tokens = captured_states(target, request.tokens[:-1], LAYERS), request.tokens
        window = slots.window[request.slot].tolist()
        parents = slots.trees.parents[request.slot].tolist()
        paths = dict[int, list[int]]({0: []})
        for node in range(1, 1 + int(slots.num_drafts[request.slot])):
            paths[node] = [*paths[parents[node]], window[node]]
            depth, rest = len(paths[node]), [0] * (DRAFT_LEN - len(paths[node]))
            best = reference.block(tokens[-1], captured, paths[node] + rest)[depth - 1].topk(topk)
            assert window[node] in best.indices
            if depth == 2:
                later += 1
                first = reference.block(tokens[-1], captured, [window[1], window[node], 0])[1]
                num_alike += window[node] in first.topk(topk).indices
    assert later > 20 and num_alike < later


@torch.inference_mode()
def test_shared_rows_go_by_what_the_head_says_of_its_drafts(tiny: Path, tmp_path: Path) -> None:
    """And by how the file calibrates it."""
    head = write_tiny_dflash(tmp_path, markov="vanilla")
    calibration = tmp_path / "calibration.json"
    calibration.write_text('{"temperatures": [2.0, 1.0, 0.5, 3.0]}')
    options = dflash(head, verify_budget=2.5, confidence_calibration_path=str(calibration))
    harness = Harness(tiny, **options, disable_overlap_scheduler=True)
    target, slots = harness.parts.runner.engine.model, harness.parts.slots
    reference, num_checked = DFlashReference(head, target), 0
    assert slots.values is not None
    for number in range(4):
        harness.submit([number, 3, 14, 15], 12, temperature=HOT if number % 2 else None)
    while harness.round():
        for request in generating(harness):
            captured = captured_states(target, request.tokens[:-1], LAYERS)
            drafts = slots.window[request.slot, 1 : 1 + DRAFT_LEN].tolist()
            expected = reference.confidence(request.tokens[-1], captured, drafts).logit()
            expected = (expected / torch.tensor([2.0, 1.0, 0.5])).sigmoid()
            features = slots.values.features[request.slot, :DRAFT_LEN]
            off = (features - expected * NUM_PROBABILITIES).abs()
            assert off.max() < 1 + TOLERANCE
            num_checked += 1
    assert num_checked > 20


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    "drafting", ["chain", "tree", "copies", "windows", "DSpark", "DFlash2", "shared"]
)
@pytest.mark.parametrize("overlap", [True, False])
def test_texts_are_those_of_plain_decoding_with_any_draft_lengths(
    drafting: str, overlap: bool, tiny: Path, tmp_path: Path
) -> None:
    """With chunks, prefix hits, preemption and rounds without drafts; what was not written is
    NaN."""
    spark: dict[str, Any] = {"markov": "vanilla", **MIXED}
    of_head = {
        "windows": MIXED,
        "DFlash2": {"selector": SELECTOR},
        "DSpark": spark,
        "shared": spark,
    }
    head = write_tiny_dflash(tmp_path, **of_head.get(drafting, {}))
    of_mode = {"tree": TREE, "copies": {"sa_config": {}}, "shared": {"verify_budget": 2.5}}
    own: dict[str, Any] = of_mode.get(drafting, {})
    pool = {"kv_cache_config": {"tokens_per_block": 4, "max_tokens": 112}}
    runs = []
    for speculation in ({}, dflash(head, **own)):
        options = SMALL_POOL | pool | {"max_num_tokens": 60, **speculation}
        harness = Harness(tiny, **options, disable_overlap_scheduler=not overlap)
        spoil_free_pages(harness)
        if speculation and drafting in ("chain", "DSpark"):
            with_lengths(harness, random_lengths(Random(3)))
        runs.append(submit_traffic(harness, Random(5), 24))
        harness.run()
    assert_texts_are(runs[1], runs[0])
    assert harness.parts.scheduler.num_preemptions and assert_cached_pages_are_whole(harness)


@pytest.mark.gpu
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["z-lab", "DSpark, gated, in speculators", "DFlash2", "trees"])
def test_on_a_gpu_the_drafts_of_graphs_are_those_of_a_cpu(
    name: str, is_sampled: bool, tiny: Path, tmp_path: Path
) -> None:
    """Batches are below a captured size, and requests end; the text is plain decoding's."""
    head = write_tiny_dflash(tmp_path, **HEADS.get(name, {"markov": "rnn"}))
    options = dflash(head, **(TREE if name == "trees" else {}))
    on_cpu, alone = Harness(tiny, **options), Harness(tiny)
    harnesses = on_cuda(tiny, [1, 4, 8], **options), on_cpu, alone
    windows = [watch_windows(each) for each in (harnesses if name != "trees" else ())]
    ours, theirs, expected = (submit_mixture(each, 7, is_sampled) for each in harnesses)
    for each in harnesses:
        each.run()
    assert_same(ours, theirs)
    assert not windows or windows[0] == windows[1]
    assert list(map(output_of, ours)) == list(map(output_of, expected))
    assert all_pages_are_back(harnesses[0].executor)


@pytest.mark.parametrize("name", ["z-lab", "DSpark, gated, in speculators", "DFlash2"])
def test_each_tensor_of_a_published_layout_is_needed_and_no_other_is_taken(
    name: str, tiny: Path, tmp_path: Path
) -> None:
    head = write_tiny_dflash(tmp_path, **HEADS[name])
    source = HeadSource(head, load(tiny, max_positions=64), "auto", max_positions=64)
    file, config = head / "model.safetensors", DFlashConfig.from_pretrained(head)
    tensors = load_file(file)
    assert load_dflash_head(source, config, len(LAYERS)).block == config.block
    for missing in tensors:
        save_file({each: tensors[each] for each in tensors if each != missing}, file)
        with pytest.raises(ValueError, match=missing.replace(".", r"\.")):
            load_dflash_head(source, config, len(LAYERS))
    save_file(tensors | {"markov_head.extra.weight": torch.zeros(2)}, file)
    with pytest.raises(ValueError, match=r"markov_head\.extra\.weight"):
        load_dflash_head(source, config, len(LAYERS))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a layer of others": ({"conv_kernel_size": 2}, "conv_kernel_size is 2, which is not served"),
    "JetSpec": ({"architectures": ["JetSpecDraftModel"]}, "The draft weights are a JetSpec head"),
    "DFlash2": (
        {"dflash_config": {"selector_rank": 8, "conv_group_size": 7}},
        "hidden_size of the DFlash2 head is 32; it must be a multiple of conv_group_size",
    ),
    "Domino": (
        {"dflash_config": {"projector_type": "domino", "gru_hidden_dim": 8}},
        "The draft weights are a Domino head",
    ),
    "nested": ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias is True"),
    "another format": ({"speculators_model_type": "dflashy"}, "The draft weights are a dflashy he"),
    "another correction": (
        {"markov_rank": 4, "markov_head_type": "lstm"},
        "markov_head_type of the DSpark head is 'lstm'; served are vanilla, gated, rnn",
    ),
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


def test_what_a_dspark_head_was_not_trained_with_is_refused(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text('{"temperatures": [1.0, 0]}')
    for options, message in (
        ({"block_size": 7}, "block_size = 7 is refused: .* trained with 8"),
        ({"markov_rank": 4}, "markov_rank = 4 is refused: .* trained with 8"),
        ({"markov_head_type": "rnn"}, "markov_head_type = 'rnn' is refused: .* with 'vanilla'"),
        ({"confidence_calibration_path": str(file)}, "temperatures, a list of 3 or more numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            Harness(tiny, **dflash(write_tiny_dflash(tmp_path, markov="vanilla"), **options))
    head = write_tiny_dflash(tmp_path, markov="vanilla", enable_confidence_head=False)
    with pytest.raises(ValueError, match="has no confidence head"):
        Harness(tiny, **dflash(head, confidence_calibration_path=str(file)))
    assert Harness(tiny, **dflash(head, block_size=8, markov_rank=8, markov_head_type="vanilla"))


def test_layers_that_are_not_named_are_spread_evenly(tmp_path: Path) -> None:
    config = DFlashConfig.from_pretrained(write_tiny_dflash(tmp_path, num_hidden_layers=5))
    layers = {number: config.default_layers(number) for number in (36, 64, 28)}
    assert layers == {36: (1, 9, 17, 25, 33), 64: (1, 16, 31, 46, 61), 28: (1, 7, 13, 19, 25)}
