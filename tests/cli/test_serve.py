"""`tllm-serve`: flags and YAML become arguments of LLM; a mistake is reported in one sentence."""

import gc
import socket
from pathlib import Path

import pytest
import uvicorn
from click.testing import CliRunner, Result

from tllm_spec import LLM
from tllm_spec.cli.serve import main, read_args
from tllm_spec.config import KvCacheConfig, LlmArgs


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_flags_become_arguments_and_unset_ones_leave_the_defaults() -> None:
    flags = {"max_batch_size": 4, "max_seq_len": None, "kv_cache_free_gpu_memory_fraction": 0.5}
    args = read_args("m", {**flags, "enable_chunked_prefill": False}, None)
    assert (args.model, args.max_batch_size, args.max_seq_len) == ("m", 4, None)
    assert args.kv_cache_config == KvCacheConfig(free_gpu_memory_fraction=0.5)


def test_the_yaml_file_takes_precedence_over_flags(tmp_path: Path) -> None:
    options = tmp_path / "options.yaml"
    options.write_text(
        "max_batch_size: 8\nspeculative_config: {decoding_type: NGram, max_draft_len: 3}\n"
    )
    args = read_args("m", {"max_batch_size": 4, "max_num_tokens": 64}, str(options))
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
        result = serve("no/such/folder", "--host", "127.0.0.1", "--port", port)
    assert result.exit_code == 1
    assert f"--port {port}" in result.output
    assert "no/such/folder" not in result.output


def test_a_flag_that_is_out_of_range_is_refused_by_its_name() -> None:
    result = serve("no/such/folder", "--port", "0", "--max_batch_size", "0")
    assert result.exit_code == 1
    assert "max_batch_size = 0: input should be greater than 0" in result.output


def test_objects_made_at_start_up_are_excluded_from_garbage_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []
    from_args, started = LLM.from_args, list[LLM]()

    def start(args: LlmArgs) -> LLM:
        started.append(from_args(args))
        return started[-1]

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        seen.append((gc.get_freeze_count(), len(gc.get_objects())))

    monkeypatch.setattr(LLM, "from_args", start)
    monkeypatch.setattr(uvicorn.Server, "run", run)
    result = serve("zoo:llama", "--port", "0")
    started.pop().shutdown()  # as the server does when it ends
    assert result.exit_code == 0, result.output
    [(num_frozen, num_watched)] = seen
    assert num_frozen > 50_000 > num_watched
    assert gc.get_freeze_count() == 0
