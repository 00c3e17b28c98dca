"""The back-off on rejected drafts, round by round, and through the engine."""

from itertools import pairwise

from tllm_spec import LLM, SamplingParams
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.draft_pause import LONGEST_PAUSE, DraftPause
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.speculative.drafter import Drafter


def drafted_rounds(pause: DraftPause, accepted_at: set[int], num_rounds: int) -> list[int]:
    """The rounds in which drafts were made, when drafts are accepted only in the rounds `accepted_at`."""
    drafted = []
    for number in range(num_rounds):
        is_drafted = not pause.is_on
        drafted += [number] if is_drafted else []
        pause.observe(4 if is_drafted else 0, 1 if is_drafted and number in accepted_at else 0)
    return drafted


def test_pauses_double_while_every_draft_is_rejected() -> None:
    assert drafted_rounds(DraftPause(2), set(), 40) == [0, 1, 4, 9, 18, 35]


def test_no_pause_is_longer_than_the_limit() -> None:
    rounds = drafted_rounds(DraftPause(8), set(), 2000)
    assert max(after - before for before, after in pairwise(rounds)) == LONGEST_PAUSE + 1


def test_an_accepted_draft_ends_the_back_off() -> None:
    assert drafted_rounds(DraftPause(2), {4}, 12) == [0, 1, 4, 5, 6, 9]


def test_rounds_without_a_proposal_are_not_held_against_the_drafter() -> None:
    pause = DraftPause(1)
    pause.observe(0, 0)
    assert not pause.is_on


def test_without_patience_drafting_never_pauses() -> None:
    assert drafted_rounds(DraftPause(None), set(), 50) == list(range(50))


class NeverRight(Drafter):
    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        for request in scheduled_requests.generation_requests:
            request.py_draft_tokens = [0] * request.num_drafts_wanted


def test_useless_drafts_are_tried_in_few_rounds_and_the_text_is_the_plain_one() -> None:
    params, prompt = SamplingParams(max_tokens=100, ignore_eos=True), "import os\n\n\ndef walk(top):\n"
    options = {"max_batch_size": 2, "max_num_tokens": 512}
    with LLM("zoo:llama", **options) as plain:
        expected = plain.generate_async(prompt, params).result().outputs[0].token_ids
    config = {"decoding_type": "User_Provided", "max_draft_len": 4, "drafter": NeverRight()}
    with LLM("zoo:llama", speculative_config=config, **options) as llm:
        output = llm.generate_async(prompt, params).result()
    assert output.outputs[0].token_ids == expected
    assert output.speculative_decoding is not None
    # 8 in a row, then one after each pause of 8, 16, 32 ... rounds.
    assert output.speculative_decoding.per_position_drafted[0] == 11
    assert output.speculative_decoding.rounds == 99
