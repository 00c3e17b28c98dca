"""Configuration: what is taken, what is refused, and what the refusal says."""

from pathlib import Path

import pytest

from tllm_spec.config import NOT_SERVED, KvCacheConfig, LlmArgs
from tllm_spec.speculative_config import (
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    UserProvidedDecodingConfig,
)


class FixedDrafter:
    """Stands for a user's drafter."""

    def __init__(self, token: int = 0) -> None:
        self.token = token


def ngram(**options: object) -> dict[str, object]:
    return {"decoding_type": "NGram", "max_draft_len": 4, **options}


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "options.yaml"


def test_plain_mappings_become_configuration_objects() -> None:
    args = LlmArgs.from_kwargs(
        "m", kv_cache_config={"max_tokens": 64}, speculative_config=ngram(is_keep_all=False)
    )
    assert args.kv_cache_config == KvCacheConfig(max_tokens=64)
    assert args.speculative_config == NGramDecodingConfig(max_draft_len=4, is_keep_all=False)


def test_defaults_are_those_of_tensorrt_llm() -> None:
    args = LlmArgs.from_kwargs("m")
    assert (args.max_batch_size, args.max_num_tokens, args.kv_cache_config.tokens_per_block) == (
        2048,
        8192,
        32,
    )
    assert args.kv_cache_config.free_gpu_memory_fraction == 0.9
    assert args.scheduler_config.capacity_scheduler_policy == "GUARANTEED_NO_EVICT"
    assert args.speculative_config is None
    assert not args.enable_chunked_prefill


def test_the_yaml_file_wins_over_keywords_key_by_key(yaml_file: Path) -> None:
    yaml_file.write_text("max_batch_size: 8\nkv_cache_config: {tokens_per_block: 16}\n")
    keywords = {"max_batch_size": 4, "max_seq_len": 99, "kv_cache_config": {"free_gpu_memory_fraction": 0.5}}
    args = LlmArgs.from_yaml(yaml_file, model="m", **keywords)
    assert (args.max_batch_size, args.max_seq_len) == (8, 99)
    assert args.kv_cache_config == KvCacheConfig(tokens_per_block=16, free_gpu_memory_fraction=0.5)


def test_arguments_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        LlmArgs.from_kwargs("m").max_batch_size = 3


def test_null_sizes_mean_the_default() -> None:
    assert LlmArgs.from_kwargs("m", max_batch_size=None, max_num_tokens=None) == LlmArgs.from_kwargs("m")


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_every_option_not_served_takes_its_off_values_and_refuses_others_with_the_reason(name: str) -> None:
    accepted, reason = NOT_SERVED[name]
    for off in accepted:
        LlmArgs.from_kwargs("m", **{name: off})
    with pytest.raises(ValueError) as refusal:
        LlmArgs.from_kwargs("m", **{name: "something else"})
    assert f"{name} = 'something else'" in str(refusal.value)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "sentences"),
    [
        ({"max_batch_sze": 3}, ["max_batch_sze = 3", "did you mean max_batch_size"]),
        ({"max_batch_size": 0}, ["max_batch_size = 0", "greater than 0"]),
        ({"max_batch_size": True}, ["max_batch_size = True", "integer"]),
        ({"dtype": "fp8"}, ["dtype = 'fp8'", "'bfloat16'"]),
        ({"device": "tpu"}, ["device = 'tpu'", "cuda"]),
        ({"tokenizer": 4}, ["tokenizer = 4"]),
        ({"tensor_parallel_size": True}, ["tensor_parallel_size = True", "accepted: 1"]),
        (
            {"kv_cache_config": {"tokens_per_block": 33}},
            ["kv_cache_config.tokens_per_block = 33", "power of two"],
        ),
        (
            {"kv_cache_config": {"max_toekns": 3}},
            ["kv_cache_config.max_toekns = 3", "did you mean max_tokens"],
        ),
        ({"kv_cache_config": {"dtype": "fp8"}}, ["kv_cache_config.dtype = 'fp8'", "accepted: 'auto'"]),
        (
            {"scheduler_config": {"waiting_queue_policy": "x"}},
            ["scheduler_config.waiting_queue_policy", "'fcfs'"],
        ),
        ({"speculative_config": {"decoding_type": "Eagle3"}}, ["decoding_type = 'Eagle3'", "not served yet"]),
        (
            {"speculative_config": {"decoding_type": "Egle"}},
            ["decoding_type = 'Egle'", "NGram, Draft_Target"],
        ),
        ({"speculative_config": {"max_draft_len": 4}}, ["decoding_type = None", "NGram"]),
        (
            {"speculative_config": {"decoding_type": "NGram"}},
            ["speculative_config.max_draft_len is required"],
        ),
        ({"speculative_config": ngram(max_draft_len=0)}, ["speculative_config.max_draft_len = 0"]),
        (
            {"speculative_config": ngram(), "max_num_tokens": 4},
            ["max_num_tokens = 4", "max_draft_len + 1 = 5"],
        ),
    ],
)
def test_a_mistake_is_named_with_its_key_value_and_what_is_accepted(
    options: dict[str, object], sentences: list[str]
) -> None:
    with pytest.raises(ValueError) as refusal:
        LlmArgs.from_kwargs("m", **options)
    for sentence in sentences:
        assert sentence in str(refusal.value)
    assert "pydantic" not in str(refusal.value)


