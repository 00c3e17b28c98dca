"""The zoo's text, tokenizer and weights, the quality of the pair on held-out files, and small
training runs.

Files come from this interpreter's standard library, so figures differ a little between Python
versions. The bounds hold for those of 3.10 to 3.13."""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from tllm_spec.models.config import ModelConfig
from tllm_spec.zoo import train
from tllm_spec.zoo.corpus import heldout_files, is_held_out, read_source, training_files
from tllm_spec.zoo.evaluate import rounds, summary
from tllm_spec.zoo.registry import resolve_model

NAMES = ("zoo:llama", "zoo:llama-draft")
ZOO = resolve_model("zoo:llama").parent
Models = tuple[LlamaForCausalLM, LlamaForCausalLM]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model("zoo:llama"))


@pytest.fixture(scope="module")
def heldout_tokens(tokenizer: Any) -> Tensor:
    """`[N]`: all held-out files, one after the other."""
    return torch.tensor(
        [token for path in heldout_files() for token in tokenizer.encode(read_source(path))]
    )


@pytest.fixture(scope="module")
def models() -> Models:
    target, draft = (
        AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.float32).eval()
        for name in NAMES
    )
    return target, draft


def spread(tokens: Tensor, num_windows: int, length: int) -> Tensor:
    """`[num_windows, length]` windows at even distances."""
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    return windows[:: len(windows) // num_windows][:num_windows]


def make_stdlib(root: Path, names: list[str]) -> Path:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n", encoding="utf-8")
    return root


def test_the_held_out_rule_is_pinned_by_the_paths_hash() -> None:
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


def test_tests_packages_and_build_outputs_are_no_part_of_the_corpus(tmp_path: Path) -> None:
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


def test_every_file_survives_the_tokenizer(tokenizer: Any) -> None:
    for path in heldout_files() + training_files()[::20]:
        text = read_source(path)
        assert tokenizer.decode(tokenizer.encode(text)) == text, path


@pytest.mark.parametrize(
    "text",
    ["", " ", "\r\n\r\n\t x", "naïve 漢字 🙂", "a , b . c ?", "\x00\x1f\x0c", "<s> </s> [INST]"],
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
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


def test_the_tokenizer_is_far_better_than_bytes_on_held_out_code(heldout_tokens: Tensor) -> None:
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


def test_all_weights_of_the_zoo_stay_under_16_mib() -> None:
    files = list(ZOO.rglob("*.safetensors"))
    assert len(files) >= len(NAMES)
    assert sum(file.stat().st_size for file in files) < 16 * 2**20


def test_the_draft_is_at_least_six_times_smaller(models: Models) -> None:
    target, draft = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert (target, draft) == (4_674_240, 737_920)
    assert draft * 6 <= target


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bf16_finite_and_tied(name: str) -> None:
    tensors, config = (
        read_weights(resolve_model(name)),
        read_json(resolve_model(name) / "config.json"),
    )
    assert "lm_head.weight" not in tensors
    assert all(
        tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in tensors.values()
    )
    assert tensors["model.embed_tokens.weight"].shape == (
        config["vocab_size"],
        config["hidden_size"],
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)


def read_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", NAMES)
def test_configurations_in_the_spelling_of_transformers_4_load_here_and_in_transformers(
    name: str,
) -> None:
    folder = resolve_model(name)
    raw, tokenizer = read_json(folder / "config.json"), read_json(folder / "tokenizer_config.json")
    assert raw.keys() >= {"torch_dtype", "rope_theta"} and raw.keys().isdisjoint(
        {"dtype", "rope_parameters"}
    )
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"

    ours, theirs = ModelConfig.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    assert (ours.dtype, theirs.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (ours.rope.theta, ours.eos_token_ids) == (raw["rope_theta"], (theirs.eos_token_id,))
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.decode([2, *loaded.encode("x = 1"), 3, 1], skip_special_tokens=True) == "x = 1"


@torch.inference_mode()
def test_both_models_predict_held_out_code_and_mostly_the_same(
    models: Models, heldout_tokens: Tensor
) -> None:
    """An untrained model has log(2048) = 7.6 nats a token. Agreement on the files' own text keeps
    out a pair that only repeats itself."""
    tokens = spread(heldout_tokens, 16, 512)
    target, draft = (model(tokens).logits for model in models)
    nats = [F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:]).item() for logits in (target, draft)]
    assert nats[0] < 2.4 and nats[1] < 2.8
    assert (target.argmax(-1) == draft.argmax(-1)).float().mean() > 0.6


@torch.inference_mode()
def test_the_draft_meets_the_quality_bar_on_held_out_files(
    models: Models, heldout_tokens: Tensor
) -> None:
    """The bar is an acceptance length of 2.2 with four draft tokens. Texts are short, before most
    loops."""
    target, draft = models
    prompts = spread(heldout_tokens, 24, 128)
    text = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=64, min_new_tokens=64
    )
    matches = (draft(text).logits[:, :-1].argmax(-1) == text[:, 1:])[:, 127:]
    accepted = [count for row in matches.tolist() for count in rounds(row, draft_len=4)]
    figures = summary(accepted, 4)
    assert figures["acceptance_length"] > 2.7
    assert figures["per_position"][0] > 0.65


