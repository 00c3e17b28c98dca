"""Configuration: what is taken, what is refused, and what the refusal says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tllm_spec.config import NOT_SERVED, CudaGraphConfig, KvCacheConfig, LlmArgs
from tllm_spec.option_checks import NotServed
from tllm_spec.speculative_config import (
    EAGLE3_NOT_SERVED,
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    NGramDecodingConfig,
    UserProvidedDecodingConfig,
)


class FixedDrafter:
    """Stands for a user's drafter."""

    def __init__(self, token: int = 0) -> None:
        self.token = token


def ngram(**options: object) -> dict[str, object]:
    return {"decoding_type": "NGram", "max_draft_len": 4, **options}


def eagle3(**options: object) -> dict[str, object]:
    return {
        "decoding_type": "Eagle3",
        "max_draft_len": 3,
        "speculative_model": "some/head",
        **options,
    }


def speculate(options: dict[str, object]) -> dict[str, Any]:
    return {"speculative_config": options}


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
    assert (args.max_batch_size, args.max_num_tokens) == (2048, 8192)
    assert args.kv_cache_config.tokens_per_block == 32
    assert args.kv_cache_config.free_gpu_memory_fraction == 0.9
    assert args.scheduler_config.capacity_scheduler_policy == "GUARANTEED_NO_EVICT"
    assert args.speculative_config is None
    assert not args.enable_chunked_prefill


def test_the_yaml_file_wins_over_keywords_key_by_key(yaml_file: Path) -> None:
    yaml_file.write_text("max_batch_size: 8\nkv_cache_config: {tokens_per_block: 16}\n")
    keywords = {
        "max_batch_size": 4,
        "max_seq_len": 99,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5},
    }
    args = LlmArgs.from_yaml(yaml_file, model="m", **keywords)
    assert (args.max_batch_size, args.max_seq_len) == (8, 99)
    assert args.kv_cache_config == KvCacheConfig(tokens_per_block=16, free_gpu_memory_fraction=0.5)


def test_arguments_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        LlmArgs.from_kwargs("m").max_batch_size = 3


def test_null_sizes_mean_the_default() -> None:
    assert LlmArgs.from_kwargs(
        "m", max_batch_size=None, max_num_tokens=None
    ) == LlmArgs.from_kwargs("m")


