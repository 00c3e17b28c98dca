"""The back-off on rejected drafts, through the engine."""

from typing import Any

import pytest

from tllm_spec import LLM, SamplingParams
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.speculative.drafting.drafter import Drafter


class NeverRight(Drafter):
    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        for request in scheduled_requests.generation_requests:
            request.py_draft_tokens = [0] * request.num_drafts_wanted


@pytest.mark.parametrize("adaptive", [None, {"candidate_steps": [4]}])
def test_useless_drafts_are_tried_in_few_rounds_and_the_text_is_the_plain_one(
    adaptive: dict[str, Any] | None,
) -> None:
    params, prompt = (
        SamplingParams(max_tokens=100, ignore_eos=True),
        "import os\n\n\ndef walk(top):\n",
    )
    options = {"max_batch_size": 2, "max_num_tokens": 512}
    with LLM("zoo:llama", **options) as plain:
        expected = plain.generate_async(prompt, params).result().outputs[0].token_ids
    config = {"decoding_type": "User_Provided", "max_draft_len": 4, "drafter": NeverRight()}
    config["adaptive"] = adaptive
    with LLM("zoo:llama", speculative_config=config, **options) as llm:
        output = llm.generate_async(prompt, params).result()
    assert output.outputs[0].token_ids == expected
    assert output.speculative_decoding is not None
    # 8 in a row, then one after each pause of 8, 16, 32 ... rounds.
    assert output.speculative_decoding.per_position_drafted[0] == 11
    assert output.speculative_decoding.rounds == 99
