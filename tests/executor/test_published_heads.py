"""EAGLE-3 heads in the published formats through the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import (
    HOT,
    MASK,
    TOLERANCE,
    eagle3,
    generating,
    network_of,
    watch_logits,
)
from tests.executor.harness import Harness
from tests.models.eagle3_reference import Eagle3Reference
from tests.models.eagle3_runner import captured_states
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.executor.request import LlmRequest

PROMPT = [3, 14, 15, 9, 26]
DRAFT_LEN = 3
LAYERS = (0, 2, 5)
INPUTS = [1, 3, 6]  # as the speculators format counts the same layers

HEADS: dict[str, dict[str, Any]] = {
    "speculators": {
        "speculators": True,
        "spelling": "layers",
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": INPUTS,
    },
    "speculators, EAGLE-3.1": {
        "speculators": True,
        "spelling": "layers",
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": INPUTS,
    },
    "speculators, a Qwen3 layer": {
        "speculators": True,
        "spelling": "layers",
        "model_type": "qwen3",
        "eagle_aux_hidden_state_layer_ids": INPUTS,
    },
    "flat, EAGLE-3.1": {
        "fc_norm": True,
        "norm_output": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    },
    "flat, another width": {
        "hidden_size": 48,
        "target_hidden_size": 32,
        "own_modules": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    },
    "flat, norm_before_fc in eagle_config": {
        "norm_before_fc": True,
        "eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    },
}


PARALLEL_HEADS: dict[str, dict[str, Any]] = {
    "speculators": {
        "speculators": True,
        "spelling": "layers",
        "eagle_aux_hidden_state_layer_ids": INPUTS,
    },
    "speculators, two Qwen3 layers and own embedding": {
        "speculators": True,
        "spelling": "layers",
        "model_type": "qwen3",
        "num_layers": 2,
        "own_modules": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": INPUTS,
    },
    "flat": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}},
    "flat, another width": HEADS["flat, another width"],
}


def head_options(head: Path, **options: Any) -> dict[str, Any]:
    return eagle3(head, DRAFT_LEN, eagle3_layers_to_capture=None, **options)


def submit(harness: Harness) -> list[LlmRequest]:
    return [
        harness.submit([number, *PROMPT], 24, temperature=HOT if number % 2 else None, seed=number)
        for number in range(4)
    ]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", HEADS)
def test_the_engine_drafts_the_tokens_of_the_plain_torch_reference(
    name: str, deep: Path, tmp_path: Path
) -> None:
    head = write_tiny_eagle3(tmp_path, **HEADS[name])
    harness = Harness(deep, **head_options(head), disable_overlap_scheduler=True)
    spec = harness.parts.runner.engine.spec
    assert spec is not None and spec.layers == LAYERS
    target, slots = harness.parts.runner.engine.model, harness.parts.slots
    reference = Eagle3Reference(head, target)
    token_map = network_of(harness).net.token_map
    assert token_map is not None
    submit(harness)
    num_checked = 0
    while harness.round():
        for request in generating(harness):
            if request.rules.temperature:
                continue  # its drafts are sampled
            tokens = request.tokens[1:]
            hidden = reference.fuse(captured_states(target, request.tokens[:-1], LAYERS))
            for _ in range(DRAFT_LEN):
                logits, states = reference.forward(tokens, hidden)
                hidden = torch.cat((hidden, states[-1:]))
                tokens = [*tokens, int(token_map[logits[-1].argmax()])]
            window = slots.window[request.slot].tolist()
            assert window == [request.tokens[-1], *tokens[-DRAFT_LEN:]]
            num_checked += 1
    assert num_checked > 20


def test_one_warning_names_the_keys_that_are_not_known(
    deep: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = write_tiny_eagle3(
        tmp_path, decoder_sparse_step=1, modal_type="VLM", **HEADS["flat, EAGLE-3.1"]
    )
    Harness(deep, **head_options(head))
    named = [record.message for record in caplog.records if "unknown keys" in record.message]
    assert [text.rpartition(": ")[2] for text in named] == ["decoder_sparse_step, modal_type"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("path", ["one model", "two models"])
@pytest.mark.parametrize("name", PARALLEL_HEADS)
def test_a_p_eagle_head_drafts_all_tokens_of_the_reference_at_once(
    name: str, path: str, deep: Path, tmp_path: Path
) -> None:
    head = write_tiny_eagle3(tmp_path, mask_token=MASK, **PARALLEL_HEADS[name])
    harness = Harness(
        deep,
        **head_options(head, eagle3_one_model=path == "one model"),
        disable_overlap_scheduler=True,
    )
    target, slots = harness.parts.runner.engine.model, harness.parts.slots
    reference, net = Eagle3Reference(head, target), network_of(harness).net
    seen = watch_logits(net)
    token_map = net.token_map
    assert token_map is not None
    submit(harness)
    num_checked = 0
    while harness.round():
        running = generating(harness)
        for place, request in enumerate(running):
            hidden = reference.fuse(captured_states(target, request.tokens[:-1], LAYERS))
            logits = reference.block(request.tokens[1:], hidden, DRAFT_LEN)
            own = seen[-1].view(DRAFT_LEN, -1, logits.shape[1])
            if own.shape[1] == len(running):
                assert (own[:, place] - logits).abs().max() < TOLERANCE
                num_checked += 1
            if not request.rules.temperature:
                drafts = token_map[logits.argmax(-1)].tolist()
                assert slots.window[request.slot].tolist() == [request.tokens[-1], *drafts]
    assert num_checked > 20


def test_a_p_eagle_head_is_refused_outside_torch(deep: Path, tmp_path: Path) -> None:
    head = write_tiny_eagle3(tmp_path, mask_token=MASK, **PARALLEL_HEADS["flat"])
    options = head_options(head, eagle3_one_model=False, draft_backend="onnxruntime")
    with pytest.raises(ValueError, match="one draft after the other, and a P-EAGLE head all at"):
        Harness(deep, **options)
