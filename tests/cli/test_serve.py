"""`tllm-serve`: flags and YAML become arguments of LLM; a mistake is reported in one sentence."""

import gc
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from tllm_spec.cli.llm_flags import LLM_FLAGS, LlmFlags, read_flags
from tllm_spec.cli.serve import main, read_args, read_command_line
from tllm_spec.cli.serve_options import COMMON
from tllm_spec.config.adaptive_config import AdaptiveConfig
from tllm_spec.config.llm_args import KvCacheConfig, LlmArgs
from tllm_spec.models.automatic import with_drafter
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


def test_print_config_shows_what_auto_has_chosen_as_a_file_may_say_it() -> None:
    lines = serve("zoo:llama", "--speculate", "--print_config").output.splitlines()
    assert "  decoding_type: SA  # command line" in lines
    assert "  max_draft_len: 15  # chosen" in lines
    (adaptive,) = (line for line in lines if line.startswith("  adaptive:"))
    assert adaptive.endswith("  # chosen")
    given = yaml.safe_load(adaptive)["adaptive"]
    chosen = with_drafter("zoo:llama", {"speculative_config": "auto"})["speculative_config"]
    assert AdaptiveConfig.parse(given) == AdaptiveConfig.parse(chosen["adaptive"])
    for steps, source in ((1, "default"), (2, "command line")):  # of a model with MTP modules
        flags = "--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(steps)
        lines = serve("zoo:deepseek", *flags, "--print_config").output.splitlines()
        assert f"  max_draft_len: {steps}  # {source}" in lines


REFUSED_FILES = {
    "skip_tokenizer_init: true\n": ["answers are text"],
    "port: 80\nlog-level: info\nmax_batch: 4\n": [
        "port, log-level: flags of tllm-serve, not options of a YAML file\n",
        "max_batch = 4 is not a known option",
    ],
}


@pytest.mark.parametrize("text", REFUSED_FILES)
def test_a_file_that_cannot_be_served_is_refused(tmp_path: Path, text: str) -> None:
    options = tmp_path / "options.yaml"
    options.write_text(text)
    result = serve("zoo:llama", "--config", str(options))
    assert result.exit_code == 1
    assert all(each in result.output for each in REFUSED_FILES[text])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ("--speculative_model", "zoo:llama-eagle3"),
            "max_draft_len is required by Eagle3DecodingConfig; --speculate, or decoding_type: "
            "AUTO, chooses it",
        ),
        (
            ("--speculate", "--speculative_config.decoding_type", "SA"),
            "which is given as 'SA'; leave one of them out",
        ),
    ],
)
def test_a_refusal_of_speculation_says_what_to_do(flags: tuple[str, ...], sentence: str) -> None:
    result = serve("zoo:llama", *flags, "--print_config")
    assert result.exit_code == 1 and sentence in result.output


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


# `tllm-serve` with flags that it does not declare: arguments of `LLM` and the neighbours' names of
# them are taken, all others are refused in one message.


HEAD = '{"method": "eagle3", "model": "zoo:llama-eagle3", "num_speculative_tokens": 3}'


def llm_flags_serve(*flags: str) -> Result:
    return CliRunner().invoke(main, list(flags))


