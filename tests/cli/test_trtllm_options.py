"""Options of TensorRT-LLM's commands: harmless values are accepted, others refused with the
reason."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tllm_spec import __version__
from tllm_spec.cli import bench, serve
from tllm_spec.cli.trtllm_options import BY_NAME, LOG_LEVELS, PeerOption, split_trtllm_options
from tllm_spec.config.option_checks import NotServed

# Options of `trtllm-serve serve` with a value that asks for nothing special.
HARMLESS = [
    "--backend pytorch",
    "--tensor_parallel_size 1",
    "--tp_size 1",
    "--pipeline_parallel_size 1",
    "--pp_size 1",
    "--context_parallel_size 1",
    "--cp_size 1",
    "--moe_expert_parallel_size 1",
    "--ep_size 1",
    "--moe_cluster_parallel_size 1",
    "--cluster_size 1",
    "--gpus_per_node 1",
    "--max_beam_width 1",
    "--kv_cache_dtype auto",
    "--kv_cache_dtype fp8",
    "--kv_cache_dtype fp8_e4m3",
    "--kv_cache_free_gpu_memory_fraction 0.9",
    "--num_postprocess_workers 0",
    "--hf_revision main",
    "--revision main",
    "--generation-config trtllm",
    "--no-telemetry",
    "--fail_fast_on_attention_window_too_large",
    "--enable_chunked_prefill",
    "--tool_parser qwen3",
    "--reasoning_parser qwen3",
    "--max_batch_size 8",
    "--max_num_tokens 64",
    "--max_seq_len 32",
    "--served_model_name x",
    "--log_level verbose",
    "--log_level internal_error",
]
# The others, each with a part of the reason.
REFUSED = [
    ("--backend tensorrt", "there is one backend"),
    ("--pp_size 2", "sliced over all devices"),
    ("--cp_size 2", "divided by heads only"),
    ("--enable_attention_dp", "a part of all requests' attention"),
    ("--kv_cache_dtype nvfp4", "kv_cache_config.dtype = 'nvfp4'"),
    ("--hf_revision v2", "nothing is downloaded; accepted: 'main'"),
    ("--generation_config auto", "SamplingParams"),
    ("--telemetry", "no usage data is collected"),
    ("--custom_tokenizer deepseek_v32", "--tokenizer takes a folder"),
    ("--custom_module_dirs x", "no Python code is imported"),
    ("--chat_template x.jinja", "in the tokenizer's folder"),
    ("--allow_request_chat_template", "in the tokenizer's folder"),
    ("--metadata_server_config_file x.yaml", "prefill and decoding run in one server"),
    ("--server_role context", "prefill and decoding run in one server"),
    ("--disagg_cluster_uri http://x", "prefill and decoding run in one server"),
    ("--media_io_kwargs {}", "only text is served"),
    ("--video_pruning_rate 0.5", "only text is served"),
    ("--visual_gen_args x.yaml", "only text is served"),
    ("--extra_visual_gen_options x.yaml", "only text is served"),
    ("--enable_visual_gen", "only text is served"),
    ("--grpc", "the server speaks HTTP"),
    ("--set max_batch_size=8", "the YAML file of --config"),
]


def serve_nothing(*options: str) -> str:
    """The output of a start that fails because the model does not exist, if not earlier."""
    result = CliRunner().invoke(serve.main, ["no/such/folder", "--port", "0", *options])
    assert result.exit_code == 1, result.output
    return result.output


@pytest.mark.parametrize("option", HARMLESS)
def test_a_harmless_value_is_accepted(option: str) -> None:
    assert "no/such/folder" in serve_nothing(*option.split())


@pytest.mark.parametrize(("option", "reason"), REFUSED)
def test_any_other_value_is_refused_with_the_reason(option: str, reason: str) -> None:
    output = serve_nothing(*option.split())
    assert " is refused: " in output and reason in output and "no/such/folder" not in output


def test_an_option_may_be_spelled_with_dashes_or_underscores() -> None:
    assert "no/such/folder" in serve_nothing("--max-batch-size", "8", "--tp-size", "1")
    assert "--grpc is refused" in serve_nothing("--grpc", "--kv-cache-dtype", "auto")


def test_all_refusals_are_in_one_message() -> None:
    output = serve_nothing("--grpc", "--custom_module_dirs", "x", "--pp_size", "2")
    assert len(re.findall("is refused", output)) == 3, output


def test_a_refused_flag_and_a_mistake_in_the_yaml_file_are_in_one_message(tmp_path: Path) -> None:
    options = tmp_path / "options.yaml"
    options.write_text("max_batch_sze: 3")
    output = serve_nothing("--grpc", "--config", str(options))
    assert "--grpc is refused" in output and "did you mean max_batch_size" in output


def test_values_become_arguments_of_llm_nested_ones_too() -> None:
    values = {"kv_cache_dtype": "auto", "tensor_parallel_size": 1, "backend": None, "other": 5}
    others, arguments, refusals = split_trtllm_options(values)
    assert others == {"other": 5} and refusals == []
    assert arguments == {"kv_cache_config": {"dtype": "auto"}, "tensor_parallel_size": 1}


@pytest.mark.parametrize("option", BY_NAME.values(), ids=lambda option: option.name)
def test_every_option_has_a_help_text_that_names_what_is_accepted(option: PeerOption) -> None:
    found = [parameter for parameter in all_parameters() if parameter.name == option.name]
    assert found
    for parameter in found:
        assert parameter.hidden and parameter.help
        if isinstance(option.target, NotServed):
            assert option.target.reason in parameter.help


@pytest.mark.parametrize("parameter", [*serve.main.params, *bench.main.params])
def test_every_visible_option_has_a_help_text(parameter: click.Parameter) -> None:
    if isinstance(parameter, click.Option):
        assert parameter.help


def all_parameters() -> list[click.Option]:
    commands: list[click.Command] = [serve.main, bench.main]
    for command in commands:
        if isinstance(command, click.Group):
            commands += command.commands.values()
    parameters = [parameter for command in commands for parameter in command.params]
    return [parameter for parameter in parameters if isinstance(parameter, click.Option)]


def test_levels_of_both_kinds_of_log_are_those_of_python() -> None:
    assert set(LOG_LEVELS.values()) == {"critical", "error", "warning", "info", "debug"}


@pytest.mark.parametrize(
    ("command", "name"), [(serve.main, "tllm-serve"), (bench.main, "tllm-bench")]
)
def test_the_version_needs_no_model(command: click.Command, name: str) -> None:
    result = CliRunner().invoke(command, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith(f"{name} {__version__} (commit ")
    assert re.search(r"; extras: (none|\w+(, \w+)*)\)$", result.output.strip())
