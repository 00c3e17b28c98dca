import hashlib
import json
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tllm_spec.zoo.corpus import heldout_files, is_held_out, read_source, training_files
from tllm_spec.zoo.evaluate import rounds, summary
from tllm_spec.zoo.registry import resolve_model

NAMES = ("zoo:llama", "zoo:llama-draft")
ZOO = resolve_model("zoo:llama").parent


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model("zoo:llama"))


def make_stdlib(root: Path, names: list[str]) -> Path:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n", encoding="utf-8")
    return root


def test_the_held_out_rule_is_pinned_by_the_paths_hash():
    held_out = [name for name in ("ast.py", "enum.py", "secrets.py") if is_held_out(PurePosixPath(name))]
    assert held_out == ["ast.py", "enum.py", "secrets.py"]
    assert not any(
        is_held_out(PurePosixPath(name)) for name in ("argparse.py", "asyncio/events.py", "json/__init__.py")
    )


def test_about_one_file_in_twenty_is_held_out_and_none_is_trained_on():
    training, heldout = training_files(), heldout_files()
    assert heldout and set(training).isdisjoint(heldout)
    assert set(training_files(tests=True)).isdisjoint(heldout)
    assert 0.03 < len(heldout) / (len(training) + len(heldout)) < 0.08


def test_tests_packages_and_build_outputs_are_no_part_of_the_corpus(tmp_path):
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
    found = {path.relative_to(root).as_posix() for path in training_files(root) + heldout_files(root)}
    assert found == set(kept)
    with_tests = training_files(root, tests=True)
    assert (root / "test/test_a.py" in with_tests) != is_held_out(PurePosixPath("test/test_a.py"))


def test_the_corpus_and_the_registry_load_without_torch():
    code = "import sys, tllm_spec.zoo.corpus, tllm_spec.zoo.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_zoo_name_resolves_to_a_complete_checkpoint(name):
    files = {path.name for path in resolve_model(name).iterdir()}
    assert files >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_local_folder_resolves_to_itself(tmp_path):
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["zoo:nothing", "meta-llama/Llama-3.1-8B", "/no/such/folder", Path("zoo:llama")]
)
def test_an_unknown_model_is_refused_with_the_names_that_exist(name):
    with pytest.raises(ValueError, match="existing local folder") as error:
        resolve_model(name)
    assert all(known in str(error.value) for known in (*NAMES, str(name)))


def test_every_file_survives_the_tokenizer(tokenizer):
    for path in heldout_files() + training_files()[::10]:
        text = read_source(path)
        assert tokenizer.decode(tokenizer.encode(text)) == text, path


@pytest.mark.parametrize(
    "text", ["", " ", "\r\n\r\n\t x", "naïve 漢字 🙂", "a , b . c ?", "\x00\x1f\x0c", "<s> </s> [INST]"]
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_token_is_added_to_a_prompt(tokenizer):
    assert tokenizer.encode("import os") == tokenizer.encode("import os", add_special_tokens=False)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2048)


def test_a_line_break_and_its_indentation_are_one_token(tokenizer):
    assert len(tokenizer.encode("\n        ")) == 1
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("def f(self):\n    return self.name\n")]
    assert pieces == ["def", " f", "(self", "):", "\n    ", "return", " self", ".name", "\n"]


def test_the_tokenizer_is_far_better_than_bytes_on_held_out_code(tokenizer):
    texts = [read_source(path) for path in heldout_files()]
    num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    assert sum(len(text.encode()) for text in texts) / num_tokens > 3.0


def test_the_chat_template_marks_both_roles_with_special_tokens(tokenizer):
    messages = [
        {"role": "user", "content": "a = 1"},
        {"role": "assistant", "content": "b = 2"},
        {"role": "user", "content": "c"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|begin|><|user|>a = 1<|assistant|>b = 2<|endoftext|><|user|>c<|assistant|>"
    special = [token for token in tokenizer.encode(text) if token < 4]
    assert special == [0, 2, 3, 1, 2, 3]


def test_target_and_draft_share_one_tokenizer():
    files = [(resolve_model(name) / "tokenizer.json").read_bytes() for name in NAMES]
    assert hashlib.sha256(files[0]).digest() == hashlib.sha256(files[1]).digest()


def test_all_weights_of_the_zoo_stay_under_16_mib():
    files = list(ZOO.rglob("*.safetensors"))
    assert len(files) >= len(NAMES)
    assert sum(file.stat().st_size for file in files) < 16 * 2**20


def test_the_draft_is_at_least_six_times_smaller():
    target, draft = (sum(parameter.numel() for parameter in load(name).parameters()) for name in NAMES)
    assert 4.4e6 < target < 5.0e6
    assert draft * 6 <= target


def load(name: str) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.float32).eval()


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bf16_finite_and_tied(name):
    with safe_open(resolve_model(name) / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    assert "lm_head.weight" not in tensors
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in tensors.values())
    config = json.loads((resolve_model(name) / "config.json").read_text())
    assert tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])


@pytest.fixture(scope="module")
def models():
    return tuple(load(name) for name in NAMES)


@torch.inference_mode()
def test_the_target_predicts_held_out_code(models, tokenizer):
    """Below 3.0 nats a token (1.3 bits a byte); an untrained model has log(2048) = 7.6."""
    texts = [read_source(path) for path in heldout_files()]
    tokens = torch.cat([torch.tensor(tokenizer.encode(text)) for text in texts])
    windows = tokens[: len(tokens) // 1024 * 1024].view(-1, 1024)[::10]
    loss = models[0](input_ids=windows, labels=windows).loss.item()
    assert loss < 3.0


@torch.inference_mode()
def test_the_draft_meets_the_quality_bar_on_held_out_files(models, tokenizer):
    """An acceptance length of at least 2.2 with four draft tokens. Agreement on the files' own text keeps
    out a pair that only repeats itself."""
    target, draft = models
    texts = [read_source(path) for path in heldout_files()]
    windows = torch.tensor([ids[:1024] for ids in map(tokenizer.encode, texts) if len(ids) >= 1024])
    best = [model(windows).logits.argmax(-1) for model in models]
    assert (best[0] == best[1]).float().mean() > 0.35

    prompts = windows[:, :128]
    text = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=96, min_new_tokens=96
    )
    matches = (draft(text).logits[:, :-1].argmax(-1) == text[:, 1:])[:, 127:]
    accepted = [count for row in matches.tolist() for count in rounds(row, draft_len=4)]
    assert summary(accepted, 4)["acceptance_length"] >= 2.2


def test_rounds_accept_up_to_the_first_difference_and_move_on_by_one_more():
    matches = [False, True, True, False, True, True, True, True, True, True, True]
    #          prompt's ^ 2 accepted + 1     ^ 4 accepted + 1          ^ too short
    assert rounds(matches, draft_len=4) == [2, 4]
    assert summary([2, 4], 4)["acceptance_length"] == 4.0
    assert summary([2, 4], 4)["per_position"] == [1.0, 1.0, 0.5, 0.5]


@torch.inference_mode()
def test_teacher_forced_matches_give_the_acceptance_of_real_draft_chains():
    torch.manual_seed(0)
    shape = {"vocab_size": 6, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    target, draft = (LlamaForCausalLM(LlamaConfig(num_hidden_layers=n, **shape)).eval() for n in (2, 1))
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
