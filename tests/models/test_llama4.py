"""Llama 4's text model: logits of transformers, the text part of the model with images, and what
chunks and floor_scale change. test_families.py has the logits of lengths beyond these."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models import helpers
from tests.models.helpers import MAX_POSITIONS, PagedRunner, load, random_tokens, use
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.attention.interface import HeadsBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.models.registry import model_config_of

TOKENS = random_tokens(40)
SIZES: dict[str, Any] = helpers.SIZES | {
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_local_experts": 4,
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
    helpers.randomise(model, has_stacks=True)
    model.save_pretrained(folder)
    return model


def save_with_images(folder: Path) -> Any:
    """A random model that also sees images; returns its text model."""
    model = save_llama4(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_model.class_embedding"] = torch.ones(8)
    tensors["multi_modal_projector.linear_1.weight"] = torch.ones(8, 8)
    save_file(tensors, folder / "model.safetensors")
    text, names = model.config.to_dict(), ["Llama4ForConditionalGeneration"]
    transformers.Llama4Config(text_config=text, architectures=names).save_pretrained(folder)
    return model


def test_a_missing_key_has_the_default_of_transformers() -> None:
    """test_families.py compares the others."""
    sizes = {"vocab_size": 202048, "hidden_size": 5120, "num_attention_heads": 40}
    raw = sizes | {"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 5}
    config = model_config_of(raw)
    assert config.nope_layers == {3} and config.moe is not None
    assert (config.moe.intermediate_size, config.intermediate_size) == (8192, 16384)


# Of 64 positions: several chunks that no page and no other chunk ends with.
LONG: dict[str, dict[str, Any]] = {
    "chunks": {"attention_chunk_size": 14, "attn_temperature_tuning": False},
    "temperature": {"floor_scale": 6, "attn_scale": 0.7, "no_rope_layer_interval": 2},
    "both": {
        "attention_chunk_size": 14,
        "floor_scale": 6,
        "attn_scale": 0.7,
        "no_rope_layer_interval": 2,
    },
    "no layer without chunks": {"attention_chunk_size": 5, "no_rope_layers": [1, 1, 1, 1]},
    "chunks of one token": {"attention_chunk_size": 1},
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_text_is_not_the_text_of_plain_attention(name: str, tmp_path: Path) -> None:
    """The references of test_families.py are beyond chunks and floor_scale."""
    tokens = random_tokens(MAX_POSITIONS, seed=3)
    plain = {"attention_chunk_size": None, "attn_temperature_tuning": False}
    save_llama4(tmp_path, **LONG[name])
    settings = (tmp_path / "config.json").read_text()
    long = PagedRunner(load(tmp_path)).step({0: tokens})[0]
    (tmp_path / "config.json").write_text(json.dumps(json.loads(settings) | plain))
    found = PagedRunner(load(tmp_path)).step({0: tokens})[0]
    differs = (found - long).abs().amax(-1) > 1e-3
    assert differs[-1] and not differs[0]


def test_chunks_and_temperature_cost_nothing_where_they_change_nothing(tmp_path: Path) -> None:
    save_llama4(tmp_path, attention_chunk_size=63, floor_scale=63, no_rope_layer_interval=2)
    found = []
    for max_positions in (62, 63, 64):
        model = load(tmp_path, max_positions=max_positions)
        has_temperature = model.config.temperature is not None
        groups = model.config.layer_groups(SINGLE_RANK)
        found.append(([group.geometry.span for group in groups], has_temperature))
    assert found == [
        ([None], False),
        ([None], True),  # position 62 is scaled
        ([KeySpan(63, slides=False), None], True),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [FlashInferAttention, TritonAttention])
def test_a_gpu_gives_the_logits_of_the_cpu(kind: type[HeadsBackend], tmp_path: Path) -> None:
    """FLASHINFER serves the layers without chunks."""
    is_flashinfer = kind is FlashInferAttention
    if is_flashinfer:
        pytest.importorskip("flashinfer")
    save_llama4(tmp_path, head_dim=64, **LONG["both"])
    dtype = torch.bfloat16 if is_flashinfer else torch.float32
    runners = [PagedRunner(load(tmp_path, dtype=dtype))]
    runners.append(PagedRunner(load(tmp_path, dtype=dtype, device=torch.device("cuda"))))
    use(runners[1], kind)
    tokens = random_tokens(MAX_POSITIONS, seed=3)
    steps = [
        ({0: tokens[:9], 1: tokens[:30]}, {}),
        ({1: tokens[30:50]}, {0: tokens[9:13]}),
        ({}, {0: tokens[13:17], 1: tokens[50:54]}),
    ]
    for contexts, windows in steps:
        expected, actual = (runner.step(contexts, windows) for runner in runners)
        for request in expected:
            mine, its = actual[request].cpu().float(), expected[request].float()
            assert (mine - its).abs().mean() < (0.05 * its.std() if is_flashinfer else 1e-3)


def test_other_layer_types_are_refused(tmp_path: Path) -> None:
    raw = SIZES | {"architectures": ["Llama4ForCausalLM"], "layer_types": ["full_attention"] * 4}
    with pytest.raises(ValueError, match=r"layer_types is .*chunked_attention in the others"):
        model_config_of(raw)
