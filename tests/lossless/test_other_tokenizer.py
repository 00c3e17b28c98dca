"""A draft model with another tokenizer has nearly the acceptance of one with the target's."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lossless.cases import heldout_prompts
from tests.lossless.conftest import OTHER_TOKENIZER
from tests.lossless.engines import DRAFT_MODEL
from tllm_spec.llm import LLM
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import Tokenizer


def acceptance_length(model: str, prompts: list[list[int]], **options: Any) -> float:
    """The acceptance length of greedy and sampled requests together."""
    spec = {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model": model}
    params = [
        SamplingParams(max_tokens=64, ignore_eos=True, seed=i, temperature=0.8 * (i % 2))
        for i in range(len(prompts))
    ]
    with LLM("zoo:llama", max_batch_size=8, speculative_config=spec | options) as llm:
        found = [each.speculative_decoding for each in llm.generate(prompts, params)]
        llm.check_integrity()
    total = sum((each for each in found if each is not None), SpeculativeStats())
    return total.acceptance_length


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"draft_target_one_model": True}, marks=pytest.mark.slow)]
)
def test_acceptance_is_close_to_that_of_the_targets_tokenizer(
    options: dict[str, Any],
    fitted_file: Callable[[str], Path],
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = heldout_prompts(tokenizer, 8, 60)
    expected = acceptance_length(DRAFT_MODEL, prompts, **options)
    with caplog.at_level(logging.WARNING):
        found = acceptance_length(str(fitted_file(OTHER_TOKENIZER)), prompts, **options)
    assert "the draft model's tokenizer is not the target's: " in caplog.text
    assert 1.3 < 0.85 * expected < found < expected
