"""A two-model drafter that needs tokens on the host begins when all rounds were read; its rounds of
draft length 0 overlap."""

from pathlib import Path
from typing import Any

import pytest

from tests.executor.harness import Harness, ScriptedDrafter, all_pages_are_back, draft_target
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.executor.batch import ScheduledBatch

PROMPT = [3, 14, 15, 9, 26, 5, 35]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("draft"))


TWO_MODEL: dict[str, dict[str, Any]] = {
    "ngram": {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}},
    "user_provided": {
        "speculative_config": {
            "decoding_type": "User_Provided",
            "drafter": ScriptedDrafter(lambda request: [1, 2, 3][: request.num_drafts_wanted]),
            "max_draft_len": 3,
        }
    },
}


@pytest.mark.parametrize("mode", ["ngram", "user_provided", "draft_target"])
def test_such_a_drafter_sees_all_tokens_and_rounds_without_drafts_overlap(
    mode: str, tiny: Path, draft: Path
) -> None:
    harness = Harness(tiny, **(TWO_MODEL | {"draft_target": draft_target(draft, 3)})[mode])
    for place in range(3):
        harness.submit([place, *PROMPT], max_tokens=40)
    executor, drafter = harness.executor, harness.parts.drafter
    prepare, in_flight = drafter.prepare_draft_tokens, []

    def watched(batch: ScheduledBatch) -> None:
        if batch.draft_len:
            in_flight.append(len(executor._in_flight))
        prepare(batch)

    drafter.prepare_draft_tokens = watched  # type: ignore[method-assign] # a spy on this one object
    left = []
    for draft_len in [3, 3, 0, 0, 0, 3, 0, 3, 0, 0]:
        harness.parts.draft_len_for = lambda *_, draft_len=draft_len: draft_len
        harness.round()
        left.append(len(executor._in_flight))
    assert in_flight == [0] * 3, "the first round had contexts only"
    assert left == [1] * 10
    harness.run()
    assert all_pages_are_back(executor)


def test_disabling_overlap_also_disables_it_for_rounds_without_drafts(
    tiny: Path, draft: Path
) -> None:
    harness = Harness(tiny, **draft_target(draft, 3), disable_overlap_scheduler=True)
    harness.parts.draft_len_for = lambda *_: 0
    harness.submit(PROMPT, max_tokens=9)
    while harness.round():
        assert not harness.executor._in_flight
