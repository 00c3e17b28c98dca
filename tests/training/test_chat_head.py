"""The commands of docs/recording.md for a chat model without traffic, in small."""

import http
import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from tllm_spec.cli.bench import main as bench
from tllm_spec.cli.train import main as train
from tllm_spec.zoo.corpus import heldout_files, training_files
from tools import chat_prompts

PAGE = Path(__file__).parents[2] / "docs" / "recording.md"
HEADING = "### A chat model without traffic\n"
SMALL = {
    "throughput": "--num_requests 3 --target_output_len 12",
    "compare": "--num_requests 2 --target_output_len 12",
    "head": "--steps 2 --device cpu --dtype float32 --draft_vocab_size 64 --batch_tokens 512",
}
OPTIONS = {"max_batch_size": 4, "max_seq_len": 512, "kv_cache_config": {"max_tokens": 4096}}
SPEC = {"decoding_type": "Eagle3", "speculative_model": "head", "max_draft_len": 4}
FILES = {
    "sampler.yaml": {"temperature": 0},
    "record.yaml": OPTIONS | {"record_traffic": "traffic"},
    "plain.yaml": OPTIONS,
    "eagle3.yaml": OPTIONS | {"speculative_config": SPEC},
}


def commands() -> list[list[str]]:
    section = PAGE.read_text(encoding="utf-8").split(HEADING)[1].split("\n## ")[0]
    block = "\n".join(re.findall(r"^    (.*)", section, re.MULTILINE)).replace("\\\n", " ")
    return [shlex.split(line.replace("SMOL", "zoo:llama")) for line in block.splitlines()]


@pytest.mark.slow
def test_the_commands_make_a_head_and_measure_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_text(json.dumps(content))
    for find in (training_files, heldout_files):
        monkeypatch.setattr(chat_prompts, find.__name__, partial(find, Path(http.__file__).parent))
    (_, _, *prompts), *others = commands()
    Path("prompts").mkdir()
    monkeypatch.setattr(sys, "argv", ["chat_prompts.py", *prompts, "150"])
    chat_prompts.main()
    outputs = []
    for program, *words in others:
        kind = next(word for word in words if word in SMALL)
        main = {"tllm-bench": bench, "tllm-train": train}[program]
        result = CliRunner().invoke(main, [*words, *SMALL[kind].split()])
        assert result.exit_code == 0, result.output
        outputs.append(result.output)
    assert len(list(Path("traffic").glob("*.jsonl"))) == 1
    assert [("acceptance_length" in output) for output in outputs] == [False, True, True, False]
    assert outputs[-1].count("eagle3") >= 3  # a row for each concurrency
