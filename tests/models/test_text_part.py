"""The text part of models that also see images: logits of transformers, every tensor accounted for,
quantised weights, and what is refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.fp8_checkpoint import keeping_fp8, keeping_int4
from tests.models.fp8_checkpoint import quantise as quantise_fp8
from tests.models.helpers import (
    MAX_POSITIONS,
    PagedRunner,
    check_same_logits,
    load,
    quantised_pair,
    random_tokens,
    reference_logits,
)
from tests.models.published import Raw
from tests.models.published_images import MISTRAL_SMALL_3_1, QWEN3_VL_30B, WITH_IMAGES
from tests.models.qwen3_next import save_with_images as save_qwen3_5_with_images
from tests.models.test_gemma3 import LAYOUTS
from tests.models.test_gemma3 import with_images as save_gemma3_with_images
from tests.models.test_llama4 import save_with_images as save_llama4_with_images
from tests.models.with_images import FAMILIES, save_with_images, write_otherwise
from tllm_spec.llm import LLM
from tllm_spec.models.registry import model_config_of
from tllm_spec.models.weights import weight_table
from tllm_spec.zoo.quantise import Style, is_projection
from tllm_spec.zoo.quantise import quantise as quantise_int4

TOKENS = random_tokens(MAX_POSITIONS, seed=3)


@pytest.mark.covering
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_both_layouts_of_the_checkpoint(
    family: str, is_tied: bool, tmp_path: Path
) -> None:
    model = save_with_images(tmp_path, family, is_tied=is_tied)
    expected = reference_logits(model, TOKENS)
    for write in (lambda: None, partial(write_otherwise, tmp_path, model)):
        write()
        runner = PagedRunner(load(tmp_path))
        found = [runner.step({0: TOKENS[:40]})[0], runner.step(windows={0: TOKENS[40:]})[0]]
        torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-4)


TEXT_PARTS: dict[str, Callable[[Path], Any]] = {
    **{
        f"Gemma 3, {name}": partial(save_gemma3_with_images, prefix=prefix, before=before)
        for name, (prefix, before) in LAYOUTS.items()
    },
    "Llama 4": save_llama4_with_images,
    "Qwen3.5": partial(save_qwen3_5_with_images, family="Qwen3_5"),
    "Qwen3.5 with experts": partial(save_qwen3_5_with_images, family="Qwen3_5Moe"),
}


@pytest.mark.parametrize("name", TEXT_PARTS)
def test_the_text_part_has_the_text_models_logits_and_is_served_on_request_only(
    name: str, tmp_path: Path
) -> None:
    expected = reference_logits(TEXT_PARTS[name](tmp_path), TOKENS)
    found = PagedRunner(load(tmp_path)).step({0: TOKENS})[0]
    # With experts the last gated delta net enlarges the rounding errors of the layers before it
    # several times. Against a float64 run of transformers, its own float32 logits are off by
    # 8.3e-5 (9.2e-5 by its recurrent rule) and ours by 3.6e-5, so both may differ by their sum.
    tolerance = 1.5e-4 if "experts" in name else 1e-4
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    with pytest.raises(ValueError, match="ForConditionalGeneration, which also sees images"):
        LLM(str(tmp_path), skip_tokenizer_init=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_that_is_neither_of_texts_nor_of_images_is_refused(
    family: str, tmp_path: Path
) -> None:
    save_with_images(tmp_path, family)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    [name] = [name for name in tensors if name.endswith("layers.1.input_layernorm.weight")]
    one = torch.ones(8)
    for kept, problem in (
        (tensors | {"model.audio.weight": one}, r"missing none; surplus model\.audio\.weight"),
        (
            {key: tensor for key, tensor in tensors.items() if key != name},
            r"missing model\.layers\.1\.input_layernorm\.weight; surplus none",
        ),
    ):
        save_file(kept, file)
        with pytest.raises(ValueError, match=problem):
            load(tmp_path)


# With blocks of 128, of which the last is short.
WIDE = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4, "head_dim": 32}
QUANTISE = {
    "fp8": partial(quantise_fp8, granularity="tensor"),
    "gptq": partial(quantise_int4, style=Style("gptq")),
    "nvfp4": partial(quantise_int4, style=Style("nvfp4")),
}


def save_wide(folder: Path, family: str) -> None:
    if family == "Gemma3":
        save_gemma3_with_images(folder, *LAYOUTS["as published"])
    else:
        save_with_images(folder, family, **WIDE)


@pytest.mark.parametrize("method", QUANTISE)
@pytest.mark.parametrize("family", ["Qwen3VL", "Mistral3", "Gemma3"])
@pytest.mark.thinned(3)
def test_quantised_weights_of_a_dense_text_model_stay_quantised(
    family: str, method: str, tmp_path: Path
) -> None:

    def wants(name: str) -> bool:
        return is_projection(name) and ".layers." in name and "visual" not in name

    change = partial(QUANTISE[method], wants=wants)
    paths = quantised_pair(tmp_path, partial(save_wide, family=family), change)
    with keeping_fp8(), keeping_int4():
        models = [load(path) for path in paths]
    check_same_logits(*models, tokens=TOKENS)
    slots = weight_table(models[0])
    assert {name for name in slots if slots[name].is_quantised} == set(filter(wants, slots))


def test_quantised_experts_of_one_tensor_are_refused() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(ValueError, match="Qwen3VLMoeForConditionalGeneration has quantised"):
        model_config_of(QWEN3_VL_30B | {"quantization_config": fp8})


def test_another_text_model_of_mistral_3_is_refused() -> None:
    text = MISTRAL_SMALL_3_1["text_config"] | {"model_type": "pixtral"}
    with pytest.raises(ValueError, match="text_config has the model_type 'pixtral'; served is"):
        model_config_of(MISTRAL_SMALL_3_1 | {"text_config": text})


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    raw = WITH_IMAGES[name]
    config = model_config_of(raw)
    settings: Raw = json.loads(json.dumps(raw))  # transformers adds keys to what it is given
    [architecture] = settings["architectures"]
    kind = architecture.removesuffix("ForConditionalGeneration")
    whole = getattr(transformers, f"{kind}Config")(**settings)
    theirs = whole.text_config
    assert (config.vocab_size, config.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (
        *(theirs.num_hidden_layers, theirs.num_attention_heads),
        theirs.num_key_value_heads,
    )
    assert config.intermediate_size == theirs.intermediate_size
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 128)
    assert config.rms_norm_eps == theirs.rms_norm_eps and config.sliding_window is None
    rope = theirs.rope_parameters
    assert (config.rope.kind, config.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    assert config.max_positions == theirs.max_position_embeddings
    assert config.eos_token_ids == (theirs.eos_token_id,) and config.dtype == torch.bfloat16
    # Mistral's published file does not say it, and its checkpoint has an output layer.
    assert config.tie_word_embeddings == raw.get("tie_word_embeddings", False)
    if config.moe is not None:
        assert (config.moe.num_experts, config.moe.top_k) == (128, 8)
        assert config.moe.normalise_top_k and len(config.sparse_layers) == 48


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_key_has_the_default_of_transformers(family: str) -> None:
    whose = {"Mistral3": "Mistral", "Mistral3, Ministral 3": "Ministral3"}
    whose["Mistral3, Mistral 4"] = "Mistral4"
    kind = whose.get(family, f"{family}Text")
    theirs = getattr(transformers, f"{kind}Config")()
    names = [f"{family.split(',')[0]}ForConditionalGeneration"]
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    text = {key: getattr(theirs, key) for key in (*sizes, "intermediate_size")}
    text |= {"model_type": theirs.model_type} if family in whose else {}
    whole = {"architectures": names, "tie_word_embeddings": False}
    found = model_config_of(whole | {"text_config": text})
    assert found == model_config_of(whole | {"text_config": theirs.to_dict()})
