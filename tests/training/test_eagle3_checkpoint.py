"""Files of the zoo's EAGLE-3 head: the published format, and what cannot be trained is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.eagle3_entries import FOLDER
from tests.zoo.runs import read_json
from tllm_spec.models.registry import model_config
from tllm_spec.training.eagle3 import Eagle3Head
from tllm_spec.training.head_files import load_head, read_shape, save_head
from tllm_spec.zoo.registry import resolve_model

TARGET = model_config(resolve_model("zoo:llama"))


def test_the_checkpoint_has_the_published_format_and_loads_again(tmp_path: Path) -> None:
    """Names and shapes of published EAGLE-3 heads, in the size of the zoo's head."""
    shape = read_shape(FOLDER, TARGET)
    ids = torch.randperm(2048)[:1024].sort().values
    head = Eagle3Head(shape, ids)
    save_head(head, (FOLDER / "config.json").read_text(), tmp_path)
    assert (tmp_path / "config.json").read_bytes() == (FOLDER / "config.json").read_bytes()
    assert (tmp_path / "model.safetensors").stat().st_size < 3_000_000

    tensors = load_file(tmp_path / "model.safetensors")
    sizes = {name.removesuffix(".weight"): tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {
        "fc": (192, 576),
        "norm": (192,),
        "lm_head": (1024, 192),
        "d2t": (1024,),
        "t2d": (2048,),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        expected[f"midlayer.{name}"] = (192,)
    for name, size in {"q": (192, 384), "k": (64, 384), "v": (64, 384), "o": (192, 192)}.items():
        expected[f"midlayer.self_attn.{name}_proj"] = size
    for name, size in {"gate": (768, 192), "up": (768, 192), "down": (192, 768)}.items():
        expected[f"midlayer.mlp.{name}_proj"] = size
    assert sizes == expected
    assert all(name.endswith(".weight") for name in tensors.keys() - {"d2t", "t2d"})
    d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    assert torch.equal(torch.arange(1024) + d2t, ids) and torch.equal(t2d.nonzero().flatten(), ids)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}

    loaded = load_head(tmp_path, TARGET)
    assert torch.equal(loaded.draft_ids, ids)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, head.get_parameter(name).bfloat16().float()), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
        ({"attention_bias": True}, "qkv_bias"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type"),
        ({"hidden_size": 64}, "hidden_size"),
    ],
)
def test_a_head_that_the_zoo_cannot_train_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    config = {
        key: value
        for key, value in (read_json(FOLDER / "config.json") | change).items()
        if value is not None
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        read_shape(tmp_path, TARGET)
