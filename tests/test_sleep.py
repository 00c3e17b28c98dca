"""An engine sleeps: its weights and its KV cache give their memory back, requests wait, and after
waking texts and acceptance are those of before."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.test_draft_weights import copy_of
from tests.test_target_update import A, DRAFTERS, HEAD, PROMPT, SAMPLED, make_llm, text
from tllm_spec.llm import LLM


def told_of(llm: LLM) -> tuple[list[int], Any]:
    output = llm.generate(PROMPT, SAMPLED)
    return output.outputs[0].token_ids, output.speculative_decoding


@pytest.mark.thinned
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_and_acceptance_after_waking_are_those_of_before(name: str) -> None:
    with make_llm(spec=DRAFTERS[name]) as llm:
        expected, told = told_of(llm), []
        for _ in range(20 if name == "eagle3" else 2):
            told.append(llm.sleep())
            assert llm.is_sleeping
            waiting = llm.generate_async(PROMPT, SAMPLED)
            llm.wake_up(["weights"])
            assert llm.is_sleeping
            assert llm.wake_up()["host_bytes"] == 0 and not llm.is_sleeping
            output = waiting.result()
            assert (output.outputs[0].token_ids, output.speculative_decoding) == expected
        assert all(each == told[0] for each in told), "the memory is flat"
        weights = sum(each.nbytes for each in llm._executor.parts.runner.engine.model.parameters())
        assert told[0]["freed_bytes"] > told[0]["host_bytes"] >= weights
        llm.check_integrity()
