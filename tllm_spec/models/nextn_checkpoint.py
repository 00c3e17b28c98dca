"""Folders that have next-token-prediction modules and nothing else: SGLang exports the last layer
of a DeepSeek V3 so, as `model.layers.0`, with its copies of the target's weights left out."""

from pathlib import Path

from tllm_spec.models.config import ModelConfig
from tllm_spec.models.config_file import read_config
from tllm_spec.models.draft_kind import MODULES, is_exported

# What a module computes with.
SHAPE = (
    *("architecture", "vocab_size", "hidden_size", "num_heads", "intermediate_size"),
    *("rms_norm_eps", "rope", "mla", "moe"),
)


def exported_config(folder: Path, target: ModelConfig) -> ModelConfig:
    """The configuration of an exported folder; its layers are the modules.

    Raises:
        ValueError: the folder is not an exported one, or its modules are not for the target.
    """
    raw = read_config(folder)
    if not is_exported(raw):
        raise ValueError(
            f"speculative_config.speculative_model = {str(folder)!r} must be a folder of exported "
            f"MTP modules, whose architectures is ['{target.architecture}{MODULES}']; it is "
            f"{raw.get('architectures')}"
        )
    name = raw["architectures"][0].removesuffix(MODULES)
    own = ModelConfig.from_parsed(folder, raw | {"architectures": [name]})
    differing = [key for key in SHAPE if getattr(own, key) != getattr(target, key)]
    if differing:
        shown = "; ".join(
            f"{key}: {getattr(own, key)}, and {getattr(target, key)} of the target"
            for key in differing
        )
        raise ValueError(
            f"speculative_config.speculative_model = {str(folder)!r} is not for this target: "
            f"{shown}"
        )
    return own
