"""Gemma 3's text model: rounding in 16 bits, and folders as published. test_families.py has its
logits and what is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models import helpers
from tests.models.helpers import (
    MAX_POSITIONS,
    PagedRunner,
    load,
    random_tokens,
    reference_logits,
    use,
)
from tests.models.published import GEMMA3, GEMMA3_4B
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.interface import HeadsBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.llm import LLM
from tllm_spec.models.gemma3 import Gemma3Model
from tllm_spec.models.layers import RMSNorm
from tllm_spec.models.registry import model_config_of
from tllm_spec.sampling_params import SamplingParams

WINDOW = 7
TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
# Frequencies so high that 64 positions tell the two rotary embeddings apart.
ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
}
SIZES: dict[str, Any] = helpers.SIZES | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
}


def save_gemma3(folder: Path, *, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """Write a random text model to `folder`; returns it."""
    layers = {"layer_types": TYPES, "rope_parameters": ROPES}
    settings = transformers.Gemma3TextConfig(**(SIZES | layers | config))
    model = transformers.Gemma3ForCausalLM(settings).eval()
    helpers.randomise(model, norms=0.0)
    model.to(dtype).save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": MAX_POSITIONS},
        {"rope_parameters": ROPES | {"sliding_attention": ROPES["full_attention"]}},
        {"rope_parameters": ROPES | {"full_attention": {"rope_theta": 1000.0}}},
        {"query_pre_attn_scalar": 16},
    ],
    ids=lambda change: str(*change),
)
def test_the_reference_depends_on_what_test_families_compares(
    change: dict[str, Any], tmp_path: Path
) -> None:
    tokens = random_tokens(MAX_POSITIONS, seed=3)
    found = [reference_logits(save_gemma3(tmp_path, **each), tokens) for each in ({}, change)]
    assert (found[0] - found[1]).abs()[-1].max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_norms_and_embeddings_have_the_bits_of_transformers(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """A norm's weight in 16 bits, and an unrounded root of the hidden size, would change them."""
    theirs = save_gemma3(tmp_path, dtype=dtype, hidden_size=56)
    mine = load(tmp_path, dtype=dtype)
    tokens = torch.tensor(random_tokens(50))
    assert isinstance(mine.model, Gemma3Model)
    embedded = mine.model.embed(tokens)
    assert torch.equal(embedded, theirs.model.embed_tokens(tokens))
    rounded = torch.tensor(56**0.5, dtype=dtype)
    exact = (theirs.model.embed_tokens.weight[tokens].float() * 56**0.5).to(dtype)
    assert rounded.item() != 56**0.5 and not torch.equal(embedded, exact)
    norms = {name: norm for name, norm in theirs.named_modules() if "layernorm" in name}
    assert len(norms) == 16
    for name, norm in norms.items():
        own = mine.get_submodule(name)
        assert isinstance(own, RMSNorm) and torch.equal(own.forward(embedded), norm(embedded))
        total = embedded.clone()
        own.add_to(total, embedded)
        assert torch.equal(total, embedded + norm(embedded))
        narrow = torch.nn.functional.rms_norm(embedded, (56,), own.weight.to(dtype), own.eps)
        assert not torch.equal(narrow, norm(embedded))


def stored_logits(folder: Path, dtype: torch.dtype, tokens: list[int]) -> torch.Tensor:
    """Logits of transformers' loaded model: a conversion would round its frequencies, too."""
    model = transformers.Gemma3ForCausalLM.from_pretrained(folder, dtype=dtype)
    return reference_logits(model, tokens).float()


def check_errors(found: torch.Tensor, folder: Path, tokens: list[int]) -> None:
    """Logits in bfloat16 are as near to those of the same weights in float32 as transformers'."""
    exact = stored_logits(folder, torch.float32, tokens)
    coarse = stored_logits(folder, torch.bfloat16, tokens)
    mine, its = ((each.float() - exact).square().mean(1).sqrt() for each in (found, coarse))
    assert mine.mean() < 1.1 * its.mean() < 0.05 * exact.std()
    assert mine.max() < 2 * its.max()


