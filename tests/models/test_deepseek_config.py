"""DeepSeek's published configurations, and what is refused."""

import math
from typing import Any

import pytest

from tests.models.published import FP8, V2_LITE, V3
from tllm_spec.attention.geometry import LatentGeometry
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.models.registry import model_config_of


def test_v2_lite_is_read_as_published() -> None:
    config = model_config_of(V2_LITE)
    moe, mla = config.moe, config.mla
    assert moe is not None and mla is not None and mla.q_lora_rank is None
    assert config.sparse_layers == frozenset(range(1, 27)) and config.num_nextn_layers == 0
    assert (moe.scoring, moe.top_k, moe.num_groups, moe.normalise_top_k) == ("softmax", 6, 1, False)
    assert moe.shared_intermediate_size == 2 * 1408 and not moe.has_correction_bias
    scale = 192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2
    assert config.layer_groups(SINGLE_RANK)[0].geometry == LatentGeometry(
        27, 16, 512, 64, 128, 128, pytest.approx(scale)
    )


def test_v3_is_read_as_published() -> None:
    config = model_config_of(V3)
    moe, mla = config.moe, config.mla
    assert moe is not None and mla is not None and mla.q_lora_rank == 1536 and mla.is_interleaved
    assert config.quantisation.fp8 is not None and config.num_nextn_layers == 1
    assert config.sparse_layers == frozenset(range(3, 61))
    assert (moe.scoring, moe.top_k, moe.num_groups, moe.top_groups) == ("sigmoid", 8, 8, 4)
    assert moe.normalise_top_k and moe.has_correction_bias and moe.routed_scaling_factor == 2.5


@pytest.mark.parametrize(
    ("base", "change", "problem"),
    [
        (V3, {"attention_bias": True}, "attention_bias is true"),
        (V3, {"topk_method": "lottery"}, "topk_method is 'lottery'"),
        (V3, {"scoring_func": "tanh"}, "scoring_func is 'tanh'"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is true with topk_method 'greedy'"),
        (V3, {"num_experts_per_tok": 300}, "num_experts_per_tok is 300.* 256"),
        (V2_LITE, {"num_experts_per_tok": None}, "num_experts_per_tok is 0"),
        (
            V3,
            {"quantization_config": FP8 | {"weight_block_size": [64, 64]}},
            "other quantized checkpoints are not served",
        ),
    ],
)
def test_what_is_not_served_is_named(
    base: dict[str, Any], change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        model_config_of(base | change)
