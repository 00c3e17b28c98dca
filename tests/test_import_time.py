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


def test_a_public_name_is_loaded_at_its_first_use_and_a_tokenizer_without_torchs_compiler() -> None:
    use = "import tllm_spec; tllm_spec.LLM; "
    load = "from tllm_spec.text.tokenizer import load_tokenizer; load_tokenizer('zoo:llama')"
    loaded = loaded_after(use + load)
    assert "torch" in loaded and "torch._dynamo" not in loaded
