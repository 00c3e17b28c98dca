"""`tllm-serve`: flags and YAML become LLM arguments, and mistakes end it with a sentence."""

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


def test_the_yaml_file_wins_over_flags(tmp_path: Path) -> None:
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
    [("max_batch_sze: 3", "did you mean max_batch_size"), ("a: [", "cannot read")],
)
def test_a_mistake_in_the_yaml_file_ends_it_with_a_sentence(
    tmp_path: Path, text: str, sentence: str
) -> None:
    options = tmp_path / "options.yaml"
    options.write_text(text)
    result = serve("zoo:llama", "--extra_llm_api_options", str(options))
    assert result.exit_code == 1
    assert sentence in result.output


def test_a_model_that_does_not_exist_ends_it_with_a_sentence() -> None:
    result = serve("no/such/folder", "--port", "0")
    assert result.exit_code == 1
    assert "no/such/folder" in result.output


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_word_serve_before_the_model_is_taken_as_with_trtllm_serve(place: int) -> None:
    words = ["serve", "no/such/folder"]
    words[place:place] = ["--port", "0"]
    result = serve(*words)
    assert result.exit_code == 1
    assert "no/such/folder" in result.output


@pytest.mark.parametrize("words", [["serve", "a", "b"], ["embed", "a"]])
def test_any_other_word_beside_the_model_is_refused(words: list[str]) -> None:
    result = serve(*words)
    assert result.exit_code == 2
    assert f"one model is needed, not {' '.join(words)}" in result.output


def test_a_taken_port_is_known_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = serve("no/such/folder", "--host", "127.0.0.1", "--port", port)
    assert result.exit_code == 1
    assert f"--port {port}" in result.output
    assert "no/such/folder" not in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max_batch_size", "0"], "max_batch_size = 0: input should be greater than 0"),
        (["--tp_size", "2"], "tensor_parallel_size = 2 is refused: one device serves a model"),
        (["--backend", "tensorrt"], "backend = 'tensorrt' is refused: there is one backend"),
        (
            ["--trust_remote_code"],
            "trust_remote_code = True is refused: code that comes with a checkpoint",
        ),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_refused_with_the_reason(
    arguments: list[str], sentence: str
) -> None:
    result = serve("no/such/folder", "--port", "0", *arguments)
    assert (result.exit_code, sentence in result.output) == (1, True)


def test_tensorrt_llms_flags_with_the_served_values_are_taken() -> None:
    result = serve(
        "no/such/folder", "--port", "0", "--backend", "pytorch", "--tp_size", "1", "--pp_size", "1"
    )
    assert "no/such/folder" in result.output


def test_while_it_serves_the_collector_leaves_alone_what_the_start_has_made(
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