def config_lines(*flags: str) -> set[str]:
    """What the flags set, as `--print_config` shows it."""
    result = llm_flags_serve("zoo:llama", *flags, "--print_config")
    assert result.exit_code == 0, result.output
    lines = result.output.partition("# LLM\n")[2].splitlines()
    given = (line.partition("  # command line") for line in lines)
    return {text.strip() for text, mark, _ in given if mark} - {"model: 'zoo:llama'"}


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (["--max-model-len", "128", "--max-num-seqs=4"], {"max_seq_len: 128", "max_batch_size: 4"}),
        (
            ["--context-length", "64", "--page_size", "16"],
            {"max_seq_len: 64", "tokens_per_block: 16"},
        ),
        (["--no-enable-prefix-caching"], {"enable_block_reuse: false"}),
        (["--enable-prefix-caching"], {"enable_block_reuse: true"}),
        (["--disable-radix-cache"], {"enable_block_reuse: false"}),
        (["--enforce-eager"], {"cuda_graph_config: null"}),
        (["--no-async-scheduling"], {"disable_overlap_scheduler: true"}),
        (["--async-scheduling"], {"disable_overlap_scheduler: false"}),
        (["--dtype", "half"], {"dtype: float16"}),
        (["--load-format", "safetensors"], {"load_format: auto"}),
        (["--attention-backend", "triton"], {"attn_backend: TRITON"}),
        (["--scheduling-policy", "priority"], {"waiting_queue_policy: priority"}),
        (["--language-model-only"], {"language_model_only: true"}),
        (
            ["--speculative-config", HEAD],
            {"decoding_type: Eagle3", "max_draft_len: 3", "speculative_model: 'zoo:llama-eagle3'"},
        ),
        (
            [
                "--speculative-algorithm",
                "STANDALONE",
                "--speculative-draft-model-path",
                "zoo:llama-draft",
                "--speculative-num-steps",
                "2",
            ],
            {
                "decoding_type: Draft_Target",
                "max_draft_len: 2",
                "speculative_model: 'zoo:llama-draft'",
            },
        ),
        (["--speculative-config.method", "mtp"], {"decoding_type: MTP"}),
        (["--kv_cache_config.dtype=fp8", "--deterministic"], {"dtype: fp8", "deterministic: true"}),
        (["--kv_cache_dtype", "fp8_e4m3"], {"dtype: fp8"}),
        (["--gpu-memory-utilization", "0.9"], {"gpu_memory_utilization: 0.9"}),
        (["--mem-fraction-static", "0.8"], {"mem_fraction_static: 0.8"}),
        (["--disable-cuda-graph", "--cuda-graph-max-bs", "8"], {"cuda_graph_config: null"}),
        (["--enable-auto-tool-choice", "--dp", "1"], set()),
    ],
)
def test_a_flag_that_means_the_same_is_taken(flags: list[str], lines: set[str]) -> None:
    assert config_lines(*flags) == lines


def test_help_shows_the_twenty_common_options_and_says_where_the_others_are() -> None:
    options, _, rest = llm_flags_serve("--help").output.partition("\n\n  docs/options.md")
    shown = set(re.findall(r"^  --(\w+)", options, re.MULTILINE))
    assert shown == (COMMON | {"help", "version"}) and len(COMMON) == 20
    assert "all other options" in rest


def test_the_model_may_be_named_by_sglangs_flag() -> None:
    for flags in (["--model-path", "zoo:llama"], ["--model-path=zoo:llama"]):
        result = llm_flags_serve(*flags, "--print_config")
        assert "model: 'zoo:llama'" in result.output


def test_all_flags_that_are_not_served_are_refused_in_one_message() -> None:
    result = llm_flags_serve(
        *("zoo:llama", "--gpu-memory-utilization", "2"),
        *("--lora-dtype", "x", "--quantization", "fp8"),
        *("--speculative-config", HEAD[:-1] + ', "disable_by_batch_size": 8}'),
    )
    assert result.exit_code == 1
    for sentence in (
        "kv_cache_config.gpu_memory_utilization = 2: must be less than or equal to 1",
        "lora_dtype = 'x' is refused",
        "quantization = 'fp8' is refused",
        "disable_by_batch_size = 8 is refused: use max_concurrency",
    ):
        assert sentence in result.output


def test_all_unknown_flags_are_named_at_once() -> None:
    others = ("--grpc", "--attention-backend", "fa9")
    result = llm_flags_serve(
        "zoo:llama", "--max-bach-size", "3", "--frob=1", *others, "--", "--not-a-flag"
    )
    assert result.exit_code == 2
    assert "--max_bach_size is not a known flag; did you mean --max_batch_size" in result.output
    assert "--frob is not a known flag" in result.output
    assert "--grpc is refused" in result.output and "attn_backend = 'FA9': must be" in result.output
    assert "--not_a_flag" not in result.output


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "is not JSON"), ("[1]", "a mapping is needed"), ('"eagle3"', "a mapping is needed")],
)
def test_a_speculative_config_that_is_no_object_is_refused(text: str, reason: str) -> None:
    result = llm_flags_serve("zoo:llama", "--speculative-config", text)
    assert result.exit_code in (1, 2) and reason in result.output