def test_in_bfloat16_logits_are_as_near_to_those_of_float32_as_transformers(tmp_path: Path) -> None:
    tokens = random_tokens(MAX_POSITIONS, seed=3)
    save_gemma3(tmp_path, dtype=torch.bfloat16)
    found = PagedRunner(load(tmp_path, dtype=torch.bfloat16)).step({0: tokens})[0]
    check_errors(found, tmp_path, tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("kind", [TritonAttention, BatchInvariantAttention])
def test_a_gpu_in_bfloat16_is_as_near_to_float32_as_transformers(
    kind: type[HeadsBackend], head_dim: int, tmp_path: Path
) -> None:
    """Prompts, and windows of so few rows that they run kernels of their own."""
    tokens, sizes = random_tokens(200, seed=3), {"head_dim": head_dim, "sliding_window": 37}
    sizes |= {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 256}
    save_gemma3(tmp_path, dtype=torch.bfloat16, **sizes)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    options["batch_invariant"] = kind is BatchInvariantAttention
    runner = PagedRunner(load(tmp_path, max_positions=256, **options), page_size=32)
    use(runner, kind)
    parts = [runner.step({0: tokens[:90]})[0], runner.step({0: tokens[90:120]})[0]]
    parts += [runner.step(windows={0: tokens[i : i + 4]})[0] for i in range(120, 200, 4)]
    check_errors(torch.cat(parts).cpu(), tmp_path, tokens)


def with_images(folder: Path, prefix: str, before: str = "") -> Any:
    """Write a random model that also sees images; returns its text model. prefix: of the text
    model's tensors; before: of those of images."""
    model = save_gemma3(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    tensors[f"{before}vision_tower.vision_model.post_layernorm.weight"] = torch.ones(8)
    tensors[f"{before}multi_modal_projector.mm_input_projection_weight"] = torch.ones(8, 8)
    save_file(tensors, folder / "model.safetensors")
    text = model.config.to_dict()
    names = ["Gemma3ForConditionalGeneration"]
    transformers.Gemma3Config(text_config=text, architectures=names).save_pretrained(folder)
    return model


LAYOUTS = {
    "as published": ("language_model.model.", ""),
    "newer": ("model.language_model.", "model."),
}


def test_a_model_with_images_is_served_as_text_on_request_only(tmp_path: Path) -> None:
    with_images(tmp_path, *LAYOUTS["as published"])
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_seq_len": 60}
    with pytest.raises(ValueError, match=r"also sees images.*set language_model_only: true"):
        LLM(str(tmp_path), **options)
    with LLM(str(tmp_path), language_model_only=True, **options) as llm:
        output = llm.generate(random_tokens(9), SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4


def test_tensors_of_images_in_a_text_model_are_surplus(tmp_path: Path) -> None:
    save_gemma3(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"surplus multi_modal_projector\.mm_soft_emb_norm"):
        load(tmp_path)


@pytest.mark.parametrize("name", GEMMA3)
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    raw = GEMMA3[name]
    config, raw = model_config_of(raw), copy.deepcopy(raw)
    own = raw.get("text_config", raw)
    theirs = transformers.Gemma3TextConfig(**own)
    sizes = config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers
    heads = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    assert sizes == (
        *(theirs.vocab_size, theirs.hidden_size),
        *(theirs.intermediate_size, theirs.num_hidden_layers),
    )
    assert heads == (
        *(theirs.num_attention_heads, theirs.num_key_value_heads),
        *(theirs.head_dim, theirs.rms_norm_eps),
    )
    kinds = [
        "sliding_attention" if layer in config.sliding_layers else "full_attention"
        for layer in range(config.num_layers)
    ]
    assert kinds == theirs.layer_types and config.local_layers == config.sliding_layers
    for rope, kind in zip(config.ropes, ("full_attention", "sliding_attention"), strict=True):
        expected = theirs.rope_parameters[kind]
        assert (rope.kind, rope.theta) == (expected["rope_type"], expected["rope_theta"])
        assert rope.factor == expected.get("factor", 1.0)
    first, second = config.layer_groups(SINGLE_RANK)
    assert first.geometry.span == KeySpan(theirs.sliding_window, slides=True)
    assert second.geometry.span is None
    scale = theirs.query_pre_attn_scalar**-0.5
    assert all(group.geometry.scale == scale for group in (first, second))  # type: ignore[attr-defined] # not of all geometries
    assert config.max_positions == theirs.max_position_embeddings
    assert config.tie_word_embeddings and config.dtype == torch.bfloat16
    assert config.eos_token_ids == ((1,) if own is raw else (1, 106))


def test_an_older_spelling_gives_the_config_of_the_newer_one() -> None:
    text = transformers.Gemma3TextConfig(**copy.deepcopy(GEMMA3_4B["text_config"])).to_dict()
    newer = GEMMA3_4B | {"text_config": text | {"dtype": "bfloat16", "eos_token_id": [1, 106]}}
    assert model_config_of(newer) == model_config_of(GEMMA3_4B)


def test_a_window_beyond_all_positions_leaves_the_local_rotary_embedding(tmp_path: Path) -> None:
    tokens = random_tokens(40, seed=3)
    expected = reference_logits(save_gemma3(tmp_path, sliding_window=40), tokens)
    model = load(tmp_path, max_positions=40)
    assert [group.geometry.span for group in model.config.layer_groups(SINGLE_RANK)] == [None]
    found = PagedRunner(model).step({0: tokens})[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
