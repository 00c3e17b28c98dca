"""Configuration: what `LlmArgs` takes from keywords and YAML files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from tests.decoding_options import ngram, speculate
from tllm_spec.config.llm_args import CudaGraphConfig, KvCacheConfig, LlmArgs
from tllm_spec.config.option_checks import read_yaml
from tllm_spec.config.speculative_config import NGramDecodingConfig

EXAMPLES = Path(__file__).parent.parent.parent / "yaml_examples"


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
    ("text", "sentence"),
    [
        ("a: [1", "cannot read"),
        ("- a\n- b\n", "must hold a mapping"),
        ("1: 2\n", "must hold a mapping"),
        ("a: 1\nb: 2\na: 3\n", "it has the key 'a' twice\n.*line 1"),
        ("a: {b: 1, 'b': 2}\n", "it has the key 'b' twice"),
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


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_arguments_survive_a_way_through_msgpack(file: Path) -> None:
    args = LlmArgs.from_yaml(file, model="m")
    packed = msgpack.packb(args.as_options())
    assert LlmArgs(**msgpack.unpackb(packed, strict_map_key=False)) == args


def test_a_users_object_has_no_plain_form() -> None:
    args = LlmArgs.from_kwargs("m", tokenizer=SimpleNamespace(decode=None))
    with pytest.raises(TypeError, match="SimpleNamespace has no plain form"):
        args.as_options()


def test_a_key_may_override_a_merged_one(yaml_file: Path) -> None:
    yaml_file.write_text("a: &a {b: 1, c: 2}\nd: {<<: *a, b: 3}\n")
    assert read_yaml(yaml_file)["d"] == {"b": 3, "c": 2}


# Which batch sizes `CudaGraphConfig` captures.


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


def test_cuda_graphs_with_padding_are_on_unless_null_turns_them_off(tmp_path: Path) -> None:
    yaml_file = tmp_path / "options.yaml"
    assert LlmArgs.from_kwargs("m").cuda_graph_config == CudaGraphConfig(enable_padding=True)
    yaml_file.write_text("cuda_graph_config: null\n")
    assert LlmArgs.from_yaml(yaml_file, model="m").cuda_graph_config is None
    yaml_file.write_text(
        "cuda_graph_config: {enable_padding: false, batch_sizes: [2, 1], mode: decode}\n"
    )
    expected = CudaGraphConfig(enable_padding=False, batch_sizes=(1, 2))
    assert LlmArgs.from_yaml(yaml_file, model="m").cuda_graph_config == expected


# Mistakes in configurations: each is refused with its key, its value and what is accepted.


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
        (speculate({"method": "medusa"}), ["decoding_type = 'medusa' is not served yet"]),
        (
            speculate({"decoding_type": "eagel3"}),
            ["decoding_type = 'eagel3' is not a known type, did you mean Eagle3?; accepted: AUTO"],
        ),
        (speculate({"decoding_type": "Egle"}), ["decoding_type = 'Egle'", "NGram, Draft_Target"]),
        (
            speculate({"max_draft_len": 4}),
            ["speculative_config.decoding_type is required; accepted: AUTO, NGram, Draft_Target"],
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


# Options files: how numbers are read, and what is refused in one sentence, at once.


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(12)
)


@pytest.fixture
def options_file(tmp_path: Path) -> Path:
    return tmp_path / "options.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", "010"),
        ("1:30", "1:30"),
        ("2020-99-99", "2020-99-99"),
        ("0x1F", 31),
        ("1_000", 1000),
        ("-3", -3),
        ("0", 0),
        ("1e-5", 1e-5),
        (".5", 0.5),
        ("-1.5E+3", -1500.0),
        (".inf", float("inf")),
        ("yes", True),
        ("~", None),
        ("'7'", "7"),
    ],
)
def test_numbers_are_read_as_yaml_1_2_does(text: str, value: object, options_file: Path) -> None:
    options_file.write_text(f"a: {text}\n")
    found = read_yaml(options_file)["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (ALIASES, "its aliases stand for more than 100000 values"),
        ("a: &a {b: *a}", "nested more than 100 levels deep, or a value holds itself"),
        ("a: &a [*a]", "nested more than 100 levels deep, or a value holds itself"),
        (f"a: {'[' * 200}{']' * 200}", "nested more than 100 levels deep"),
        (f"a: {'[' * 5000}{']' * 5000}", "nested more than 100 levels deep"),
        (f"a: {'9' * 5000}", "5000 digits"),
        ("a: !!timestamp 2020-99-99", "month must be in 1..12"),
        ("a: {b: 1, b: 2}", "it has the key 'b' twice"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(
    text: str, sentence: str, options_file: Path
) -> None:
    options_file.write_text(text)
    with pytest.raises(
        ValueError, match=f"cannot read the options file {options_file}: .*{sentence}"
    ):
        read_yaml(options_file)


def test_an_alias_may_be_used_more_than_once(options_file: Path) -> None:
    options_file.write_text("a: &a {b: [1, 2]}\nc: *a\nd: [*a, *a]\n")
    assert read_yaml(options_file)["d"] == [{"b": [1, 2]}] * 2


@pytest.mark.parametrize("length", [65537, 10**9, 10**30])
@pytest.mark.parametrize("decoding_type", ["NGram", "MTP", "Eagle3", "Draft_Target"])
def test_a_draft_length_beyond_any_use_is_refused_before_shapes_are_made(
    decoding_type: str, length: int, options_file: Path
) -> None:
    options_file.write_text(
        f"speculative_config: {{decoding_type: {decoding_type}, max_draft_len: {length}, "
        "speculative_model: m}\nmax_num_tokens: 1000000000\n"
    )
    with pytest.raises(
        ValueError, match=f"max_draft_len = {length}: .* an integer from 1 to 65536"
    ):
        LlmArgs.from_yaml(options_file, model="m")
