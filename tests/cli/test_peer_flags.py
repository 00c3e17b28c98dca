"""`tllm-serve` with the flags of vLLM and SGLang: the same meaning is taken, any other is refused
with the name here."""

from typing import Any

import pytest
from click.testing import CliRunner, Result

from tllm_spec.cli.peer_flags import PEER_FLAGS
from tllm_spec.cli.serve import main
from tllm_spec.config.config_base import ConfigModel
from tllm_spec.config.llm_args import LlmArgs

HEAD = '{"method": "eagle3", "model": "zoo:llama-eagle3", "num_speculative_tokens": 3}'


def serve(*flags: str) -> Result:
    return CliRunner().invoke(main, list(flags))


def config_lines(*flags: str) -> set[str]:
    """What the flags set, as `--print_config` shows it."""
    result = serve("zoo:llama", *flags, "--print_config")
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
        (["--enable-auto-tool-choice", "--dp", "1"], set()),
    ],
)
def test_a_flag_that_means_the_same_is_taken(flags: list[str], lines: set[str]) -> None:
    assert config_lines(*flags) == lines


def test_the_model_may_be_named_by_sglangs_flag() -> None:
    for flags in (["--model-path", "zoo:llama"], ["--model-path=zoo:llama"]):
        result = serve(*flags, "--print_config")
        assert "model: 'zoo:llama'" in result.output


def test_all_flags_that_are_not_served_are_refused_in_one_message() -> None:
    result = serve(
        *("zoo:llama", "--gpu-memory-utilization", "0.9", "--enable-lora", "--quantization", "fp8"),
        *("--speculative-config", HEAD[:-1] + ', "disable_by_batch_size": 8}'),
    )
    assert result.exit_code == 1
    for sentence in (
        "use kv_cache_config.free_gpu_memory_fraction",
        "LoRA is not served",
        "--quantization 'fp8' is refused",
        "disable_by_batch_size = 8 is not a known option; use max_concurrency",
    ):
        assert sentence in result.output


def test_all_unknown_flags_are_named_at_once() -> None:
    result = serve("zoo:llama", "--max-bach-size", "3", "--frob=1", "--", "--not-a-flag")
    assert result.exit_code == 2
    assert "--max_bach_size is not a known flag; did you mean --max_batch_size" in result.output
    assert "--frob is not a known flag" in result.output
    assert "--not_a_flag" not in result.output


@pytest.mark.parametrize("text", ["{", "[1]", '"eagle3"'])
def test_a_speculative_config_that_is_no_object_is_refused(text: str) -> None:
    result = serve("zoo:llama", "--speculative-config", text)
    assert result.exit_code == 2 and "JSON" in result.output


def test_every_flag_that_is_taken_names_an_argument_that_exists() -> None:
    for option in PEER_FLAGS:
        kind: Any = LlmArgs
        for name in option.target.split(".") if isinstance(option.target, str) else ():
            if kind is LlmArgs:
                assert name in kind.model_fields or name in kind.not_served, option
            kind = kind.model_fields[name].annotation if name in kind.model_fields else None
            if not (isinstance(kind, type) and issubclass(kind, ConfigModel)):
                break