def test_a_long_value_is_shown_by_its_beginning() -> None:
    with pytest.raises(ValueError, match="dtype") as refusal:
        LlmArgs.from_kwargs("m", dtype="x" * 100_000)
    assert len(str(refusal.value)) < 1000


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ValueError) as refusal:
        LlmArgs.from_kwargs("m", max_batch_size=0, kv_cache_config={"max_tokens": -1, "tokens_per_block": 3})
    assert len(str(refusal.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("a: [1", "cannot read"), ("- a\n- b\n", "must hold a mapping"), ("1: 2\n", "must hold a mapping")],
)
def test_an_unreadable_options_file_is_named(yaml_file: Path, text: str, sentence: str) -> None:
    yaml_file.write_text(text)
    with pytest.raises(ValueError, match=sentence) as refusal:
        LlmArgs.from_yaml(yaml_file, model="m")
    assert str(yaml_file) in str(refusal.value)


def test_a_missing_options_file_is_named(yaml_file: Path) -> None:
    with pytest.raises(ValueError, match=r"options\.yaml"):
        LlmArgs.from_yaml(yaml_file, model="m")


@pytest.mark.parametrize("spelling", ["Draft_Target", "DraftTarget"])
@pytest.mark.parametrize("folder", ["speculative_model", "speculative_model_dir"])
def test_both_spellings_of_draft_target_and_of_its_model_are_taken(spelling: str, folder: str) -> None:
    options = {"decoding_type": spelling, "max_draft_len": 3, folder: Path("some/draft")}
    args = LlmArgs.from_kwargs("m", speculative_config=options)
    assert args.speculative_config == DraftTargetDecodingConfig(
        max_draft_len=3, speculative_model="some/draft"
    )


def test_draft_target_needs_its_model() -> None:
    with pytest.raises(ValueError, match="speculative_model is required"):
        LlmArgs.from_kwargs("m", speculative_config={"decoding_type": "DraftTarget", "max_draft_len": 3})


@pytest.mark.parametrize(
    "option", [{"speculative_model": "d"}, {"use_rejection_sampling": True}, {"load_format": "auto"}]
)
def test_ngram_refuses_options_of_a_draft_model(option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        NGramDecodingConfig(max_draft_len=4, **option)


def test_an_ngram_pool_is_private_and_bounded_by_default() -> None:
    config = NGramDecodingConfig(max_draft_len=4)
    assert not config.is_public_pool
    assert config.max_pool_entries == 1_000_000


def test_greedy_drafts_contradict_rejection_sampling() -> None:
    with pytest.raises(ValueError, match="contradicts"):
        DraftTargetDecodingConfig(
            max_draft_len=4, speculative_model="d", use_rejection_sampling=True, draft_sampling="greedy"
        )


def test_the_schedule_entry_of_the_largest_key_not_above_the_batch_size_holds() -> None:
    config = NGramDecodingConfig(max_draft_len=6, draft_len_schedule={16: 0, 2: 4, 4: 6})
    assert [config.draft_len_for(size) for size in (1, 2, 3, 4, 15, 16, 500)] == [6, 4, 4, 6, 6, 0, 0]


def test_speculation_is_off_above_max_concurrency() -> None:
    config = NGramDecodingConfig(max_draft_len=3, max_concurrency=2)
    assert [config.draft_len_for(size) for size in (1, 2, 3)] == [3, 3, 0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"draft_len_schedule": {1: 5}}, "exceeds max_draft_len = 4"),
        ({"draft_len_schedule": {0: 1}}, "batch sizes start at 1"),
        ({"draft_len_schedule": {1: -1}}, "draft lengths at 0"),
        ({"draft_len_schedule": {}}, "no entry"),
        ({"draft_len_schedule": {1: 2}, "max_concurrency": 8}, r"\{1: 4, 9: 0\}"),
        ({"max_concurrency": 0}, "greater than 0"),
    ],
)
def test_a_contradictory_schedule_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        NGramDecodingConfig(max_draft_len=4, **options)


def test_a_user_drafter_is_an_object_or_is_made_from_its_import_path() -> None:
    drafter = FixedDrafter()
    assert UserProvidedDecodingConfig(max_draft_len=2, drafter=drafter).make_drafter() is drafter
    args = LlmArgs.from_kwargs(
        "m",
        speculative_config={
            "decoding_type": "User_Provided",
            "max_draft_len": 2,
            "drafter": "fractions:Fraction",
            "drafter_args": {"numerator": 3},
        },
    )
    assert isinstance(args.speculative_config, UserProvidedDecodingConfig)
    assert args.speculative_config.make_drafter() == 3
    assert args.speculative_config.make_resource_manager() is None


def test_an_import_path_that_leads_nowhere_is_named() -> None:
    for path in ("no_such_module:Drafter", "fractions:NoSuchClass"):
        with pytest.raises(ValueError, match=path):
            UserProvidedDecodingConfig(max_draft_len=2, drafter=path).make_drafter()
    with pytest.raises(ValueError, match=r"package\.module:ClassName"):
        UserProvidedDecodingConfig(max_draft_len=2, drafter="not a path")
    with pytest.raises(ValueError, match="drafter_args"):
        UserProvidedDecodingConfig(max_draft_len=2, drafter=FixedDrafter(), drafter_args={"token": 1})
