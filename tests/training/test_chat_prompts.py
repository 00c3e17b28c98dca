"""`tools/chat_prompts.py`: data sets whose held-out prompts have nothing of the others."""

import http
import re
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from tllm_spec.bench.dataset import read_dataset
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.corpus import heldout_files, training_files
from tools import chat_prompts
from tools.chat_prompts import CODE, PROSE, QUESTIONS, WRITING, prompts


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
