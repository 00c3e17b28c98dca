"""The shape of an EAGLE-1 or EAGLE-2 draft head, read from its `config.json`.

A head is one or more Llama layers with a different input, so its configuration is a `ModelConfig`
with further fields. EAGLE-2 changed the drafting only, not the head."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tllm_spec.models.config import ModelConfig
from tllm_spec.models.config_file import read_config
from tllm_spec.models.eagle3_format import DECODER_KEYS, check_layers, unknown_keys

# `architectures` of a head -> the architecture whose attention and MLP its layers have.
_LAYERS = {
    "LlamaForCausalLM": "LlamaForCausalLM",
    "LlamaForCausalLMEagle": "LlamaForCausalLM",
    "EagleLlamaForCausalLM": "LlamaForCausalLM",
    "MistralForCausalLM": "MistralForCausalLM",
    "MistralForCausalLMEagle": "MistralForCausalLM",
    "Qwen2ForCausalLM": "Qwen2ForCausalLM",
    "Qwen2ForCausalLMEagle": "Qwen2ForCausalLM",
}
_READ = DECODER_KEYS | {"bias", "qkv_bias"}


@dataclass(frozen=True)
class EagleConfig(ModelConfig):
    """`vocab_size` is the target's: the head reads its tokens."""

    bias: bool | None
    """Whether `fc` has one; None: the checkpoint decides."""
    unknown_keys: tuple[str, ...] = field(compare=False)
    """Those of config.json, taken to change nothing."""

    @classmethod
    def from_pretrained(cls, path: Path) -> "EagleConfig":
        """Read `path/config.json`.

        Raises:
            ValueError: the file is missing or unreadable, or asks for something that is not served.
        """
        return cls.from_dict(read_config(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "EagleConfig":
        """The same, from the parsed file."""
        names = raw.get("architectures") or []
        if len(names) != 1 or names[0] not in _LAYERS:
            raise ValueError(
                f"architectures of the EAGLE-1/2 head is {names}; served is one of "
                f"{', '.join(_LAYERS)}."
            )
        unknown = unknown_keys(raw, _READ, {}, "EAGLE-1/2")
        own = raw | {"architectures": [_LAYERS[names[0]]]}
        shape = vars(ModelConfig.from_dict(own))
        if raw.get("qkv_bias") is not None:
            shape = shape | {"qkv_bias": bool(raw["qkv_bias"])}
        config = cls(**shape, bias=raw.get("bias"), unknown_keys=unknown)
        check_layers(config, "EAGLE-1/2")
        return config

    def check_target(self, target: ModelConfig) -> None:
        """Raises ValueError unless the head was trained for such a target."""
        for key in ("hidden_size", "vocab_size"):
            own, wanted = getattr(self, key), getattr(target, key)
            if own != wanted:
                raise ValueError(
                    f"{key} of the EAGLE-1/2 head is {own}, the target's is {wanted}; they must be "
                    "equal, since the head reads the target's embeddings and hidden states and "
                    "has its output layer."
                )
