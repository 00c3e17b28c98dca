"""Random models that also see images, written by transformers."""

from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import save_file

from tests.models.deepseek import MISTRAL4
from tests.models.helpers import SIZES, randomise
from tests.models.test_families import SCALED

_TEXT = SIZES | {"bos_token_id": None, "eos_token_id": 1}
_ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [3, 3, 2]}
_QWEN3: dict[str, Any] = {"head_dim": 16, "rope_parameters": _ROPE | {"mrope_interleaved": True}}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_IMAGES = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
_QWEN_IMAGES = _IMAGES | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
_QWEN3_IMAGES = _QWEN_IMAGES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_PIXTRAL = _IMAGES | {"num_attention_heads": 2, "head_dim": 8, "num_hidden_layers": 1}
# By family: what is added to the text model's keys, and the keys of what sees images.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3VL": (_QWEN3, _QWEN3_IMAGES),
    "Qwen3VLMoe": (_QWEN3 | _EXPERTS | {"mlp_only_layers": [0]}, _QWEN3_IMAGES),
    "Qwen2_5_VL": ({"rope_parameters": _ROPE | {"rope_type": "mrope"}}, _QWEN_IMAGES),
    "Mistral3": (
        {"model_type": "mistral", "head_dim": 32, "rms_norm_eps": 1e-5, "sliding_window": None},
        _PIXTRAL | {"model_type": "pixtral", "image_size": 8},
    ),
    "Mistral3, Mistral 4": (
        {"model_type": "mistral4", **MISTRAL4},
        _PIXTRAL | {"model_type": "pixtral", "image_size": 8},
    ),
    "Mistral3, Ministral 3": (
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": SCALED},
        _PIXTRAL | {"model_type": "pixtral", "image_size": 8},
    ),
}


def save_with_images(folder: Path, family: str, *, is_tied: bool = False, **text: Any) -> Any:
    """Write a random model to `folder`; returns it. text: keys of the text model."""
    (of_text, of_images), name = FAMILIES[family], family.split(",")[0]
    settings = getattr(transformers, f"{name}Config")(
        text_config=_TEXT | of_text | text, vision_config=of_images, tie_word_embeddings=is_tied
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(settings).eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


def write_otherwise(folder: Path, model: Any) -> None:
    """Writes the model's checkpoint as other folders have it: with the names that transformers has
    in memory since version 5, and Qwen3-VL's experts with their inputs first, as published."""
    is_turned = type(model).__name__.startswith("Qwen3VL")
    tensors = {
        name: (tensor.transpose(1, 2) if is_turned and ".mlp.experts." in name else tensor)
        .clone()
        .contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
