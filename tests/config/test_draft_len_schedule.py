"""`draft_len_schedule`: lower and upper bounds, and schedules that are refused."""

import pytest

from tllm_spec.config.speculative_config import NGramDecodingConfig
from tllm_spec.executor.speculative.draft_length.adaptive import controller_for


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"draft_len_schedule": {1: 5}}, "draft length exceeds max_draft_len = 4"),
        ({"draft_len_schedule": {0: 1}}, "batch sizes start at 1"),
        ({"draft_len_schedule": {1: -1}}, "draft lengths at 0"),
        ({"draft_len_schedule": {}}, "no entry"),
        ({"draft_len_schedule": {1: 2}, "max_concurrency": 8}, r"\{1: 4, 9: 0\}"),
        ({"max_concurrency": 0}, "greater than 0"),
        ({"draft_len_schedule_keys": "lower_bound"}, "needs draft_len_schedule"),
        ({"draft_len_schedule_keys": "upper", "draft_len_schedule": {1: 2}}, "'upper_bound'"),
        ({"draft_len_schedule_keys": "upper_bound", "draft_len_schedule": {0: 2}}, "start at 1"),
        ({"draft_len_schedule_keys": "upper_bound", "draft_len_schedule": 3}, "a mapping is"),
        ({"draft_len_schedule_keys": "upper_bound", "draft_len_schedule": {4: 5}}, "exceeds max"),
    ],
)
def test_a_wrong_schedule_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        NGramDecodingConfig(max_draft_len=4, **options)


def test_a_schedule_with_two_readings_is_refused_with_both_of_them() -> None:
    with pytest.raises(ValueError) as refusal:
        NGramDecodingConfig(max_draft_len=4, draft_len_schedule={4: 4, 8: 2, 32: 1})
    assert (
        "draft_len_schedule_keys: lower_bound it means 4 drafts for 1-3 requests, 4 for 4-7, "
        "2 for 8-31, 1 for 32 and more"
    ) in str(refusal.value)
    assert (
        "upper_bound, as TensorRT-LLM's one-model path reads it, 4 drafts for 1-4 requests, "
        "2 for 5-8, 1 for 9-32, 0 for 33 and more"
    ) in str(refusal.value)


@pytest.mark.parametrize(
    ("keys", "given", "schedule"),
    [
        (None, {1: 4, 4: 2}, {1: 4, 4: 2}),
        ("lower_bound", {8: 2, 4: 4, 32: 1}, {4: 4, 8: 2, 32: 1}),
        ("upper_bound", {4: 4, 8: 2, 32: 1}, {1: 4, 5: 2, 9: 1, 33: 0}),
        ("upper_bound", {4: 2, 1: 4}, {1: 4, 2: 2, 5: 0}),
    ],
)
def test_the_keys_are_kept_as_lower_bounds(
    keys: str | None, given: dict[int, int], schedule: dict[int, int]
) -> None:
    config = NGramDecodingConfig(
        max_draft_len=4, draft_len_schedule=given, draft_len_schedule_keys=keys
    )
    assert config.draft_len_schedule == schedule
    assert config.draft_len_schedule_keys in (None, "lower_bound")


@pytest.mark.parametrize("keys", ["lower_bound", "upper_bound"])
def test_the_limit_of_each_batch_size_is_the_one_that_the_keys_ask_for(keys: str) -> None:
    schedule = {4: 3, 8: 2}
    controller = controller_for(
        NGramDecodingConfig(
            max_draft_len=4, draft_len_schedule=schedule, draft_len_schedule_keys=keys
        )
    )
    lengths = [controller.tier_for(batch_size) for batch_size in (1, 4, 5, 8, 9)]
    assert lengths == ([4, 3, 3, 2, 2] if keys == "lower_bound" else [3, 3, 2, 2, 0])
