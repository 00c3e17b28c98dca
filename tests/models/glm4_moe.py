"""Random checkpoints of GLM-4.5, with layers that predict further tokens."""

from pathlib import Path
from typing import Any

from tests.models.helpers import save_checkpoint

SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
}


def save_glm4_moe(folder: Path, **config: Any) -> Any:
    """Write a random model to `folder`; returns it."""
    return save_checkpoint(folder, "Glm4Moe", **(SIZES | config))
