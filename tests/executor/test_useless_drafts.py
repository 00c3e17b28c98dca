"""The back-off on rejected drafts, and the warning about them, through the engine."""

from typing import Any

import pytest

from tests.lossless.engines import engine
from tllm_spec import LLM, SamplingParams
from tllm_spec.bench.break_even import FreeDrafts
from tllm_spec.executor import totals as draft_watch


@pytest.mark.thinned
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
    config = {"decoding_type": "User_Provided", "max_draft_len": 4, "drafter": FreeDrafts()}
    config["adaptive"] = adaptive
    with LLM("zoo:llama", speculative_config=config, **options) as llm:
        output = llm.generate_async(prompt, params).result()
    assert output.outputs[0].token_ids == expected
    assert output.speculative_decoding is not None
    # 8 in a row, then one after each pause of 8, 16, 32 ... rounds.
    assert output.speculative_decoding.per_position_drafted[0] == 11
    assert output.speculative_decoding.rounds == 99


def warnings_of(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about useless drafts; `/server_info` shows the same."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    with LLM("zoo:llama", max_num_tokens=512, **options) as llm:
        for _ in range(2):
            llm.generate("import os\n\n\ndef walk(top):\n", params, use_tqdm=False)
        (state,) = llm.server_info()["internal_states"]
    found = [text for text in caplog.messages if "drafts were accepted" in text]
    assert found == ([state["draft_warning"]] if state["draft_warning"] else [])
    return found


def test_drafts_that_are_never_accepted_are_mentioned_once_with_likely_causes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_watch, "MIN_DRAFTS", 50)
    config = {"decoding_type": "User_Provided", "max_draft_len": 4, "drafter": FreeDrafts()}
    (useless,) = warnings_of({"speculative_config": config | {"max_rejected_rounds": None}}, caplog)
    assert useless.startswith("0 of 52 drafts were accepted") and "request.tokens" in useless
    caplog.clear()
    random = engine("eagle3", 4, load_format="dummy")
    (useless,) = warnings_of(random, caplog)
    assert "load_format dummy" in useless
    caplog.clear()
    assert not warnings_of(engine("eagle3", 4), caplog)
