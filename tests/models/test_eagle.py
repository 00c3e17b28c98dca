"""An EAGLE-1/2 head gives the logits and states of a plain-torch transcription, and loads in every
published layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.tiny_llama import write_tiny_llama
from tests.models.eagle3_runner import HeadRunner, captured_states
from tests.models.helpers import MAX_POSITIONS, assert_close, load, random_tokens
from tests.models.tiny_eagle import write_tiny_eagle
from tests.models.tiny_eagle3 import Tensors, edit_config, rewrite, write_tiny_eagle3
from tllm_spec.models.draft_head import HeadSource, head_kind
from tllm_spec.models.eagle import EagleHead, load_eagle_head
from tllm_spec.models.llama import CausalLM

NUM_LAYERS = 3
LAST = (NUM_LAYERS,)  # the state after the final norm
TOKENS = [token % 64 for token in random_tokens(24)]
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "with a bias": {"bias": True},
    "with an input norm": {"input_norm": True},
    "two layers": {"num_layers": 2},
    "all": {"bias": True, "input_norm": True, "num_layers": 2},
    "a Llama layer with biased q, k and v": {"qkv_bias": True},
    "a Qwen2 layer": {"architectures": ["Qwen2ForCausalLMEagle"], "qkv_bias": True},
    "other sizes": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 2048},
    "a window": {"architectures": ["MistralForCausalLMEagle"], "sliding_window": 4},
    "its own embedding and output layer": {"own_modules": True},
    "rope": {"rope_theta": 30.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
}


@pytest.fixture
def target(tmp_path: Path) -> CausalLM:
    return load(write_tiny_llama(tmp_path / "target", num_layers=NUM_LAYERS))


def load_head(folder: Path, target: CausalLM, **options: Any) -> EagleHead:
    defaults: dict[str, Any] = {"load_format": "auto", "max_positions": MAX_POSITIONS}
    return load_eagle_head(HeadSource(folder, target, **(defaults | options)))


def weights_of(head: EagleHead) -> Tensors:
    return dict(head.state_dict())


def test_the_captured_state_is_the_targets_after_its_final_norm(target: CausalLM) -> None:
    before, after = captured_states(target, TOKENS, (NUM_LAYERS - 1, NUM_LAYERS)).chunk(2, -1)
    scale = (before.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert_close(after, before * scale * target.state_dict()["model.norm.weight"])


@pytest.mark.covering
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM"]
)
def test_every_published_spelling_and_file_gives_the_same_weights(
    target: CausalLM, tmp_path: Path, prefix: Any, file: Any, architecture: str
) -> None:
    options = VARIANTS["all"]
    expected = weights_of(load_head(write_tiny_eagle(tmp_path / "plain", **options), target))
    folder = write_tiny_eagle(
        tmp_path / "other", prefix=prefix, file=file, architectures=[architecture], **options
    )
    weights = weights_of(load_head(folder, target))
    assert weights.keys() == expected.keys() and "fc.bias" in weights
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert head_kind(folder) == "EAGLE-1/2"


def test_copies_of_the_targets_embedding_and_output_layer_take_no_memory(
    target: CausalLM, tmp_path: Path
) -> None:
    weights = target.state_dict()
    copies = {
        "embed_tokens.weight": weights["model.embed_tokens.weight"].double(),
        "lm_head.weight": weights["lm_head.weight"].contiguous(),
    }
    folder = write_tiny_eagle(tmp_path / "head")
    rewrite(folder, lambda tensors: tensors.update(copies))
    head = load_head(folder, target)
    assert head.output is target.get_submodule("lm_head")
    assert head.borrowed[0] is target.get_submodule("model.embed_tokens")
    assert not any("embed" in name or "lm_head" in name for name in weights_of(head))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda tensors: tensors.pop("layers.0.mlp.up_proj.weight"),
            r"missing layers\.0\.mlp\.up_proj\.weight; surplus none",
        ),
        (
            lambda tensors: tensors.update({"norm.weight": torch.ones(32)}),
            r"missing none; surplus norm\.weight",
        ),
        (
            lambda tensors: tensors.update({"fc.weight": torch.ones(32, 96)}),
            r"fc\.weight has the shape \[32, 96\]; the config asks for \[32, 64\]",
        ),
        (
            lambda tensors: tensors.update({"model.fc.weight": torch.ones(32, 64)}),
            r"EAGLE-1/2 head in .* has fc\.weight twice",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(
    target: CausalLM, tmp_path: Path, change: Any, sentence: str
) -> None:
    folder = write_tiny_eagle(tmp_path / "head")
    rewrite(folder, change)
    with pytest.raises(ValueError, match=sentence):
        load_head(folder, target)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("bias", True, r"missing fc\.bias"),
        ("hidden_size", 64, "hidden_size of the EAGLE-1/2 head is 64, the target's is 32"),
        ("vocab_size", 80, "vocab_size of the EAGLE-1/2 head is 80, the target's is 64"),
        ("architectures", ["EAGLEModel"], r"\['EAGLEModel'\]; served is one of LlamaForCausalLM, "),
        ("add_para_norm", True, "add_para_norm is True, which is not served"),
    ],
)
def test_a_config_that_is_not_served_is_refused_by_key_and_value(
    target: CausalLM, tmp_path: Path, key: str, value: Any, sentence: str
) -> None:
    folder = write_tiny_eagle(tmp_path / "head")
    edit_config(folder, **{key: value})
    with pytest.raises(ValueError, match=sentence):
        load_head(folder, target)


def test_a_bias_that_the_config_rules_out_is_surplus(target: CausalLM, tmp_path: Path) -> None:
    folder = write_tiny_eagle(tmp_path / "head", bias=True)
    edit_config(folder, bias=False)
    with pytest.raises(ValueError, match=r"surplus fc\.bias"):
        load_head(folder, target)


def test_dummy_weights_need_only_the_config(target: CausalLM, tmp_path: Path) -> None:
    folder = write_tiny_eagle(tmp_path / "head")
    (folder / "model.safetensors").unlink()
    captured = captured_states(target, TOKENS, LAST)
    heads = [load_head(folder, target, load_format="dummy") for _ in range(2)]
    logits = [HeadRunner(head).draft({0: (TOKENS, captured)})[0][0] for head in heads]
    assert torch.equal(*logits) and logits[0].shape == (24, 64) and logits[0].std() > 0.1


def test_the_kinds_of_heads_are_told_apart_by_config_or_tensors(tmp_path: Path) -> None:
    llama = {"architectures": ["LlamaForCausalLM"]}
    eagle3 = write_tiny_eagle3(tmp_path / "eagle3", **llama)
    assert head_kind(eagle3) == "EAGLE-3"  # by a key
    plain = write_tiny_eagle(tmp_path / "plain", **llama)
    (plain / "model.safetensors").write_bytes((eagle3 / "model.safetensors").read_bytes())
    assert head_kind(plain) == "EAGLE-3"  # by a tensor
    assert head_kind(write_tiny_eagle(tmp_path / "eagle", **llama)) == "EAGLE-1/2"
    (plain / "model.safetensors").unlink()
    assert head_kind(plain) is None
    edit_config(plain, architectures=["LlamaForCausalLMEagle"])
    assert head_kind(plain) == "EAGLE-1/2"
    assert head_kind(write_tiny_llama(tmp_path / "model")) is None
