"""The package and the commands' help start without heavy libraries."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ["torch", "transformers", "tokenizers", "fastapi", "uvicorn", "triton"]
SUBCOMMANDS = ("throughput", "compare", "break-even")
HEAVY += ["prometheus_client", "matplotlib", "torch._dynamo"]
PRINT_LOADED = (
    f"import json, sys; print(); print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
)
RUN_HELP = """
import importlib, sys
for command, *arguments in {commands}:
    sys.argv = [f"tllm-{{command}}", *arguments, "--help"]
    try:
        importlib.import_module(f"tllm_spec.cli.{{command}}").main()
    except SystemExit as exit:
        assert not exit.code, exit.code
"""
RUN_SERVE = """
from click.testing import CliRunner
from tllm_spec.cli.serve import main
for model, config, reason in {cases}:
    result = CliRunner().invoke(main, [model, "--port", "0", "--config", config])
    assert result.exit_code == 1 and reason in result.output, result.output
"""


def loaded_after(code: str) -> list[str]:
    """Which of HEAVY a new interpreter has loaded after running `code`."""
    command = [sys.executable, "-c", code + "\n" + PRINT_LOADED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_the_package_is_imported_without_a_heavy_library() -> None:
    assert loaded_after("import tllm_spec") == []


def test_help_is_printed_without_a_heavy_library() -> None:
    subcommands = [("bench", "--model", "zoo:llama", name) for name in SUBCOMMANDS]
    commands = [("serve",), ("bench",), ("train", "head"), *subcommands]
    assert loaded_after(RUN_HELP.format(commands=commands)) == []


def test_a_wrong_folder_is_reported_before_a_heavy_library_is_loaded(tmp_path: Path) -> None:
    cases = list[tuple[str, str, str]]()
    for model, decoding_type, draft, reason in (
        (str(tmp_path), "NGram", None, "config.json does not exist"),
        ("zoo:llama", "Eagle3", "zoo:llama-draft", "is a language model of 2 layers"),
        ("zoo:llama", "Draft_Target", "zoo:llama-eagle3", "is an EAGLE-3 head"),
        ("zoo:llama", "DFlash", "zoo:llama-eagle3", "is an EAGLE-3 head"),
        ("zoo:llama", "Eagle3", str(tmp_path), f"speculative_model: {tmp_path}/config.json"),
    ):
        spec = {"decoding_type": decoding_type, "max_draft_len": 2, "speculative_model": draft}
        config = tmp_path / f"{len(cases)}.yaml"
        own = {key: value for key, value in spec.items() if value is not None}
        config.write_text(json.dumps({"speculative_config": own}))
        cases.append((model, str(config), reason))
    assert loaded_after(RUN_SERVE.format(cases=cases)) == []


FORGETFUL = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import tllm_spec
llm = tllm_spec.LLM("zoo:llama", load_format="dummy", max_batch_size=8)
next(llm.generate_async([1, 2, 3], {"max_tokens": 400, "ignore_eos": True}, streaming=True))
"""


def test_an_engine_starts_without_torchs_compiler_or_unused_kernels_and_ends_if_forgotten() -> None:
    """Its program ends well though nothing shuts it down while a request runs."""
    loaded = loaded_after(FORGETFUL)
    assert "torch" in loaded and not {"torch._dynamo", "triton"} & {*loaded}
