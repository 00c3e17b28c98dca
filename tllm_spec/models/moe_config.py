"""The mixture of experts that a Hugging Face `config.json` describes."""

from dataclasses import dataclass
from typing import Any

from tllm_spec.kernels.experts.routing import RoutingRule, Scoring
from tllm_spec.models.config_file import required
from tllm_spec.models.gpt_oss_config import GPT_OSS
from tllm_spec.models.llama4_config import LLAMA4
from tllm_spec.models.qwen3_next_config import DELTA_WITH_EXPERTS

# The shape of a mixture-of-experts layer, and its tensors' names.


@dataclass(frozen=True)
class MoEConfig:
    """The shape of a layer, and how its router chooses."""

    hidden_size: int
    num_experts: int
    top_k: int
    intermediate_size: int
    """Width of one expert."""
    scoring: Scoring = "softmax"
    normalise_top_k: bool = False
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    """Groups of experts that a token may take experts from (`RoutingRule`)."""
    has_correction_bias: bool = False
    """DeepSeek V3: `e_score_correction_bias` is added to the scores for the choice."""
    shared_intermediate_size: int = 0
    """Width of the expert that every token takes; 0: there is none."""
    shared_gate: bool = False
    """Qwen2-MoE: the shared expert's output is multiplied by the sigmoid of one more output."""
    apply_weight_on_input: bool = False
    """Llama 4: an expert's weight multiplies its input instead of its output."""
    has_bias: bool = False
    """gpt-oss: the router and the experts have biases."""
    swiglu_limit: float | None = None
    """gpt-oss: the limit of its SwiGLU (kernels/experts/grouped_gemm.py)."""
    float32_router: bool = False
    """DeepSeek: a model in 16 bits computes its router's logits in float32."""
    fuses_shared: bool = True
    """Whether the shared expert may be computed as one more routed expert."""

    @property
    def num_shared(self) -> int:
        """1 if the shared expert is computed as one more routed expert, which every token takes
        with weight 1: it saves the launches of a layer of its own. Otherwise 0."""
        has_size = self.shared_intermediate_size == self.intermediate_size
        return int(has_size and not self.shared_gate and self.fuses_shared)

    @property
    def routing(self) -> RoutingRule:
        return RoutingRule(
            top_k=self.top_k,
            scoring=self.scoring,
            normalises=self.normalise_top_k,
            scale=self.routed_scaling_factor,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            num_shared=self.num_shared,
        )

    @property
    def row_elements(self) -> int:
        """Elements of the activations that a token has at a time in addition to hidden states: what
        its experts compute and put out, or the shared expert."""
        taken = self.routing.num_taken * (self.intermediate_size + self.hidden_size)
        return taken + (0 if self.num_shared else 3 * self.shared_intermediate_size)


@dataclass(frozen=True)
class MoENames:
    """The checkpoint's names below the layer's. With `fused`, all experts are one tensor of gates
    and ups `[E, H, 2 * I]` and one of downs `[E, I, H]`, as in Llama 4, or with `outputs_first`
    `[E, 2 * I, H]` and `[E, H, I]`, as in Qwen3.5, or as in Qwen3-VL either."""

    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"
    fused: bool = False
    outputs_first: bool = False


QWEN_NAMES = MoENames()
DEEPSEEK_NAMES = MoENames(shared="shared_experts")
MIXTRAL_NAMES = MoENames(gate="w1", up="w3", down="w2")
GPT_OSS_NAMES = MoENames(router="router")
QWEN3_5_NAMES = MoENames(fused=True, outputs_first=True)
LLAMA4_NAMES = MoENames(router="router", fused=True)


# The defaults of each architecture's configuration class in transformers.
MOE_DEFAULTS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "Qwen3MoeForCausalLM": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    # `flat_gpt_oss`, `flat_qwen3_next` and `flat_llama4` fill in what is missing.
    GPT_OSS: {},
    **{name: {} for name in DELTA_WITH_EXPERTS},
    LLAMA4: {},
}


def moe_config(architecture: str, raw: dict[str, Any]) -> MoEConfig | None:
    """None for a dense architecture. `raw` has the defaults filled in.

    Raises:
        ValueError: more experts per token than experts.
    """
    if architecture not in MOE_DEFAULTS:
        return None
    is_gpt_oss = architecture == GPT_OSS
    has_one_size = is_gpt_oss or architecture == "MixtralForCausalLM"
    size = raw["intermediate_size" if has_one_size else "moe_intermediate_size"]
    is_llama4 = architecture == LLAMA4
    has_gate = architecture in ("Qwen2MoeForCausalLM", *DELTA_WITH_EXPERTS)
    has_shared = is_llama4 or has_gate
    config = MoEConfig(
        hidden_size=int(raw["hidden_size"]),
        num_experts=_num_experts(raw),
        top_k=int(raw["num_experts_per_tok"]),
        intermediate_size=int(size),
        normalise_top_k=has_one_size or bool(raw.get("norm_topk_prob")),
        shared_intermediate_size=int(raw["shared_expert_intermediate_size"]) if has_shared else 0,
        shared_gate=has_gate,
        scoring="sigmoid" if is_llama4 else "softmax",
        apply_weight_on_input=is_llama4,
        has_bias=is_gpt_oss,
        swiglu_limit=float(raw["swiglu_limit"]) if is_gpt_oss else None,
    )
    if not 0 < config.top_k <= config.num_experts:
        raise ValueError(
            f"num_experts_per_tok is {config.top_k}; accepted is 1 to the number of experts, "
            f"{config.num_experts}."
        )
    return config


def sparse_layers(architecture: str, raw: dict[str, Any]) -> frozenset[int]:
    """The layers that have experts; the others have a dense MLP."""
    if architecture not in MOE_DEFAULTS:
        return frozenset()
    if "moe_layers" in raw:
        return frozenset(raw["moe_layers"])
    step = int(raw.get("decoder_sparse_step") or 1)
    dense = set(raw.get("mlp_only_layers") or ())
    return frozenset(
        layer
        for layer in range(int(raw["num_hidden_layers"]))
        if (layer + 1) % step == 0 and layer not in dense
    )


def _num_experts(raw: dict[str, Any]) -> int:
    """transformers 5 writes `num_local_experts` for every architecture."""
    return int(raw.get("num_local_experts") or required(raw, "num_experts"))
