"""Models that also see images, of which the text part is served: its architecture, its keys of
`config.json`, and which tensors of the checkpoint are those of images."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tllm_spec.models.config_file import with_defaults
from tllm_spec.models.moe_shape import QWEN3_5_NAMES, QWEN_NAMES, MoENames


@dataclass(frozen=True)
class TextPart:
    """The part of a model that is served: all of it, or of one that sees images the text model."""

    architecture: str
    """The name of the same text model without images."""
    images: tuple[str, ...] = ()
    """Prefixes of the names of images' tensors, after `model.` in some folders. Empty: the model
    sees no images."""
    expert_names: MoENames = QWEN_NAMES
    """The names of experts, where those of the architecture without images have `QWEN_NAMES`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that have other defaults than without images."""
    text_type: str | None = None
    """`model_type` of the text model, where it may be another one; None: it may not."""

    def keys(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a config.json that describe the text model, at the top, under the name of the
        architecture without images. Raises ValueError for another text model."""
        text = raw.get("text_config") or {}
        if self.text_type not in (None, found := text.get("model_type", self.text_type)):
            raise ValueError(
                f"text_config has the model_type {found!r}; served is {self.text_type!r}."
            )
        flat = {**raw, **text}
        if raw.get("tie_word_embeddings") is not None:  # the output layer is the whole model's
            flat["tie_word_embeddings"] = raw["tie_word_embeddings"]
        return with_defaults(flat, self.defaults) | {"architectures": [self.architecture]}

    def parameter_name(self, name: str) -> str:
        """The name without images of the checkpoint's tensor `name`. With images its layers are in
        `model.language_model.`, in older folders in `language_model.model.` or `model.`."""
        if not self.images:
            return name
        if name.startswith("model.language_model."):
            return name.replace("language_model.", "", 1)
        return name.removeprefix("language_model.")

    def is_of_images(self, name: str) -> bool:
        """Whether the checkpoint's tensor `name` is not the text model's."""
        return name.removeprefix("model.").startswith(self.images)


_PROJECTOR = "multi_modal_projector."
_QWEN3_VL: dict[str, Any] = {"max_position_embeddings": 128000, "rope_theta": 5e5}
_WITH_IMAGES: dict[str, TextPart] = {
    "Llama4ForConditionalGeneration": TextPart("Llama4ForCausalLM", ("vision_model.", _PROJECTOR)),
    "Gemma3ForConditionalGeneration": TextPart("Gemma3ForCausalLM", ("vision_tower.", _PROJECTOR)),
    "Qwen3_5ForConditionalGeneration": TextPart("Qwen3_5ForCausalLM", ("visual.",)),
    # Without images transformers writes the experts one by one.
    "Qwen3_5MoeForConditionalGeneration": TextPart(
        "Qwen3_5MoeForCausalLM", ("visual.",), QWEN3_5_NAMES
    ),
    "Qwen3VLForConditionalGeneration": TextPart(
        "Qwen3ForCausalLM", ("visual.",), defaults=_QWEN3_VL
    ),
    "Qwen3VLMoeForConditionalGeneration": TextPart(
        "Qwen3MoeForCausalLM",
        ("visual.",),
        QWEN3_5_NAMES,
        _QWEN3_VL
        | {
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": TextPart(
        "Qwen2ForCausalLM",
        ("visual.",),
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "eos_token_id": 151645,
        },
    ),
    "Mistral3ForConditionalGeneration": TextPart(
        "MistralForCausalLM", ("vision_tower.", _PROJECTOR), text_type="mistral"
    ),
}
WITH_IMAGES = tuple(_WITH_IMAGES)


def text_part_of(architecture: str) -> TextPart:
    """The served part of a model with this name in `architectures` of config.json."""
    return _WITH_IMAGES.get(architecture) or TextPart(architecture)
