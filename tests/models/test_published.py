"""Models with experts as they are published: their configurations are read, and give the logits of
transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.helpers import (
    PagedRunner,
    assert_close,
    load,
    random_tokens,
    reference_logits,
    save_checkpoint,
)
from tests.models.published import MAVERICK, PUBLISHED, SCOUT, V3, Raw, shrunk
from tests.models.test_llama4 import save_llama4
from tllm_spec.models.registry import model_config_of

# So long that every frequency of a rotary embedding matters.
TOKENS = random_tokens(200)
ALL_LAYERS = {"Qwen3-30B-A3B": 48, "Qwen2-57B-A14B": 28, "Mixtral-8x7B": 32, "Llama-4-Scout": 48}
SPARSE = ALL_LAYERS | {"DeepSeek-V2-Lite": 26, "DeepSeek-V2": 59, "DeepSeek-V3 and R1": 58}
SPARSE |= {"MiniMax-M2": 62}
SPARSE |= {"GLM-4.5-Air": 45, "GLM-4.5": 89, "Kimi-K2": 60, "Llama-4-Maverick": 24}


def saved(folder: Path, raw: Raw) -> Any:
    """A random checkpoint with `raw` as its configuration; returns transformers' model."""
    content = json.dumps(raw)
    settings = json.loads(content)  # transformers adds keys to what it is given
    if "text_config" in raw:
        text: Raw = settings["text_config"]
        # An integer in published files, which transformers 5 refuses.
        text["attn_temperature_tuning"] = bool(text["attn_temperature_tuning"])
        model = save_llama4(folder, **text)
    else:
        (name,) = settings.pop("architectures")
        settings.pop("model_type", None)
        model = save_checkpoint(folder, name.removesuffix("ForCausalLM"), **settings)
    (folder / "config.json").write_text(content)
    return model


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_with_the_published_fields_equal_transformers(name: str, tmp_path: Path) -> None:
    expected = reference_logits(saved(tmp_path, shrunk(PUBLISHED[name])), TOKENS)
    runner = PagedRunner(load(tmp_path, max_positions=len(TOKENS)))
    prefill = runner.step({0: TOKENS[:196]})[0]
    window = runner.step(windows={0: TOKENS[196:]})[0]
    assert_close(torch.cat((prefill, window)), expected)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_whole_published_config_is_read(name: str) -> None:
    raw = PUBLISHED[name]
    config, text = model_config_of(raw), raw.get("text_config", raw)
    ends = text["eos_token_id"]
    assert config.eos_token_ids == tuple(ends if isinstance(ends, list) else [ends])
    assert len(config.sparse_layers) == SPARSE[name] and config.sliding_window is None
    assert (config.quantisation.fp8 is not None) == ("quantization_config" in raw)
    assert config.num_nextn_layers == raw.get("num_nextn_predict_layers", 0)
    assert config.max_position_embeddings == text["max_position_embeddings"]


@pytest.mark.parametrize("raw", [V3, SCOUT, MAVERICK], ids=["DeepSeek", "Scout", "Maverick"])
def test_weights_compressed_in_other_ways_are_refused(raw: Raw) -> None:
    other = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    with pytest.raises(ValueError, match=r"format is 'int-quantized'.*are not served"):
        model_config_of(raw | {"quantization_config": other})
