"""The zoo's corpus, names and tokenizer.

Files are from this interpreter's standard library, so figures differ a little between Python
versions; the bounds hold for 3.10 to 3.13."""

import hashlib
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from torch import Tensor

from tests.zoo.runs import NAMES
from tllm_spec.zoo.corpus import heldout_files, is_held_out, read_source, training_files
from tllm_spec.zoo.registry import resolve_model


def make_stdlib(root: Path, names: list[str]) -> Path:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n", encoding="utf-8")
    return root


def test_a_hash_of_the_path_decides_what_is_held_out() -> None:
    held_out = [
        name for name in ("ast.py", "enum.py", "secrets.py") if is_held_out(PurePosixPath(name))
    ]
    assert held_out == ["ast.py", "enum.py", "secrets.py"]
    assert not any(
        is_held_out(PurePosixPath(name))
        for name in ("argparse.py", "asyncio/events.py", "json/__init__.py")
    )


def test_about_one_file_in_twenty_is_held_out_and_none_is_trained_on() -> None:
    training, heldout = training_files(), heldout_files()
    assert heldout and set(training).isdisjoint(heldout)
    assert set(training_files(tests=True)).isdisjoint(heldout)
    assert 0.03 < len(heldout) / (len(training) + len(heldout)) < 0.08


def test_tests_packages_and_build_outputs_are_not_in_the_corpus(tmp_path: Path) -> None:
    kept = [f"package/module{number}.py" for number in range(40)]
    left_out = [
        "test/test_a.py",
        "site-packages/p.py",
        "encodings/cp1.py",
        "_sysconfigdata_x.py",
        "config-3/a.py",
    ]
    root = make_stdlib(tmp_path, kept + left_out)
    (root / "latin.py").write_bytes(b"# \xe9\n")
    (root / "empty.py").write_text("")
    found = {
        path.relative_to(root).as_posix() for path in training_files(root) + heldout_files(root)
    }
    assert found == set(kept)
    with_tests = training_files(root, tests=True)
    assert (root / "test/test_a.py" in with_tests) != is_held_out(PurePosixPath("test/test_a.py"))


def test_the_corpus_and_the_registry_load_without_torch() -> None:
    code = (
        "import sys, tllm_spec.zoo.corpus, tllm_spec.zoo.registry; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_zoo_name_resolves_to_a_complete_checkpoint(name: str) -> None:
    files = {path.name for path in resolve_model(name).iterdir()}
    assert files >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_local_folder_resolves_to_itself(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["zoo:nothing", "meta-llama/Llama-3.1-8B", "/no/such/folder", Path("zoo:llama")]
)
def test_an_unknown_model_is_refused_with_the_names_that_exist(name: str | Path) -> None:
    with pytest.raises(ValueError, match="existing local folder") as error:
        resolve_model(name)
    assert all(known in str(error.value) for known in (*NAMES, str(name)))


@pytest.mark.slow
def test_every_file_is_decoded_to_itself(tokenizer: Any) -> None:
    for path in heldout_files() + training_files()[::20]:
        text = read_source(path)
        assert tokenizer.decode(tokenizer.encode(text)) == text, path


@pytest.mark.parametrize(
    "text",
    ["", " ", "\r\n\r\n\t x", "naïve 漢字 🙂", "a , b . c ?", "\x00\x1f\x0c", "<s> </s> [INST]"],
)
def test_any_text_is_decoded_to_itself(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_token_is_added_to_a_prompt(tokenizer: Any) -> None:
    assert tokenizer.encode("import os") == tokenizer.encode("import os", add_special_tokens=False)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2048)


def test_a_line_break_and_its_indentation_are_one_token(tokenizer: Any) -> None:
    assert len(tokenizer.encode("\n        ")) == 1
    pieces = [
        tokenizer.decode([token])
        for token in tokenizer.encode("def f(self):\n    return self.name\n")
    ]
    assert pieces == ["def", " f", "(self", "):", "\n    ", "return", " self", ".name", "\n"]


def test_the_tokenizer_needs_few_tokens_on_held_out_code(heldout_tokens: Tensor) -> None:
    num_bytes = sum(len(read_source(path).encode()) for path in heldout_files())
    assert num_bytes / len(heldout_tokens) > 3.1


def test_the_chat_template_marks_both_roles_with_special_tokens(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "a = 1"},
        {"role": "assistant", "content": "b = 2"},
        {"role": "user", "content": "c"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|begin|><|user|>a = 1<|assistant|>b = 2<|endoftext|><|user|>c<|assistant|>"
    special = [token for token in tokenizer.encode(text) if token < 4]
    assert special == [0, 2, 3, 1, 2, 3]


def test_target_and_draft_share_one_tokenizer() -> None:
    files = [(resolve_model(name) / "tokenizer.json").read_bytes() for name in NAMES]
    assert hashlib.sha256(files[0]).digest() == hashlib.sha256(files[1]).digest()