def test_rounds_accept_up_to_the_first_difference_and_move_on_by_one_more() -> None:
    matches = [False, True, True, False, True, True, True, True, True, True, True]
    #          prompt's ^ 2 accepted + 1     ^ 4 accepted + 1          ^ too short
    assert rounds(matches, draft_len=4) == [2, 4]
    assert summary([2, 4], 4)["acceptance_length"] == 4.0
    assert summary([2, 4], 4)["per_position"] == [1.0, 1.0, 0.5, 0.5]


@torch.inference_mode()
def test_teacher_forced_matches_give_the_acceptance_of_real_draft_chains() -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 6, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    target, draft = (
        LlamaForCausalLM(LlamaConfig(num_hidden_layers=n, **shape)).eval() for n in (2, 1)
    )
    for parameter in [*target.parameters(), *draft.parameters()]:
        parameter.mul_(8)  # else a fresh model repeats one token
    text = greedy(target, torch.tensor([[1, 2, 3]]), 80)
    matches = (draft(text).logits[:, :-1].argmax(-1) == text[:, 1:])[0, 2:].tolist()

    expected, position = [], 4
    while position + 4 < text.shape[1]:
        chain = greedy(draft, text[:, :position], 4)[0, position:]
        same = (chain == text[0, position : position + 4]).long()
        expected.append(int(same.cumprod(0).sum()))
        position += expected[-1] + 1
    assert rounds(matches, draft_len=4) == expected
    assert len(set(expected)) > 1


def greedy(model: LlamaForCausalLM, tokens: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokens


@pytest.fixture(scope="module")
def tiny_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where a tiny target and draft learned to count to 50, with the shipped commands."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("training", "heldout"):
        np.savez(root / f"{name}.npz", tokens=np.arange(4096, dtype=np.uint16) % 50, num_bytes=8192)
    (root / "shape").mkdir()
    sizes = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = read_json(ZOO / "llama-draft" / "config.json") | sizes | {"intermediate_size": 32}
    (root / "shape" / "config.json").write_text(json.dumps(config))
    (root / "shape" / "generation_config.json").write_text("{}")

    common = [
        "--shape",
        root / "shape",
        "--steps",
        60,
        "--windows",
        4,
        "--length",
        64,
        "--warmup-steps",
        1,
    ]
    common += ["--dropout", 0, "--learning-rate", 1e-2]
    call(train.target, "--data", root, "--output", root / "target", *common)
    own = ["--self-text-minutes", 0, "--self-text-batch", 4, "--self-text-tokens", 16]
    call(
        train.draft,
        "--data",
        root,
        "--output",
        root / "draft",
        "--target",
        root / "target",
        *own,
        *common,
    )
    return root


def call(command: click.Command, *arguments: object) -> None:
    CliRunner().invoke(command, [*map(str, arguments), "--device", "cpu"], catch_exceptions=False)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_training_run_saves_bf16_weights_beside_its_shapes_own_configuration(
    tiny_runs: Path, name: str
) -> None:
    folder, shape = tiny_runs / name, tiny_runs / "shape"
    assert all(tensor.dtype == torch.bfloat16 for tensor in read_weights(folder).values())
    for file in ("config.json", "generation_config.json"):
        assert (folder / file).read_bytes() == (shape / file).read_bytes()
    history = read_json(folder / "metrics.json")["history"]
    assert history[-1]["step"] == 60 and history[-1]["tokens"] == 60 * 4 * 64


def test_both_trainings_learn(tiny_runs: Path) -> None:
    assert read_json(tiny_runs / "target" / "metrics.json")["loss"] < math.log(50) / 3
    assert read_json(tiny_runs / "draft" / "metrics.json")["agreement"] > 0.9
    folders = [
        "--target",
        tiny_runs / "target",
        "--draft",
        tiny_runs / "draft",
        "--output",
        tiny_runs,
    ]
    call(train.evaluate, "--data", tiny_runs, *folders, "--prompts", 2, "--new-tokens", 16)
    assert read_json(tiny_runs / "acceptance.json")["acceptance_length"] > 4
