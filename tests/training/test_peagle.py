"""The zoo's P-EAGLE head: training in parallel equals drafting from each position, and the saved
checkpoint drafts what the plain-torch transcription of the format does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.models.eagle3_reference import Eagle3Reference
from tests.training.eagle3_entries import (
    DRAFT_IDS,
    SHAPE,
    model_config,
    settings,
    with_large_weights,
)
from tllm_spec.training import head_loss as training
from tllm_spec.training.acceptance import head_matches
from tllm_spec.training.eagle3 import PEagleHead, Rows, target_states
from tllm_spec.training.head_files import build_head, config_json, load_head, save_head
from tllm_spec.zoo.registry import resolve_model

FOLDER = resolve_model("zoo:llama-peagle")
NORMS = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}
PARALLEL_SHAPE = replace(SHAPE, num_layers=2, mask_token=5, **NORMS)
UNROLL = 4


@pytest.fixture
def head() -> PEagleHead:
    torch.manual_seed(3)
    return with_large_weights(PEagleHead(PARALLEL_SHAPE, DRAFT_IDS))


@torch.no_grad()
def test_mask_rows_of_all_anchors_together_are_those_of_each_alone(
    target: LlamaForCausalLM, head: PEagleHead
) -> None:
    tokens = torch.randint(12, (2, 25))
    features, _ = target_states(target, tokens, None)
    embed = target.get_input_embeddings()
    found = list(training.step_states(head, target, features, tokens, UNROLL))
    assert [len(rows) for _, rows in found] == [21, 8, 8, 8]
    anchors = found[1][1] - 2
    for place, anchor in enumerate(anchors.tolist()):
        pairs = features[:, : anchor + 1], embed(tokens[:, 1 : anchor + 2])
        rows = Rows.of(anchor + 1, torch.tensor([anchor]), UNROLL - 1)
        alone = head.logits(head(*pairs, embed(torch.tensor(5)), rows)[:, anchor:])
        for step, (states, indices) in enumerate(found):
            own = anchor if step == 0 else place
            assert indices[own] == anchor + step + 1
            logits = head.logits(states[:, own])
            torch.testing.assert_close(logits, alone[:, step], atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_saved_head_drafts_what_the_transcription_of_its_format_does(
    target: LlamaForCausalLM, head: PEagleHead, tmp_path: Path
) -> None:
    config = model_config(target)
    save_head(head, config_json(PARALLEL_SHAPE, config, "speculators"), tmp_path / "head")
    loaded = load_head(tmp_path / "head", config).eval()
    model: Any = target
    reference = Eagle3Reference(tmp_path / "head", model)
    reference.tensors = {name: each.float() for name, each in loaded.state_dict().items()}
    reference.output = loaded.lm_head.weight
    text = torch.randint(12, (1, 40))
    features, target_logits = target_states(target, text, None)
    best = target_logits[0].argmax(-1)
    matches = head_matches(loaded, target, text, 3)[0]
    assert matches.max() > 0
    for start in range(40 - 1 - 3):
        hidden = reference.fuse(features[0, : start + 1])
        logits = reference.block(text[0, 1 : start + 2].tolist(), hidden, 3)
        drafts = loaded.draft_ids[logits.argmax(-1)]
        right = (drafts == best[start + 1 : start + 4]).long().cumprod(0).sum()
        assert matches[start + 2] == right


def test_a_head_starts_from_what_a_trained_head_has_in_common(target: LlamaForCausalLM) -> None:
    eagle3 = with_large_weights(build_head(SHAPE, target, DRAFT_IDS, settings()))
    head = build_head(PARALLEL_SHAPE, target, DRAFT_IDS, settings(), eagle3)
    own, trained = head.state_dict(), eagle3.state_dict()
    assert torch.equal(own["fc.weight"], trained["fc.weight"])
    name = "self_attn.q_proj.weight"
    assert torch.equal(own[f"layers.0.{name}"], trained[f"layers.0.{name}"])


def test_a_few_steps_reduce_the_loss(target: LlamaForCausalLM) -> None:
    torch.manual_seed(4)
    head = build_head(PARALLEL_SHAPE, target, DRAFT_IDS, settings())
    optimizer, losses = torch.optim.AdamW(head.parameters(), lr=1e-2), []
    batch = training.Batch.whole(torch.randint(12, (2, 28)), UNROLL)
    for _ in range(20):
        loss = training.weighted(training.unrolled(head, target, batch, UNROLL)[0])
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_the_zoos_head_has_the_speculators_format_and_is_small() -> None:
    file = FOLDER / "model.safetensors"
    assert file.stat().st_size < 3_000_000
    tensors, config = load_file(file), json.loads((FOLDER / "config.json").read_text())
    assert config["speculators_model_type"] == "peagle"
    assert tensors["mask_hidden"].shape == (1, 1, 576)
    assert {name.partition(".")[0] for name in tensors} == {
        *("fc", "layers", "norm", "lm_head", "mask_hidden", "d2t", "t2d")
    }
