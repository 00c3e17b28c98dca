"""TensorRT-LLM's options that have no effect here: their off values are taken, others refused."""

from collections.abc import Mapping

import pytest

from tests.decoding_options import eagle3, mtp, speculate
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.not_served import KV_CACHE_NOT_SERVED, LLM_NOT_SERVED
from tllm_spec.config.option_checks import NotServed
from tllm_spec.config.speculative_config import EAGLE_NOT_SERVED, MTP_NOT_SERVED

TABLES = {
    "": LLM_NOT_SERVED,
    "kv": KV_CACHE_NOT_SERVED,
    "eagle": EAGLE_NOT_SERVED,
    "mtp": MTP_NOT_SERVED,
}


@pytest.mark.parametrize(
    ("table", "name"),
    [
        pytest.param(table, name, id=f"{kind}-{name}")
        for kind, table in TABLES.items()
        for name in sorted(table)
    ],
)
def test_every_option_not_served_takes_its_off_values_and_refuses_others_with_the_reason(
    table: Mapping[str, NotServed], name: str
) -> None:
    def give(value: object) -> LlmArgs:
        options = {name: value}
        if table is LLM_NOT_SERVED:
            return LlmArgs(model="m", **options)
        if table is KV_CACHE_NOT_SERVED:
            return LlmArgs(model="m", kv_cache_config=options)
        speculative = eagle3 if table is EAGLE_NOT_SERVED else mtp
        return LlmArgs(model="m", **speculate(speculative(**options)))

    for off in table[name].accepted:
        give(off)
    with pytest.raises(ValueError) as refusal:
        give("mistral_large3")
    assert f"{name} = 'mistral_large3' is refused: {table[name].reason}" in str(refusal.value)


def test_options_that_change_nothing_may_be_spelled_out() -> None:
    off = dict.fromkeys(["eagle_choices", "num_eagle_layers", "posterior_threshold", "sa_config"])
    off |= dict.fromkeys(["dynamic_tree_max_topK", "max_non_leaves_per_layer"])
    options = eagle3(
        **off, use_dynamic_tree=False, greedy_sampling=True, eagle3_model_arch="llama3"
    )
    for in_graph in (True, False):
        args = LlmArgs(model="m", enable_in_graph_sampling=in_graph, **speculate(options))
        assert args == LlmArgs(model="m", **speculate(eagle3()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quant_config", {"quant_algo": "FP8"}),
        ("calib_config", {}),
        ("force_dynamic_quantization", True),
    ],
)
def test_who_asks_for_quantised_weights_learns_how_fp8_is_served(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"in FP8 or 4 bits is served as it is"):
        LlmArgs.from_kwargs("zoo:llama", **{name: value})
