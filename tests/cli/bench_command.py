"""Runs `tllm-bench` on `zoo:llama` and writes its YAML files."""

from pathlib import Path

from click.testing import CliRunner, Result

from tllm_spec.cli.bench import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["--model", "zoo:llama", *map(str, arguments)])


def ran(*arguments: object) -> Result:
    """The result of a command that succeeds."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def write_yaml(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return str(path)


def ngram(folder: Path, name: str = "ngram", draft_len: int = 3) -> str:
    text = f"speculative_config: {{decoding_type: NGram, max_draft_len: {draft_len}}}"
    return write_yaml(folder, name, text)
