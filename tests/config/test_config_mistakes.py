"""Mistakes in configurations: each is refused with its key, its value and what is accepted."""

from typing import Any

import pytest

from tests.decoding_options import ngram, speculate
from tllm_spec.config.llm_args import LlmArgs


@pytest.mark.parametrize(
    ("options", "sentences"),
    [
        ({"max_batch_sze": 3}, ["max_batch_sze = 3", "did you mean max_batch_size"]),
        ({"self": 1}, ["self = 1 is not a known option"]),
        ({"kv_cache_config": {"self": 1}}, ["kv_cache_config.self = 1 is not a known option"]),
        ({"max_batch_size": 0}, ["max_batch_size = 0", "greater than 0"]),
        ({"max_batch_size": True}, ["max_batch_size = True", "integer"]),
        ({"max_batch_size": 99999999999}, ["max_batch_size = 99999999999", "65536"]),
        ({"max_num_tokens": 99999999999}, ["max_num_tokens = 99999999999", "1048576"]),
        ({"max_seq_len": 1}, ["max_seq_len = 1", "greater than or equal to 2"]),
        ({"dtype": "fp8"}, ["dtype = 'fp8'", "'bfloat16'"]),
        ({"device": "tpu"}, ["device = 'tpu': 'auto', 'cpu', 'cuda' or 'cuda:N' is needed"]),
        (
            ngram(max_draft_len=3),
            [
                "decoding_type = 'NGram' is not a known option here; it is one of "
                "speculative_config",
                "max_draft_len = 3 is not a known option here; it is one of speculative_config",
            ],
        ),
        (
            {"tokens_per_block": 64, "eagle_choices": [[0]]},
            [
                "tokens_per_block = 64 is not a known option here; it is one of kv_cache_config",
                "eagle_choices = [[0]] is not a known option here; it is one of speculative_config",
            ],
        ),
        ({"device": 0}, ["device = 0: 'auto', 'cpu', 'cuda' or 'cuda:N' is needed"]),
        ({"tokenizer": 4}, ["tokenizer = 4"]),
        ({"kv_cache_config": 5}, ["kv_cache_config = 5: a mapping is needed"]),
        (speculate(5), ["speculative_config = 5: a mapping is needed"]),
        (
            speculate(ngram(draft_len_schedule=5)),
            ["speculative_config.draft_len_schedule = 5: a mapping is needed"],
        ),
        (
            {"pipeline_parallel_size": True},
            ["pipeline_parallel_size = True", "accepted: None or 1"],
        ),
        (
            {"kv_cache_config": {"tokens_per_block": 33}},
            ["kv_cache_config.tokens_per_block = 33", "power of two"],
        ),
        (
            {"kv_cache_config": {"max_toekns": 3}},
            ["kv_cache_config.max_toekns = 3", "did you mean max_tok"],
        ),
        (
            {"kv_cache_config": {"dtype": "bfloat16"}},
            ["kv_cache_config.dtype = 'bfloat16'", "'auto', 'fp8' or 'model'"],
        ),
        (
            {"scheduler_config": {"waiting_queue_policy": "x"}},
            ["scheduler_config.waiting_queue_policy", "'fcfs'"],
        ),
        ({"attn_backend": "XFORMERS"}, ["attn_backend = 'XFORMERS'", "'TRITON' or 'FLASHINFER'"]),
        (
            speculate({"decoding_type": "Medusa"}),
            ["decoding_type = 'Medusa'", "not served yet", "Eagle3"],
        ),
        (speculate({"method": "suffix"}), ["decoding_type = 'suffix' is not served yet"]),
        (
            speculate({"decoding_type": "eagel3"}),
            ["decoding_type = 'eagel3' is not a known type, did you mean Eagle3?; accepted: NGram"],
        ),
        (speculate({"decoding_type": "Egle"}), ["decoding_type = 'Egle'", "NGram, Draft_Target"]),
        (
            speculate({"max_draft_len": 4}),
            ["speculative_config.decoding_type is required; accepted: NGram, Draft_Target"],
        ),
        (
            speculate(ngram(eagle3_one_model=True, max_draft_len=0)),
            [
                "speculative_config.eagle3_one_model = True is an option of Eagle3 and Eagle, not "
                "of NGram",
                "max_draft_len = 0",
            ],
        ),
        (
            speculate({"decoding_type": "MTP", "max_draft_len": 1, "is_keep_all": True}),
            ["speculative_config.is_keep_all = True is an option of NGram, not of MTP"],
        ),
        (
            speculate({"decoding_type": "NGram"}),
            ["speculative_config.max_draft_len is required by NGram"],
        ),
        (
            speculate(ngram(max_draft_len=0)),
            ["speculative_config.max_draft_len = 0: NGram", "from 1 to 65536"],
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


def test_the_known_options_are_listed_once() -> None:
    with pytest.raises(ValueError) as refusal:
        LlmArgs.from_kwargs("m", zzz=1, qqq=2, speculative_config={"zzz": 3, "qqq": 4})
    lines = str(refusal.value).splitlines()
    assert [line.partition(" = ")[0] for line in lines if " = " in line] == [
        *("speculative_config.zzz", "speculative_config.qqq", "zzz", "qqq")
    ]
    assert ["; known: " in line for line in lines] == [False, True, False, True, False]


@pytest.mark.parametrize("kind", [{}, {"decoding_type": "Egle"}])
def test_wrong_keys_are_named_with_a_wrong_or_missing_decoding_type(kind: dict[str, str]) -> None:
    options = {"methods": "eagle3", "max_draft_len": 3, "max_draft_len_x": 4, **kind}
    with pytest.raises(ValueError) as refusal:
        LlmArgs.from_kwargs("m", speculative_config=options)
    assert [line.partition(" ")[0] for line in str(refusal.value).splitlines()] == [
        f"speculative_config.{name}" for name in ("decoding_type", "methods", "max_draft_len_x")
    ]


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
    ("options", "sentence"),
    [
        (
            {"speculative_config": ngram() | {"decoding_type": ["NGram"]}},
            r"decoding_type = \['NGram'\] is not a known type",
        ),
        (
            {"speculative_config": ngram() | {5: 6}},
            "speculative_config has the key 5; names of options",
        ),
        ({"kv_cache_config": {5: 6}}, "kv_cache_config has the key 5"),
        (
            {"prefill_cuda_graph_backend": "piecewise"},
            "= 'piecewise': must be 'auto' or 'disabled'",
        ),
    ],
)
def test_values_that_only_yaml_can_write_are_refused_by_a_sentence(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        LlmArgs.from_kwargs("m", **options)


def test_options_that_do_not_go_together_are_reported_together() -> None:
    speculative = {
        "decoding_type": "MTP",
        "max_draft_len": 2,
        "max_total_draft_tokens": 3,
        "max_concurrency": 8,
        "draft_len_schedule": {1: 2},
        "draft_sampling": "greedy",
        "use_rejection_sampling": True,
        "use_relaxed_acceptance_for_thinking": True,
    }
    with pytest.raises(ValueError) as refusal:
        LlmArgs(model="zoo:deepseek", speculative_config=speculative)
    starts = ["max_concurrency", "draft_sampling", "max_total_draft_tokens", "use_relaxed"]
    lines = str(refusal.value).splitlines()
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"speculative_config.{start}")
    with pytest.raises(ValueError) as refusal:
        LlmArgs(
            model="zoo:llama",
            deterministic=True,
            attn_backend="TRITON",
            tensor_parallel_size=4,
            device="cuda:0",
            record_hidden_states=0.5,
        )
    assert len(str(refusal.value).splitlines()) == 4
