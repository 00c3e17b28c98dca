"""`sa_config`: what it takes, what it does not, and why."""

from typing import Any

import pytest

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import (
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    MTPDecodingConfig,
    PARDDecodingConfig,
    SAEnhancerConfig,
)

EAGLE3 = {"decoding_type": "Eagle3", "speculative_model": "h", "max_draft_len": 3}
TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2}


def sa_config_of(**config: Any) -> Any:
    spec = LlmArgs(model="m", speculative_config=config).speculative_config
    served = Eagle3DecodingConfig, MTPDecodingConfig, DraftTargetDecodingConfig, PARDDecodingConfig
    assert isinstance(spec, served)
    return spec.sa_config


@pytest.mark.parametrize(
    "others",
    [
        EAGLE3,
        EAGLE3 | {"eagle3_one_model": False},
        EAGLE3 | TREE,
        {"decoding_type": "MTP"},
        EAGLE3 | {"decoding_type": "Draft_Target", "draft_target_one_model": True},
        EAGLE3 | {"decoding_type": "Draft_Target"},
        EAGLE3 | {"decoding_type": "PARD", "draft_target_one_model": False},
    ],
    ids=["eagle3", "eagle3_two_model", "eagle3_tree", "mtp", "one_model", "two_model", "pard"],
)
def test_it_is_a_mapping_or_an_object_whose_threshold_may_be_left_out(
    others: dict[str, Any],
) -> None:
    assert sa_config_of(**others) is None
    assert sa_config_of(**others, sa_config={}) == SAEnhancerConfig(threshold=None)
    given = {"threshold": 4, "enable_global_pool": False}
    assert sa_config_of(**others, sa_config=given) == SAEnhancerConfig(threshold=4)
    assert sa_config_of(**others, sa_config=SAEnhancerConfig(threshold=4)).threshold == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sa_config": {"threshold": 0}}, "sa_config.threshold = 0: .* greater than or equal to 1"),
        ({"sa_config": {"threshold": 65}}, "sa_config.threshold = 65: .* less than or equal to 64"),
        (
            {"sa_config": {"size": 3}},
            "sa_config.size = 3 is not a known option; known: .*threshold",
        ),
        ({"sa_config": {"global_pool_size": 8}}, "= 8 needs enable_global_pool: true"),
        ({"sa_config": 4}, "sa_config = 4: a mapping is needed"),
        ({"sa_config": {}, "use_rejection_sampling": True}, "have no probabilities"),
        (
            {"sa_config": {}, "decoding_type": "Draft_Target", "draft_backend": "onnxruntime"},
            "draft_backend = 'onnxruntime' is refused: .* sa_config needs all new ones",
        ),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        LlmArgs(model="m", speculative_config=EAGLE3 | options)


@pytest.mark.parametrize("decoding_type", ["NGram", "SA"])
def test_drafters_without_a_network_refuse_it(decoding_type: str) -> None:
    config = {"decoding_type": decoding_type, "max_draft_len": 3, "sa_config": {}}
    with pytest.raises(ValueError, match=r"sa_config = \{\} is an option of Draft_Target"):
        LlmArgs(model="m", speculative_config=config)
