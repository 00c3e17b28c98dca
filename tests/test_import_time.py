"""The package and the commands' help start without heavy libraries."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ["torch", "transformers", "tokenizers", "fastapi", "uvicorn", "triton"]
HEAVY += ["prometheus_client", "matplotlib", "torch._dynamo"]
PRINT_LOADED = (
    f"import json, sys; print(); print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
)
RUN_HELP = """
import sys
from tllm_spec.cli.{command} import main
sys.argv = ["tllm-{command}", {arguments}]
try:
    main()
except SystemExit as exit:
    assert not exit.code, exit.code
"""


def loaded_after(code: str) -> list[str]:
    """Which of HEAVY a new interpreter has loaded after running `code`."""
    command = [sys.executable, "-c", code + "\n" + PRINT_LOADED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_the_package_is_imported_without_a_heavy_library() -> None:
    assert loaded_after("import tllm_spec") == []


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("serve", "'--help'"),
        ("bench", "'--help'"),
        ("train", "'head', '--help'"),
        ("bench", "'--model', 'zoo:llama', 'throughput', '--help'"),
        ("bench", "'--model', 'zoo:llama', 'compare', '--help'"),
        ("bench", "'--model', 'zoo:llama', 'break-even', '--help'"),
    ],
)
def test_help_is_printed_without_a_heavy_library(command: str, arguments: str) -> None:
    assert loaded_after(RUN_HELP.format(command=command, arguments=arguments)) == []


@pytest.mark.parametrize(
    ("model", "decoding_type", "draft", "reason"),
    [
        ("{folder}", "NGram", None, "config.json does not exist"),
        ("zoo:llama", "Eagle3", "zoo:llama-draft", "is a language model of 2 layers"),
        ("zoo:llama", "Draft_Target", "zoo:llama-eagle3", "is an EAGLE-3 head"),
        ("zoo:llama", "DFlash", "zoo:llama-eagle3", "is an EAGLE-3 head"),
        ("zoo:llama", "Eagle3", "{folder}", "config.json does not exist"),
    ],
)
def test_a_wrong_folder_is_reported_before_a_heavy_library_is_loaded(
    tmp_path: Path, model: str, decoding_type: str, draft: str | None, reason: str
) -> None:
    spec = {"decoding_type": decoding_type, "max_draft_len": 2}
    if draft is not None:
        spec["speculative_model"] = draft.format(folder=tmp_path)
    config = tmp_path / "options.yaml"
    config.write_text(json.dumps({"speculative_config": spec}))
    code = f"""
from click.testing import CliRunner
from tllm_spec.cli.serve import main
command = [{model.format(folder=tmp_path)!r}, "--port", "0", "--config", {str(config)!r}]
result = CliRunner().invoke(main, command)
assert result.exit_code == 1 and {reason!r} in result.output, result.output
"""
    assert loaded_after(code) == []


def test_a_public_name_is_loaded_at_its_first_use_and_a_tokenizer_without_torchs_compiler() -> None:
    use = "import tllm_spec; tllm_spec.LLM; "
    load = "from tllm_spec.text.tokenizer import load_tokenizer; load_tokenizer('zoo:llama')"
    loaded = loaded_after(use + load)
    assert "torch" in loaded and "torch._dynamo" not in loaded