@pytest.mark.parametrize(
    ("table", "name"),
    [(table, name) for table in (NOT_SERVED, EAGLE3_NOT_SERVED) for name in sorted(table)],
    ids=lambda value: value if isinstance(value, str) else "eagle" * (value is EAGLE3_NOT_SERVED),
)
def test_every_option_not_served_takes_its_off_values_and_refuses_others_with_the_reason(
    table: Mapping[str, NotServed], name: str
) -> None:
    def give(value: object) -> LlmArgs:
        options = {name: value}
        return LlmArgs(
            model="m", **(options if table is NOT_SERVED else speculate(eagle3(**options)))
        )

    for off in table[name].accepted:
        give(off)
    with pytest.raises(ValueError) as refusal:
        give("mistral_large3")
    assert f"{name} = 'mistral_large3' is refused: {table[name].reason}" in str(refusal.value)


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
            ["kv_cache_config.max_toekns = 3", "did you mean max_tok"],
        ),
        (
            {"kv_cache_config": {"dtype": "fp8"}},
            ["kv_cache_config.dtype = 'fp8'", "accepted: 'auto'"],
        ),
        (
            {"scheduler_config": {"waiting_queue_policy": "x"}},
            ["scheduler_config.waiting_queue_policy", "'fcfs'"],
        ),
        ({"attn_backend": "TRTLLM"}, ["attn_backend = 'TRTLLM'", "'TRITON' or 'FLASHINFER'"]),
        (
            speculate({"decoding_type": "MTP"}),
            ["decoding_type = 'MTP'", "not served yet", "Eagle3"],
        ),
        (speculate({"decoding_type": "Egle"}), ["decoding_type = 'Egle'", "NGram, Draft_Target"]),
        (speculate({"max_draft_len": 4}), ["decoding_type = None", "NGram"]),
        (
            speculate({"decoding_type": "NGram"}),
            ["speculative_config.max_draft_len is required by NGram"],
        ),
        (
            speculate(ngram(max_draft_len=0)),
            ["speculative_config.max_draft_len = 0: NGram", "1 or more"],
        ),
        (
            speculate(ngram(max_draft_len=None)),
            ["max_draft_len = None: NGramDecodingConfig needs", "null"],
        ),
        ({"cuda_graph_config": {"batch_sizes": [1, 0]}}, ["batch_sizes.1 = 0", "greater than 0"]),
        (
            {"cuda_graph_config": {"batch_sizes": []}},
            ["cuda_graph_config.batch_sizes = []", "null"],
        ),
        (
            {"cuda_graph_config": {"batch_sizes": [1, 8], "max_batch_size": 4}},
            [
                "cuda_graph_config.max_batch_size = 4 contradicts batch_sizes = (1, 8)",
                "largest of them, 8",
            ],
        ),
        (
            {"cuda_graph_config": {"mode": "prefill"}},
            ["cuda_graph_config.mode = 'prefill'", "'decode'"],
        ),
        (
            speculate(ngram()) | {"max_num_tokens": 4},
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
        LlmArgs.from_kwargs(
            "m", max_batch_size=0, kv_cache_config={"max_tokens": -1, "tokens_per_block": 3}
        )
    assert len(str(refusal.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [1", "cannot read"),
        ("- a\n- b\n", "must hold a mapping"),
        ("1: 2\n", "must hold a mapping"),
    ],
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
def test_both_spellings_of_draft_target_and_of_its_model_are_taken(
    spelling: str, folder: str
) -> None:
    options = {"decoding_type": spelling, "max_draft_len": 3, folder: Path("some/draft")}
    args = LlmArgs.from_kwargs("m", speculative_config=options)
    expected = DraftTargetDecodingConfig(max_draft_len=3, speculative_model="some/draft")
    assert args.speculative_config == expected


@pytest.mark.parametrize("decoding_type", ["DraftTarget", "Eagle3"])
def test_a_decoding_type_with_draft_weights_needs_them(decoding_type: str) -> None:
    with pytest.raises(ValueError, match="speculative_model is required"):
        LlmArgs.from_kwargs("m", **speculate({"decoding_type": decoding_type, "max_draft_len": 3}))


@pytest.mark.parametrize(
    "option",
    [{"speculative_model": "d"}, {"use_rejection_sampling": True}, {"load_format": "auto"}],
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
            max_draft_len=4,
            speculative_model="d",
            use_rejection_sampling=True,
            draft_sampling="greedy",
        )


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
    by_path = {"drafter": "fractions:Fraction", "drafter_args": {"numerator": 3}}
    args = LlmArgs.from_kwargs("m", **speculate(ngram(decoding_type="User_Provided", **by_path)))
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
        UserProvidedDecodingConfig(
            max_draft_len=2, drafter=FixedDrafter(), drafter_args={"token": 1}
        )


def test_an_eagle3_configuration_is_read_from_yaml(yaml_file: Path) -> None:
    yaml_file.write_text(
        "speculative_config: {decoding_type: Eagle3, max_draft_len: 3, speculative_model_dir: "
        "some/head,\n"
        "  eagle3_one_model: false, eagle3_layers_to_capture: [5, 1, 5], draft_sampling: greedy}\n"
    )
    assert LlmArgs.from_yaml(yaml_file, model="m").speculative_config == Eagle3DecodingConfig(
        max_draft_len=3,
        speculative_model="some/head",
        eagle3_one_model=False,
        eagle3_layers_to_capture=(1, 5),
        draft_sampling="greedy",
    )


def test_eagle_is_served_as_eagle3_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    eagle3_args = LlmArgs(model="m", **speculate(eagle3()))
    assert not caplog.messages
    assert LlmArgs(model="m", **speculate(eagle3(decoding_type="Eagle"))) == eagle3_args
    assert caplog.messages == ["decoding_type = 'Eagle' is served as Eagle3"]


@pytest.mark.parametrize("layers", [[31, 2, 16, 31], (16, 31, 2), {31, 16, 2}])
def test_captured_layers_are_kept_in_ascending_order_and_once(layers: object) -> None:
    config = Eagle3DecodingConfig(
        max_draft_len=3, speculative_model="h", eagle3_layers_to_capture=layers
    )
    assert config.eagle3_layers_to_capture == (2, 16, 31)
    assert (
        Eagle3DecodingConfig(max_draft_len=3, speculative_model="h").eagle3_layers_to_capture
        is None
    )


DEVICE = "; synthetic acceptance is a benchmark device that changes the text"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("eagle3_layers_to_capture", [], "one or more layer ids"),
        ("eagle3_layers_to_capture", [2, -1], "counted from 0; the outputs of these layers"),
        ("eagle3_layers_to_capture", [True], "valid integer"),
        ("eagle3_layers_to_capture", "12", "'12'"),
        ("synthetic_acceptance_rates", {0.5, 0.4, 0.3}, "a list is needed"),
        ("synthetic_acceptance_rates", [0.5, 0.6, 0.1], f"only with all before it{DEVICE}"),
        ("synthetic_acceptance_rates", [1.1, 0.6, 0.1], f"0..1{DEVICE}"),
        ("synthetic_acceptance_rates", [0.5, 0.1, -0.1], f"0..1{DEVICE}"),
        ("synthetic_acceptance_rates", [float("nan")] * 3, f"0..1{DEVICE}"),
        ("synthetic_acceptance_rates", [0.5, 0.4], f"one probability for each draft{DEVICE}"),
        ("synthetic_acceptance_rates", [0.5] * 4, f"one probability for each draft{DEVICE}"),
    ],
)
def test_wrong_layers_and_rates_are_refused_with_their_key_and_the_reason(
    name: str, value: object, sentence: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        LlmArgs.from_kwargs("m", **speculate(eagle3(**{name: value})))
    assert name in str(refusal.value)
    assert sentence in str(refusal.value)


def test_synthetic_acceptance_excludes_rejection_sampling() -> None:
    options = eagle3(synthetic_acceptance_rates=[0.5, 0.4, 0.3], use_rejection_sampling=True)
    with pytest.raises(ValueError, match=f"use_rejection_sampling = True are exclusive.*{DEVICE}"):
        LlmArgs(model="m", **speculate(options))


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
    ("speculative_config", "why_not"),
    [
        (None, None),
        (eagle3(use_rejection_sampling=True), None),
        (eagle3(eagle3_one_model=False), None),
        (eagle3(decoding_type="Draft_Target", draft_target_one_model=True), None),
        (eagle3(decoding_type="Draft_Target"), "engine of its own"),
        (ngram(), "NGram drafts are made on the host from tokens"),
        (
            ngram(decoding_type="User_Provided", drafter=FixedDrafter()),
            "User_Provided drafts are made on",
        ),
    ],
)
def test_rounds_overlap_with_no_drafts_and_with_those_of_the_targets_own_forward(
    speculative_config: dict[str, object] | None, why_not: str | None
) -> None:
    args = LlmArgs.from_kwargs("m", speculative_config=speculative_config)
    assert (args.why_no_overlap is None) == (why_not is None)
    assert (why_not or "") in (args.why_no_overlap or "")
    if args.speculative_config is not None:
        assert args.speculative_config.overlaps == (why_not is None)
    args = LlmArgs(
        model="m", speculative_config=args.speculative_config, disable_overlap_scheduler=True
    )
    assert args.why_no_overlap == "disable_overlap_scheduler is set"


@pytest.mark.parametrize("decoding", [ngram(), eagle3(), eagle3(decoding_type="Draft_Target")])
def test_synthetic_acceptance_rates_are_taken_by_every_decoding_type(
    decoding: dict[str, object],
) -> None:
    decoding = {**decoding, "max_draft_len": 3, "synthetic_acceptance_rates": [1, 0.52, 0.52]}
    config = LlmArgs.from_kwargs("m", speculative_config=decoding).speculative_config
    assert config is not None and config.synthetic_acceptance_rates == (1.0, 0.52, 0.52)


STEPS_OF_8 = tuple(range(8, 129, 8))


@pytest.mark.parametrize(
    ("options", "limit", "sizes"),
    [
        ({}, 1, (1,)),
        ({}, 3, (1, 2, 3)),
        ({}, 20, (1, 2, 4, 8, 16, 20)),
        ({}, 2048, (1, 2, 4, *STEPS_OF_8)),
        ({"max_batch_size": 0}, 2048, (1, 2, 4, *STEPS_OF_8)),
        ({"max_batch_size": 7}, 2048, (1, 2, 4, 7)),
        ({"max_batch_size": 256}, 2048, (1, 2, 4, *STEPS_OF_8, 192, 256)),
        ({"max_batch_size": 300}, 2048, (1, 2, 4, *STEPS_OF_8, 192, 256, 300)),
        ({"max_batch_size": 300}, 200, (1, 2, 4, *STEPS_OF_8, 192, 200)),
        ({"enable_padding": False}, 2048, (*range(1, 32), 32, 64, 128)),
        ({"enable_padding": False}, 20, tuple(range(1, 21))),
        (
            {"enable_padding": False, "max_batch_size": 600},
            999,
            (*range(1, 33), 64, 128, 256, 512, 600),
        ),
        (
            {"enable_padding": False, "max_batch_size": 512},
            2048,
            (*range(1, 32), 32, 64, 128, 256, 512),
        ),
        ({"batch_sizes": [9, 3, 9]}, 2048, (3, 9)),
        ({"batch_sizes": [3, 9], "max_batch_size": 9}, 2048, (3, 9)),
        ({"batch_sizes": [3, 9, 30, 40]}, 20, (3, 9, 20)),
        ({"batch_sizes": [30]}, 20, (20,)),
    ],
)
def test_captured_batch_sizes_ascend_to_the_largest_that_can_occur(
    options: dict[str, object], limit: int, sizes: tuple[int, ...]
) -> None:
    assert CudaGraphConfig(**options).sizes(limit) == sizes


def test_further_batch_sizes_are_captured_up_to_the_largest() -> None:
    schedule = {1: 3, 6: 2, 8: 1, 21: 0}
    assert CudaGraphConfig().sizes(20, also=schedule) == (1, 2, 4, 6, 8, 16, 20)
    assert CudaGraphConfig(batch_sizes=[4]).sizes(20, also=schedule) == (1, 4)


def test_cuda_graphs_with_padding_are_on_unless_null_turns_them_off(yaml_file: Path) -> None:
    assert LlmArgs.from_kwargs("m").cuda_graph_config == CudaGraphConfig(enable_padding=True)
    yaml_file.write_text("cuda_graph_config: null\n")
    assert LlmArgs.from_yaml(yaml_file, model="m").cuda_graph_config is None
    yaml_file.write_text(
        "cuda_graph_config: {enable_padding: false, batch_sizes: [2, 1], mode: decode}\n"
    )
    expected = CudaGraphConfig(enable_padding=False, batch_sizes=(1, 2))
    assert LlmArgs.from_yaml(yaml_file, model="m").cuda_graph_config == expected
