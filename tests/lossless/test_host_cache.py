"""A prefix that comes back from host memory gives the text that it gives on the device, and that of
an engine without prefix reuse."""

from typing import Any

import pytest

from tests.lossless.engines import MODES, engine
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

QUICK = ("eagle3_tree",)
OTHERS = [[number] * 100 for number in range(20, 32)]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, seed=5, temperature=temperature)
    for temperature in (0.0, 0.9)
]


def ask(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """The tokens of each prompt, with and without sampling, and the tokens that were cached."""
    found = []
    for params in PARAMS:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert isinstance(outputs, list) and not any(output.error for output in outputs)
        found += [(output.outputs[0].token_ids, output.cached_tokens) for output in outputs]
    return found


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=[] if mode in QUICK else [pytest.mark.slow]) for mode in MODES],
)
def test_a_hit_in_host_memory_gives_the_text_of_a_hit_on_the_device(mode: str) -> None:
    options: dict[str, Any] = engine(mode, 3) | {"max_batch_size": 4, "max_seq_len": 256}
    prompts = [[3 + number, *range(40, 129)] for number in range(3)]
    cache = {"tokens_per_block": 16, "max_tokens": 1200}
    with LLM("zoo:llama", kv_cache_config={"enable_block_reuse": False}, **options) as llm:
        expected = [tokens for tokens, _ in ask(llm, prompts)]
    with LLM("zoo:llama", kv_cache_config=cache | {"host_cache_size": 1 << 28}, **options) as llm:
        ask(llm, prompts)
        on_device = ask(llm, prompts)
        host = llm._executor.parts.kv.cache.state()["host"]
        assert host["loaded"] == 0
        llm.generate(OTHERS, PARAMS[0], use_tqdm=False)
        assert llm._executor.parts.kv.cache.match([*prompts[0], 1]) == 0, "it is still there"
        in_host = ask(llm, prompts)
        host = llm._executor.parts.kv.cache.state()["host"]
        assert host["loaded"] >= 5 * len(prompts)
        llm.check_integrity()
    assert [tokens for tokens, _ in on_device] == [tokens for tokens, _ in in_host] == expected
    assert all(cached == 80 for _, cached in on_device + in_host)