# Flags of trtllm-serve with a value that asks for nothing special.
HARMLESS = [
    *("--backend pytorch", "--tensor_parallel_size 1", "--tp_size 1", "--pp_size 1", "--cp_size 1"),
    *("--pipeline_parallel_size 1", "--context_parallel_size 1", "--moe_expert_parallel_size 1"),
    *("--ep_size 1", "--moe_cluster_parallel_size 1", "--cluster_size 1", "--gpus_per_node 1"),
    *("--max_beam_width 1", "--beam_width 1", "--kv_cache_dtype auto", "--kv_cache_dtype fp8"),
    *("--kv_cache_free_gpu_memory_fraction 0.9", "--num_postprocess_workers 0"),
    *("--hf_revision main", "--revision main", "--generation-config trtllm", "--no-telemetry"),
    *("--fail_fast_on_attention_window_too_large", "--enable_chunked_prefill"),
    *("--tool_parser qwen3", "--reasoning_parser qwen3", "--max-batch-size 8", "--log_level trace"),
]
# Others, each with a part of the reason.
REFUSED = [
    ("--backend tensorrt", "accepted: None or 'pytorch'"),
    ("--pp_size 2", "sliced over all devices"),
    ("--cp_size 2", "divided by heads only"),
    ("--enable_attention_dp", "a part of all requests' attention"),
    ("--kv_cache_dtype nvfp4", "kv_cache_config.dtype = 'nvfp4'"),
    ("--hf_revision v2", "nothing is downloaded; accepted: None or 'main'"),
    ("--generation_config auto", "accepted: None or 'trtllm'"),
    ("--telemetry", "no usage data is collected"),
    ("--custom_tokenizer my.module.Tokenizer", "--tokenizer takes a folder"),
    ("--custom_module_dirs x", "no Python code is imported"),
    ("--chat_template x.jinja", "in the tokenizer's folder"),
    ("--allow_request_chat_template", "in the tokenizer's folder"),
    ("--metadata_server_config_file x.yaml", "prefill and decoding run in one server"),
    ("--server_role context", "prefill and decoding run in one server"),
    ("--disagg_cluster_uri http://x", "prefill and decoding run in one server"),
    ("--media_io_kwargs {}", "only text is served"),
    ("--video_pruning_rate 0.5", "only text is served"),
    ("--extra_visual_gen_options x.yaml", "only text is served"),
    ("--enable_visual_gen", "only text is served"),
    ("--grpc", "the server speaks HTTP"),
]


def serve_nothing(*options: str) -> str:
    """The output of a start that fails because the model does not exist, if not earlier."""
    result = llm_flags_serve(*options, "no/such/folder", "--port", "0")
    assert result.exit_code == 1, result.output
    return result.output


@pytest.mark.parametrize("option", HARMLESS)
def test_a_harmless_value_is_accepted(option: str) -> None:
    assert "no/such/folder" in serve_nothing(*option.split())


@pytest.mark.parametrize(("option", "reason"), REFUSED)
def test_any_other_value_is_refused_with_the_reason(option: str, reason: str) -> None:
    output = serve_nothing(*option.split())
    assert " is refused: " in output or "must be" in output
    assert reason in output and "no/such/folder" not in output


def test_refused_flags_and_mistakes_in_the_yaml_file_are_in_one_message(tmp_path: Path) -> None:
    options = tmp_path / "options.yaml"
    options.write_text("max_batch_sze: 3")
    flags = ("--grpc", "--custom_module_dirs", "x", "--pp_size", "2")
    output = serve_nothing(*flags, "--config", str(options))
    assert len(re.findall("is refused", output)) == 3, output
    assert "did you mean max_batch_size" in output


def test_the_yaml_file_takes_precedence_over_a_flag_of_another_name(tmp_path: Path) -> None:
    options = tmp_path / "options.yaml"
    options.write_text("max_seq_len: 64")
    result = llm_flags_serve(
        "zoo:llama", "--max-model-len", "128", "--config", str(options), "--print_config"
    )
    assert "max_seq_len: 64  # file" in result.output


def test_the_value_of_a_flag_may_begin_with_a_hyphen() -> None:
    flags = ("--served_model_name", "-tp", "--api_key", "-Abc", "--ssl_keyfile_password=-x")
    result = serve("a/folder", *flags, "--print_config")
    lines = {"served_model_name: -tp  # command line", "api_key: (set)  # command line"}
    assert lines <= {*result.output.splitlines()}, result.output


def test_a_flag_without_its_value_is_refused() -> None:
    for flags in (["--max-model-len"], ["--max-model-len", "--grpc"]):
        result = llm_flags_serve("zoo:llama", *flags)
        assert result.exit_code == 2 and "requires an argument" in result.output
