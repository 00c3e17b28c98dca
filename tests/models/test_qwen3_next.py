"""Qwen3-Next: logits of transformers in prompts, chunks and windows, and its next-token layer.
test_families.py has what is refused."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.helpers import MAX_POSITIONS, PagedRunner, load, random_tokens, reference_logits
from tests.models.mtp_reference import modules_of
from tests.models.published_states import QWEN3_5, QWEN3_5_EAGLE3, QWEN3_NEXT
from tests.models.qwen3_next import (
    FULL,
    LINEAR,
    PlainMTP,
    export_fine_tuned,
    save_qwen3_next,
    save_with_mtp,
)
from tests.models.test_mtp import ModuleRunner
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.mtp import check_nextn
from tllm_spec.models.qwen3_next import Qwen3NextForCausalLM
from tllm_spec.models.registry import model_config_of

MODELS: dict[str, dict[str, Any]] = {
    "a state in the last layer": {},
    "attention in the last layer, biases": {
        "layer_types": [LINEAR, FULL, LINEAR, FULL],
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "Qwen3.5": {"family": "Qwen3_5"},
    "Qwen3.5 with experts": {
        "family": "Qwen3_5Moe",
        "num_hidden_layers": 3,
        "layer_types": [LINEAR, FULL, LINEAR],
    },
    "a dense layer, a short convolution, one head for each key": {
        "mlp_only_layers": [1],
        "linear_conv_kernel_dim": 2,
        "linear_num_value_heads": 2,
    },
}


@pytest.mark.thinned
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_prompts_chunks_and_windows_equal_transformers(name: str, tmp_path: Path) -> None:
    tokens = random_tokens(MAX_POSITIONS, seed=3)
    expected = reference_logits(save_qwen3_next(tmp_path, **MODELS[name]), tokens)
    runner = PagedRunner(load(tmp_path), num_pages=128)

    def check(found: torch.Tensor, start: int = 0) -> None:
        torch.testing.assert_close(found, expected[start : start + len(found)], rtol=0, atol=1e-4)

    check(runner.step({0: tokens})[0])
    parts = [*pairwise((0, 3, 14, 25, 64))]
    check(torch.cat([runner.step({1: tokens[start:end]})[1] for start, end in parts]))
    eights = [runner.step(windows={3: tokens[i : i + 8]})[3] for i in range(0, 64, 8)]
    check(torch.cat(eights))
    runner.rewind(3, 5)
    mixed = runner.step({4: tokens[:30]}, {3: tokens[59:62]})
    check(mixed[3], 59)
    check(mixed[4])
    check(torch.cat([runner.step(windows={4: [token]})[4] for token in tokens[30:]]), 30)


@pytest.mark.parametrize("family", ["Qwen3Next", "Qwen3_5"])
def test_the_next_token_layer_equals_its_transcription_in_chunks_and_windows(
    family: str, tmp_path: Path
) -> None:
    plain = PlainMTP(save_with_mtp(tmp_path, family=family), tmp_path)
    tokens = random_tokens(31)
    hidden = plain.target_states(tokens[:-1])
    expected = plain.states(tokens[1:], hidden)
    target = load(tmp_path)
    assert isinstance(target, Qwen3NextForCausalLM)
    runner = ModuleRunner(modules_of(tmp_path, target))
    states = [
        runner.predict(tokens[1:12], hidden[:11]),
        runner.predict(tokens[12:24], hidden[11:23]),
        runner.predict(tokens[24:], hidden[23:], as_window=True),
    ]
    torch.testing.assert_close(torch.cat(states), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mtp.layers.1.mlp.gate.weight", r"surplus mtp\.layers\.1\.mlp\.gate\.weight"),
        ("model.layers.0.linear_attn.conv1d.bias", r"surplus model\.layers\.0.*conv1d\.bias"),
    ],
)
def test_tensors_without_a_parameter_are_refused_by_name(
    name: str, problem: str, tmp_path: Path
) -> None:
    save_with_mtp(tmp_path)
    load(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(8)}, file)
    with pytest.raises(ValueError, match=problem):
        load(tmp_path)


@pytest.mark.parametrize("family", ["Qwen3Next", "Qwen3_5"])
def test_a_module_that_speculators_trained_further_is_loaded_from_a_folder_of_its_own(
    family: str, tmp_path: Path
) -> None:
    target, folder = tmp_path / "target", tmp_path / "module"
    target.mkdir()
    save_with_mtp(target, family=family)
    export_fine_tuned(target, folder)
    model, file = load(target), folder / "model.safetensors"
    check_nextn(model.config, 1, folder)
    expected = dict(modules_of(target, model).named_parameters())
    found = dict(modules_of(folder, model, is_exported=True).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    tensors = load_file(file)
    for missing in tensors.keys() - {"embed_tokens.weight", "lm_head.weight"}:
        save_file({name: tensors[name] for name in tensors if name != missing}, file)
        with pytest.raises(ValueError, match="missing"):
            modules_of(folder, model, is_exported=True)
    save_file(tensors | {"mtp_layers.0.surprise": torch.ones(2)}, file)
    with pytest.raises(ValueError, match=r"surplus .*surprise"):
        modules_of(folder, model, is_exported=True)
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"]["rms_norm_eps"] = 1e-3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is not for this target: rms_norm_eps"):
        check_nextn(model.config, 1, folder)


def test_a_published_config_of_qwen3_5_is_read_as_transformers_reads_it() -> None:
    config = model_config_of(QWEN3_5)
    theirs = transformers.Qwen3_5Config(**json.loads(json.dumps(QWEN3_5))).text_config
    assert config.delta is not None and config.delta.is_split and config.moe is None
    kinds = [LINEAR if layer in config.delta.layers else FULL for layer in range(32)]
    assert kinds == theirs.layer_types and config.num_nextn_layers == 1
    assert config.text_part.images == ("visual.",)
    rope = theirs.rope_parameters
    assert (config.rope.theta, config.rope.partial_factor) == (rope["rope_theta"], 0.25)
    assert (config.hidden_size, config.num_kv_heads) == (theirs.hidden_size, 4)


def test_the_config_of_specforges_head_for_qwen3_5_is_read_without_unknown_keys() -> None:
    head = Eagle3Config.from_dict(QWEN3_5_EAGLE3)
    assert (head.hidden_size, head.num_heads, head.head_dim) == (2560, 16, 256)
    assert (head.vocab_size, head.draft_vocab_size) == (248320, 32000)
    assert head.rope.theta == 1e7 and head.sliding_window is None and not head.unknown_keys
    # Those for models with experts have a key of the target's more, and one kind has experts.
    assert Eagle3Config.from_dict(QWEN3_5_EAGLE3 | {"decoder_sparse_step": 1}) == head
    with pytest.raises(ValueError, match=r"\['Qwen3MoeForCausalLMEagle3'\]; served is one of"):
        Eagle3Config.from_dict(QWEN3_5_EAGLE3 | {"architectures": ["Qwen3MoeForCausalLMEagle3"]})


def test_the_published_config_is_read_as_transformers_reads_it() -> None:
    config = model_config_of(QWEN3_NEXT)
    theirs = transformers.Qwen3NextConfig(**json.loads(json.dumps(QWEN3_NEXT)))
    assert config.delta is not None and config.moe is not None
    kinds = [LINEAR if layer in config.delta.layers else FULL for layer in range(48)]
    assert kinds == theirs.layer_types and len(config.sparse_layers) == 48
    rope = theirs.rope_parameters
    assert (config.rope.theta, config.rope.partial_factor) == (
        *(rope["rope_theta"], rope["partial_rotary_factor"]),
    )
    assert config.moe.normalise_top_k and config.moe.shared_gate
    assert config.max_positions == 262144 and config.num_nextn_layers == 1
    [group] = config.layer_groups(SINGLE_RANK)
    assert group.layers == tuple(range(3, 48, 4))
