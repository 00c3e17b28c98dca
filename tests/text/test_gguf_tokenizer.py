"""GGUF files of each served kind of vocabulary give the tokens of transformers for the same file,
which does not read it."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from tllm_spec.text.gguf_tokenizer import gguf_tokenizer
from tllm_spec.text.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

LEARNED = [
    "the quick brown fox jumps over the lazy dog 12345 don't we'll\n\n def f(x):\n    return x**2",
    "你好世界 naïve café hello hello the the fox returns   return",
] * 3
TEXTS = [
    *(
        "",
        "a",
        " a",
        "  hello  fox\n\n\n def f(x):\n\treturn  x**2 - 12345.678",
        "\r\n \r\n\t\t 0x1F",
    ),
    *("你好世界，naïve café 😀👩‍👩‍👧", "don't we'll I'VE", "½ ² ٣٤ Ⅷ", "the▁fox ▁▁ x", "x" * 300),
    "<|begin|>the fox<|end|> <think> x <tool>y<s> </s><start_of_turn>user\n<bos>",
]
LETTERS = "the foxrun 12'\n\t你好😀é<>|_▁"
CHAT = [{"role": "user", "content": "hello 你好"}]
TEMPLATE = "<|begin|>{{ messages[0].content }}<|end|>"
# 5.20, the newest one for Python 3.10, leaves out the first token that such a file asks for.
ADDS_ENDS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)


def texts() -> list[str]:
    generator = random.Random(7)
    return TEXTS + ["".join(generator.choices(LETTERS, k=40)) for _ in range(100)]


def begun(path: Path, architecture: str, size: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_vocab_size(size)
    if architecture == "gemma3":
        writer.add_sliding_window(8)
    writer.add_tensor("token_embd.weight", np.zeros((size, 32), np.float32))
    return writer


def ended(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_level(path: Path, architecture: str, pre: str, *, begins: bool = False) -> None:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        LEARNED,
        trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=alphabet,
            show_progress=False,
            special_tokens=["<|endoftext|>"],
        ),
    )
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    size = len(tokens)
    writer = begun(path, architecture, size + 3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, "<|begin|>", "<|end|>", "<think>"])
    writer.add_token_types([3, *[1] * (size - 1), 3, 3, 4])
    writer.add_token_merges([" ".join(each) for each in model["merges"]])
    writer.add_bos_token_id(size)
    writer.add_eos_token_id(size + 1)
    writer.add_add_bos_token(begins)
    writer.add_chat_template(TEMPLATE)
    ended(writer)


WORDS = [
    *("▁the", "▁fox", "▁f", "ox", "re", "▁return", "turn", "▁re", "th", "▁t", "he", "ell", "ll"),
    *("hello", "▁hello", "▁h", "qu", "ick", "你好"),
]


def sentencepiece(path: Path, architecture: str) -> None:
    is_gemma = architecture == "gemma3"
    ends = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"] if is_gemma else ["<unk>", "<s>", "</s>"]
    spaces = ["  ", "    "] if is_gemma else ["▁▁", "▁▁▁▁"]
    letters = sorted({*"".join(LEARNED), "▁"} - set(" \n"))
    own = [*spaces, *WORDS, *letters]
    tokens = [*ends, *(f"<0x{byte:02X}>" for byte in range(256)), *own, "<start_of_turn>", "<tool>"]
    control = [2 if token == "<unk>" else 3 for token in ends]
    scores = [0.0] * (len(tokens) - len(own) - 2) + [-float(n) for n in range(len(own) + 2)]
    writer = begun(path, architecture, len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([*control, *[6] * 256, *[1] * len(own), 3, 4])
    writer.add_bos_token_id(tokens.index("<bos>" if is_gemma else "<s>"))
    writer.add_eos_token_id(tokens.index("<eos>" if is_gemma else "</s>"))
    writer.add_unk_token_id(tokens.index("<unk>"))
    if is_gemma:
        writer.add_pad_token_id(0)
    ended(writer)


KINDS: dict[str, Callable[[Path], None]] = {
    "llama-bpe": lambda path: byte_level(path, "llama", "llama-bpe", begins=True),
    "gpt-2": lambda path: byte_level(path, "llama", "gpt-2"),
    "smollm": lambda path: byte_level(path, "llama", "smollm"),
    "qwen2": lambda path: byte_level(path, "qwen2", "qwen2"),
    "qwen3": lambda path: byte_level(path, "qwen3", "qwen2"),
    "llama": lambda path: sentencepiece(path, "llama"),
    "gemma3": lambda path: sentencepiece(path, "gemma3"),
}


def of_transformers(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_served_kind_gives_transformers_tokens_without_its_reader(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    KINDS[kind](path)
    theirs = of_transformers(path)
    with monkeypatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", None)
        ours: Any = load_tokenizer(path)
    assert ours.get_vocab() == theirs.get_vocab()
    names = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id", "chat_template")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    for text in texts():
        for ends in (True, False) if ADDS_ENDS else (False,):
            tokens = ours.encode(text, add_special_tokens=ends)
            assert tokens == theirs.encode(text, add_special_tokens=ends), text
            for skips in (True, False):
                found = ours.decode(tokens, skip_special_tokens=skips)
                assert found == theirs.decode(tokens, skip_special_tokens=skips)
    if ours.chat_template:
        assert ours.apply_chat_template(CHAT) == theirs.apply_chat_template(CHAT)


def test_another_kind_is_left_to_transformers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    byte_level(path, "llama", "tekken")
    assert gguf_tokenizer(path) is None
    found = load_tokenizer(path)
    assert found.encode("don't 12345") == of_transformers(path).encode("don't 12345")


def test_a_file_that_contradicts_itself_is_refused_by_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = begun(path, "llama", 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.add_token_merges(["a c"])
    ended(writer)
    with pytest.raises(ValueError, match=r"no tokenizer can be loaded from .*model\.gguf"):
        load_tokenizer(path)
