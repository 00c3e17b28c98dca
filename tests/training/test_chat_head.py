"""The commands of docs/recording.md for a chat model without traffic, in small."""

import http
import json
import re
import shlex
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from tllm_spec.bench.dataset import read_dataset
from tllm_spec.cli.bench import main as bench
from tllm_spec.cli.train import main as train
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.corpus import heldout_files, training_files
from tools import chat_prompts
from tools.chat_prompts import CODE, PROSE, QUESTIONS, WRITING, prompts

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


# `tools/chat_prompts.py`: data sets whose held-out prompts have nothing of the others.


@pytest.fixture(autouse=True)
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for find in (training_files, heldout_files):
        own = partial(find, Path(http.__file__).parent)
        monkeypatch.setattr(chat_prompts, find.__name__, own)


def parts(texts: list[str]) -> set[tuple[str, ...]]:
    """The words of prompts, and their functions and paragraphs."""
    found = set[tuple[str, ...]]()
    for template in (*CODE, *PROSE, *WRITING, *QUESTIONS):
        kinds = re.findall(r"{\w*}", template)
        pattern = re.sub(r"\\{\w+\\}", r"(\\w+)", re.escape(template)).replace(r"\{\}", "(.+)")
        matches = (re.fullmatch(pattern, text, re.DOTALL) for text in texts)
        pairs = (zip(kinds, match.groups(), strict=True) for match in matches if match)
        found |= {pair for each in pairs for pair in each}
    return found


def test_held_out_prompts_have_words_and_passages_of_their_own() -> None:
    training, held_out = (list(islice(prompts(is_held_out=each), 900)) for each in (False, True))
    used = parts(training), parts(held_out)
    assert all(len(set(texts)) == 900 for texts in (training, held_out))
    assert all({"{}", "{animal}", "{number}"} <= {kind for kind, _ in each} for each in used)
    assert used[0].isdisjoint(used[1])


def test_the_data_sets_have_prompts_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["chat_prompts.py", "zoo:llama", str(tmp_path), "150"])
    chat_prompts.main()
    tokenizer = load_tokenizer("zoo:llama")
    for name, number in (("train", 150), ("heldout", 3)):
        found = [tokenizer.decode(each.prompt) for each in read_dataset(tmp_path / f"{name}.jsonl")]
        assert len(found) == number
        assert all("<|user|>" in text and text.endswith("<|assistant|>") for text in found)
