"""The zoo's draft model with another tokenizer: other ids, SentencePiece's names, fewer tokens."""

import json
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models

from tllm_spec.text.tokenizer import bytes_of_token, load_tokenizer
from tllm_spec.zoo.registry import resolve_model

EMBEDDING = "model.embed_tokens.weight"
FIRST_WORD = 260  # after the special tokens and the bytes
NUM_REMOVED = 41


def write_draft_with_another_tokenizer(folder: Path, num_removed: int = NUM_REMOVED) -> Path:
    """Some tokens, and those that are no whole characters, are gone. Others that the target lacks
    are as many less 10. The embedding's rows move with the ids."""
    zoo = resolve_model("zoo:llama-draft")
    names, random = _names(), Random(0)
    words = [token for token in names if token >= FIRST_WORD]
    for token in random.sample(words, num_removed):
        del names[token]
    rows = [*names, *[-1] * (num_removed - 10)]
    random.shuffle(rows)
    weights = load_file(zoo / "model.safetensors")
    old = weights[EMBEDDING]
    new = torch.zeros(len(rows), old.shape[1], dtype=old.dtype)
    is_old = torch.tensor(rows) >= 0
    new[is_old] = old[[row for row in rows if row >= 0]]
    folder.mkdir(exist_ok=True)
    save_file(weights | {EMBEDDING: new}, folder / "model.safetensors", {"format": "pt"})
    end = rows.index(1)
    config = json.loads((zoo / "config.json").read_text())
    own = {"vocab_size": len(rows), "bos_token_id": rows.index(0), "eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config | own | {"pad_token_id": end}))
    _write_tokenizer(folder, [names.get(row, f"▁new{i}") for i, row in enumerate(rows)])
    return folder


def _names() -> dict[int, str]:
    """SentencePiece's names of the zoo's tokens that have one."""
    tokenizer, names = load_tokenizer("zoo:llama-draft"), dict[int, str]()
    for name, token in sorted(tokenizer.get_vocab().items(), key=lambda found: found[1]):
        written = bytes_of_token(tokenizer, token)
        assert written is not None
        text = written.decode(errors="replace")
        if "\ufffd" not in text:
            names[token] = name if name.startswith("<|") else text.replace(" ", "▁")
        elif len(written) == 1:
            names[token] = f"<0x{written[0]:02X}>"
    return names


def _write_tokenizer(folder: Path, names: list[str]) -> None:
    vocab = {name: i for i, name in enumerate(names)}
    assert len(vocab) == len(names)
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    raw.add_special_tokens([AddedToken(name) for name in names if name.startswith("<|")])
    raw.save(str(folder / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
