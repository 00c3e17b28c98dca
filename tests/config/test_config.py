"""Configuration: what `LlmArgs` takes from keywords and YAML files."""

from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest

from tests.decoding_options import ngram
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
