"""Llama 4's text model: logits of transformers, the text part of the model with images, and the
lengths that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.helpers import (
    MAX_POSITIONS,
    VOCAB_SIZE,
    PagedRunner,
    load,
    random_tokens,
    reference_logits,
)
from tests.models.test_logits import assert_close
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.llm import LLM
from tllm_spec.models.config import ModelConfig
from tllm_spec.sampling_params import SamplingParams

TOKENS = random_tokens(40)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "every layer has experts": {},
    "every second layer has experts, no q/k norm": {
        "interleave_moe_layer_step": 2,
        "use_qk_norm": False,
    },
    "no layer without rotary": {"no_rope_layers": [1, 1, 1, 1], "moe_layers": [1]},
    "two experts per token, bias": {
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "no_rope_layer_interval": 2,
    },
    "scaled rotary": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


def save_llama4(folder: Path, **config: Any) -> Any:
    """Write a random text model to `folder`; returns it."""
    settings = transformers.Llama4TextConfig(**(SIZES | config))
    model = transformers.Llama4ForCausalLM(settings).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            inputs = parameter.shape[-2] if parameter.dim() == 3 else parameter.shape[-1]
            scaled = noise * (inputs**-0.5 if parameter.dim() > 1 else 0.3)
            parameter.copy_(scaled + 1 if "norm" in name else scaled)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_prefill_single_tokens_and_windows_equal_transformers(name: str, tmp_path: Path) -> None:
    expected = reference_logits(save_llama4(tmp_path, **MODELS[name]), TOKENS)
    runner = PagedRunner(load(tmp_path))
    assert_close(runner.step({0: TOKENS})[0], expected)
    single = [runner.step(windows={1: [token]})[1] for token in TOKENS]
    assert_close(torch.cat(single), expected)
    fours = [runner.step(windows={2: TOKENS[start : start + 4]})[2] for start in range(0, 40, 4)]
    assert_close(torch.cat(fours), expected)


def test_the_text_part_of_a_model_with_images_has_the_text_models_logits(tmp_path: Path) -> None:
    expected = reference_logits(save_llama4(tmp_path), TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_model.class_embedding"] = torch.ones(8)
    tensors["multi_modal_projector.linear_1.weight"] = torch.ones(8, 8)
    save_file(tensors, tmp_path / "model.safetensors")
    config = transformers.Llama4Config(
        text_config=transformers.Llama4TextConfig(**SIZES).to_dict(),
        architectures=["Llama4ForConditionalGeneration"],
    )
    config.save_pretrained(tmp_path)
    assert_close(PagedRunner(load(tmp_path)).step({0: TOKENS})[0], expected)


def test_a_missing_key_has_the_default_of_transformers() -> None:
    theirs = transformers.Llama4TextConfig(num_hidden_layers=5)
    raw = {"architectures": ["Llama4ForCausalLM"], "vocab_size": theirs.vocab_size}
    sizes = {"hidden_size": 5120, "num_hidden_layers": 5, "num_attention_heads": 40}
    config = ModelConfig.from_dict(raw | sizes)
    assert config == ModelConfig.from_dict(
        theirs.to_dict() | {"architectures": ["Llama4ForCausalLM"], "dtype": None}
    )
    assert config.llama4 is not None and config.llama4.nope_layers == {3}
    assert config.moe is not None
    assert (config.moe.intermediate_size, config.intermediate_size) == (8192, 16384)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_chunk_size": 63}, r"attention_chunk_size is 63.*64 positions.*to 63 or below"),
        ({"floor_scale": 64}, r"floor_scale .* is 64.*64 positions.*to 63 or below"),
    ],
)
def test_lengths_from_which_attention_is_not_plain_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_llama4(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
    load(tmp_path, max_positions=63)


def test_other_layer_types_are_refused(tmp_path: Path) -> None:
    raw = SIZES | {"architectures": ["Llama4ForCausalLM"], "layer_types": ["full_attention"] * 4}
    with pytest.raises(ValueError, match=r"layer_types is .*chunked_attention in the others"):
        ModelConfig.from_dict(raw)


def test_ngram_drafts_leave_the_text_alone(tmp_path: Path) -> None:
    save_llama4(tmp_path)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    texts = []
    for config in (None, {"decoding_type": "NGram", "max_draft_len": 3}):
        options: dict[str, Any] = {"max_seq_len": 60, "speculative_config": config}
        with LLM(str(tmp_path), skip_tokenizer_init=True, **options) as llm:
            texts.append(llm.generate(TOKENS[:9], params).outputs[0].token_ids)
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


@pytest.mark.parametrize("one_model", [True, False])
def test_an_eagle3_head_leaves_the_text_alone(one_model: bool, tmp_path: Path) -> None:
    save_llama4(tmp_path / "target", vocab_size=64, hidden_size=32, num_hidden_layers=2)
    head = {
        "decoding_type": "Eagle3",
        "max_draft_len": 3,
        "speculative_model": str(write_tiny_eagle3(tmp_path / "head", num_captured=2)),
        "eagle3_layers_to_capture": [0, 1],
        "eagle3_one_model": one_model,
    }
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    outputs = []
    for config in (None, head):
        options: dict[str, Any] = {"max_seq_len": 60, "speculative_config": config}
        with LLM(str(tmp_path / "target"), skip_tokenizer_init=True, **options) as llm:
            outputs.append(llm.generate([1, 2, 3, 4], params))
    texts = [output.outputs[0].token_ids for output in outputs]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1
    speculative = outputs[1].speculative_decoding
    assert speculative is not None and speculative.num_drafted_tokens > 0
