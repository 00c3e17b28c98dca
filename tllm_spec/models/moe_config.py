"""The shape of a mixture-of-experts layer, its tensors' names, and the keys of a Hugging Face
`config.json` that most families with experts have."""

from dataclasses import dataclass
from typing import Any

from tllm_spec.kernels.experts.routing import RoutingRule, Scoring
from tllm_spec.kernels.gemm.norms import Activation
from tllm_spec.models.config_file import required


@dataclass(frozen=True)
class MoENames:
    """The checkpoint's names of a layer and below it. All experts may also be in one tensor of
    gates and ups `[E, 2 * I, H]`, and one of downs `[E, H, I]`."""

    layer: str = "mlp"
    """The name of the layer itself."""
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"
    has_bias_beside: bool = False
    """MiniMax M2: the correction bias is next to the router instead of below it."""
    inputs_first: bool | None = False
    """Llama 4: such tensors are `[E, H, 2 * I]` and `[E, I, H]`. None, for Qwen3-VL: as published,
    or as transformers has them in memory."""


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
    activation: Activation = "silu"
    """What the gates have without a limit."""
    float32_router: bool = False
    """DeepSeek: a model in 16 bits computes its router's logits in float32."""
    names: MoENames = MoENames()
    fuses_shared: bool = True
    """Whether the shared expert may be computed as one more routed expert."""

    @property
    def num_shared(self) -> int:
        """1 if the shared expert is computed as one more routed expert, which every token takes:
        it saves the launches of a layer of its own. Otherwise 0."""
        has_size = self.shared_intermediate_size == self.intermediate_size
        return int(has_size and self.fuses_shared)

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
            gates_shared=self.shared_gate and self.num_shared > 0,
        )

    @property
    def row_elements(self) -> int:
        """Elements of the activations that a token has at a time in addition to hidden states: what
        its experts compute and put out, or the shared expert."""
        taken = self.routing.num_taken * (self.intermediate_size + self.hidden_size)
        return taken + (0 if self.num_shared else 3 * self.shared_intermediate_size)


def moe_config(raw: dict[str, Any]) -> MoEConfig:
    """`raw` has the defaults filled in. transformers 5 writes `num_local_experts` for every
    architecture. Raises ValueError for more experts per token than experts."""
    config = MoEConfig(
        hidden_size=int(raw["hidden_size"]),
        num_experts=int(raw.get("num_local_experts") or required(raw, "num_experts")),
        top_k=int(raw.get("num_experts_per_tok") or 0),
        intermediate_size=int(raw["moe_intermediate_size"]),
        normalise_top_k=bool(raw.get("norm_topk_prob")),
    )
    if not 0 < config.top_k <= config.num_experts:
        raise ValueError(
            f"num_experts_per_tok is {config.top_k}; accepted is 1 to the number of experts, "
            f"{config.num_experts}."
        )
    return config


def sparse_layers(raw: dict[str, Any]) -> frozenset[int]:
    """The layers that have experts; the others have a dense MLP."""
    step = int(raw.get("decoder_sparse_step") or 1)
    dense = set(raw.get("mlp_only_layers") or ())
    return frozenset(
        layer
        for layer in range(int(raw["num_hidden_layers"]))
        if (layer + 1) % step == 0 and layer not in dense
    )
