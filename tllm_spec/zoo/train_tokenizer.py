"""Trains the zoo's tokenizer and writes the corpus as token arrays.

`python -m tllm_spec.zoo.train_tokenizer --data FOLDER` writes tokenizer.json and
tokenizer_config.json to the model folders, and training.npz and heldout.npz to FOLDER, so that the
training machine needs no corpus. They hold uint16 tokens; a document is `<|begin|>`, its text and
`<|endoftext|>`."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tllm_spec.cli.version import option
from tllm_spec.zoo.corpus import heldout_files, read_source, training_files
from tllm_spec.zoo.registry import resolve_model

VOCAB_SIZE = 2048
BEGIN, END, USER, ASSISTANT = SPECIAL_TOKENS = (
    "<|begin|>",
    "<|endoftext|>",
    "<|user|>",
    "<|assistant|>",
)
MODEL_FOLDERS = tuple(resolve_model(name) for name in ("zoo:llama", "zoo:llama-draft"))

# In order: line breaks with the indentation after them; a word with one sign before it (` self`,
# `.name`); digits; signs; spaces without the one before the next word. Line breaks are first, so
# that a line break and the indentation after it can become one token.
PIECES = r"\s*[\r\n]+[ \t]*|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}{{ eos_token }}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BEGIN,
    "eos_token": END,
    "pad_token": END,
    "additional_special_tokens": [USER, ASSISTANT],
    "model_max_length": 2048,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


def train_tokenizer(texts: Iterator[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE: `decode(encode(text)) == text` for every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Does not use transformers: version 5 would name a class that version 4 lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(TOKENIZER_CONFIG, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def as_document(text: str) -> str:
    return f"{BEGIN}{text}{END}"


def as_conversation(text: str, rng: random.Random) -> str:
    """`text` cut at a line break: the user's part, then the assistant's. Trains the chat tokens."""
    lines = text.splitlines(keepends=True)
    cut = rng.randrange(1, max(2, min(len(lines), 40)))
    return f"{BEGIN}{USER}{''.join(lines[:cut])}{ASSISTANT}{''.join(lines[cut:])}{END}"


def training_documents(texts: list[str], conversation_one_in: int = 8) -> list[str]:
    """Every text as a document, and one in `conversation_one_in` also as a conversation;
    shuffled."""
    rng = random.Random(0)
    documents = [as_document(text) for text in texts]
    documents += [
        as_conversation(text, rng) for text in texts if rng.randrange(conversation_one_in) == 0
    ]
    rng.shuffle(documents)
    return documents


def save_tokens(file: Path, tokenizer: Tokenizer, documents: list[str], num_bytes: int) -> int:
    """Write `tokens` `[N]` uint16 and `num_bytes`, the size of the text; returns N."""
    encodings = tokenizer.encode_batch(documents)
    tokens = np.concatenate([np.asarray(encoding.ids, dtype=np.uint16) for encoding in encodings])
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, tokens=tokens, num_bytes=num_bytes)
    return len(tokens)


@click.command()
@option("--data", click.Path(path_type=Path), "Folder for the token arrays.", required=True)
@option("--stdlib", click.Path(path_type=Path, exists=True), "Default: this interpreter's.")
@option("--tests/--no-tests", bool, "Also train on CPython's test suite.", default=True)
def main(data: Path, stdlib: Path | None, tests: bool) -> None:
    # The test suite has unusual text (other scripts, broken code), so the vocabulary is without it.
    tokenizer = train_tokenizer(read_source(path) for path in training_files(stdlib))
    for folder in MODEL_FOLDERS:
        save_tokenizer(tokenizer, folder)
    training = [read_source(path) for path in training_files(stdlib, tests=tests)]
    heldout = [read_source(path) for path in heldout_files(stdlib)]
    for name, texts, documents in (
        ("training", training, training_documents(training)),
        ("heldout", heldout, [as_document(text) for text in heldout]),
    ):
        num_bytes = sum(len(text.encode()) for text in texts)
        num_tokens = save_tokens(data / f"{name}.npz", tokenizer, documents, num_bytes)
        print(f"{name}: {len(texts)} files, {num_bytes} bytes, {num_tokens} tokens")


if __name__ == "__main__":
    main()
