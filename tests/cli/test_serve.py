"""`tllm-serve`: flags and YAML become arguments of LLM; a mistake is reported in one sentence."""

import gc
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tllm_spec.cli.llm_flags import LLM_FLAGS, LlmFlags, read_flags
from tllm_spec.cli.serve import main, read_args, read_command_line
from tllm_spec.config.llm_args import KvCacheConfig, LlmArgs
from tllm_spec.server.child import freeze_heap


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def args_of(flags: dict[str, Any], yaml_path: Path | None = None) -> LlmArgs:
    args = read_args(
        "m",
        read_flags({**flags, LLM_FLAGS: LlmFlags({}, [])}),
        None if yaml_path is None else str(yaml_path),
    )
    assert LlmArgs(**args.as_options()) == args, "another process gets the same arguments"
    return args


def test_flags_become_arguments_and_unset_ones_leave_the_defaults() -> None:
    flags = {"max_batch_size": 4, "max_seq_len": None, "kv_cache_free_gpu_memory_fraction": 0.5}
    args = args_of({**flags, "enable_chunked_prefill": False})
    assert (args.model, args.max_batch_size, args.max_seq_len) == ("m", 4, None)
    assert args.kv_cache_config == KvCacheConfig(free_gpu_memory_fraction=0.5)


def test_the_yaml_file_takes_precedence_over_flags(tmp_path: Path) -> None:
    options = tmp_path / "options.yaml"
    options.write_text(
        "max_batch_size: 8\nspeculative_config: {decoding_type: NGram, max_draft_len: 3}\n"
    )
    args = args_of({"max_batch_size": 4, "max_num_tokens": 64}, options)
    assert (args.max_batch_size, args.max_num_tokens) == (8, 64)
    assert args.speculative_config is not None
    assert args.speculative_config.max_draft_len == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_batch_sze: 3", "did you mean max_batch_size"),
        ("a: [", "cannot read"),
        ("self: 1", "self = 1 is not a known option"),
        ("cls: 1", "cls = 1 is not a known option"),
        ("kv_cache_config: {self: 1}", "kv_cache_config.self = 1 is not a known option"),
        (
            "speculative_config: {decoding_type: NGram, max_draft_len: 2, self: 1}",
            "speculative_config.self = 1 is not a known option",
        ),
    ],
)
def test_a_mistake_in_the_yaml_file_is_reported_in_one_sentence(
    tmp_path: Path, text: str, sentence: str
) -> None:
    options = tmp_path / "options.yaml"
    options.write_text(text)
    result = serve("zoo:llama", "--extra_llm_api_options", str(options))
    assert result.exit_code == 1
    assert sentence in result.output


def test_a_model_that_does_not_exist_is_reported_in_one_sentence() -> None:
    result = serve("no/such/folder", "--port", "0")
    assert result.exit_code == 1
    assert "no/such/folder" in result.output


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_word_serve_may_precede_the_model_as_with_trtllm_serve(place: int) -> None:
    words = ["serve", "no/such/folder"]
    words[place:place] = ["--port", "0"]
    result = serve(*words)
    assert result.exit_code == 1
    assert "no/such/folder" in result.output


@pytest.mark.parametrize("words", [["serve", "a", "b"], ["embed", "a"]])
def test_any_other_word_next_to_the_model_is_refused(words: list[str]) -> None:
    result = serve(*words)
    assert result.exit_code == 2
    assert f"one model is needed, not {' '.join(words)}" in result.output


def test_a_port_in_use_is_reported_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = serve("zoo:llama", "--host", "127.0.0.1", "--port", port)
    assert result.exit_code == 1
    assert f"--port {port}" in result.output


def test_a_flag_that_is_out_of_range_is_refused_by_its_name() -> None:
    result = serve("no/such/folder", "--port", "0", "--max_batch_size", "0")
    assert result.exit_code == 1
    assert "max_batch_size = 0: must be greater than 0" in result.output


def test_a_model_without_a_tokenizer_cannot_be_served(tmp_path: Path) -> None:
    options = tmp_path / "options.yaml"
    options.write_text("skip_tokenizer_init: true\n")
    result = serve("zoo:llama", "--config", str(options))
    assert result.exit_code == 1
    assert "answers are text" in result.output


def test_objects_made_at_start_up_are_excluded_from_garbage_collection() -> None:
    try:
        freeze_heap()
        assert gc.get_freeze_count() > 10_000 > len(gc.get_objects())
    finally:
        gc.unfreeze()


def test_print_config_names_every_option_with_its_value_and_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = tmp_path / "options.yaml"
    options.write_text(
        "max_num_tokens: 64\n"
        "kv_cache_config: {max_tokens: 512}\n"
        "speculative_config: {decoding_type: NGram, max_draft_len: 3}\n"
    )
    monkeypatch.setenv("TLLM_SPEC_API_KEY", "secret")
    flags = ("--max_batch_size", "4", "--max_queue_size", "7", "--config", str(options))
    result = serve("no/such/folder", *flags, "--print_config")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    for line in (
        "max_queue_size: 7  # command line",
        "max_connections: 4096  # default",
        "api_key: (set)  # environment",
        "max_batch_size: 4  # command line",
        "max_num_tokens: 64  # file",
        "  max_tokens: 512  # file",
        "  tokens_per_block: 32  # default",
        "  max_draft_len: 3  # file",
        "max_seq_len: null  # default",
    ):
        assert line in lines
    assert "secret" not in result.output
    assert all(f"{name}:" in result.output for name in LlmArgs.model_fields)


def test_print_config_knows_the_other_names_of_options_and_names_the_model_once(
    tmp_path: Path,
) -> None:
    options = tmp_path / "options.yaml"
    options.write_text(
        "kv_cache_free_gpu_memory_fraction: 0.5\n"
        "speculative_config:\n"
        "  decoding_type: Eagle3\n"
        "  speculative_num_steps: 3\n"
        "  speculative_model_dir: some/head\n"
    )
    lines = serve("a/folder", "--config", str(options), "--print_config").output.splitlines()
    for line in (
        "  free_gpu_memory_fraction: 0.5  # file",
        "  max_draft_len: 3  # file",
        "  speculative_model: some/head  # file",
    ):
        assert line in lines
    assert [line for line in lines if line.startswith("model:")] == [
        "model: a/folder  # command line"
    ]
    options.write_text(
        "model: b/folder\nspeculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}\n"
    )
    lines = serve("a/folder", "--config", str(options), "--print_config").output.splitlines()
    assert "  max_draft_len: 3  # file" in lines
    assert [line for line in lines if line.startswith("model:")] == ["model: b/folder  # file"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--ssl_keyfile", "a.pem"), "--ssl_keyfile need --ssl_certfile"),
        (("--ssl_certfile", "no.pem"), "--ssl_certfile no.pem is not a file"),
    ],
)
def test_tls_files_are_checked_before_the_model_is_loaded(
    flags: tuple[str, ...], sentence: str
) -> None:
    result = serve("no/such/folder", *flags)
    assert result.exit_code == 1
    assert sentence in result.output


def test_the_served_name_is_that_of_the_folder_or_the_file(tmp_path: Path) -> None:
    (tmp_path / "Some-1.5B.Q4_1.gguf").touch()
    (tmp_path / "Folder-1.5B").mkdir()
    for name in ("Some-1.5B.Q4_1.gguf", "Folder-1.5B"):
        line = read_command_line([str(tmp_path / name)], [])
        assert line.served_model_name == name.removesuffix(".gguf")
    assert read_command_line(["zoo:llama"], []).served_model_name == "zoo:llama"
