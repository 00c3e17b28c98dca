"""The tokenizer of a GGUF file, made of the header that `gguf_file.py` reads.

transformers reads the file once more, by the package `gguf`, which takes many seconds. It gives the
same tokens, except that it adds tokens of its own beyond the vocabulary of some files. Sources: the
keys are those of llama.cpp's files; the expressions that split a text are those of the published
`tokenizer.json` of the vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from tllm_spec.models.formats.gguf_file import read_gguf

PREFIX = "tokenizer.ggml."
ARRAYS = tuple(f"{PREFIX}{name}" for name in ("tokens", "scores", "token_type", "merges"))
CONTROL, USER_DEFINED = 3, 4  # of token_type
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # as SentencePiece writes it
NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENGLISH + r"\p{N}{1,3}" + _REST
_QWEN2 = _ENGLISH + r"\p{N}" + _REST
# How a text is split before the merges, by `tokenizer.ggml.pre`; None: as for GPT-2.
SPLITS: Mapping[str | None, str | None] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys((None, "default", "gpt-2", "smollm"), None),
}
ByteLevel = pre_tokenizers.ByteLevel


def gguf_tokenizer(path: Path) -> Any:
    """The transformers tokenizer of a file, or None where its kind is not built here. Raises
    ValueError for a file that is not readable or contradicts itself."""
    metadata = read_gguf(path, ARRAYS).metadata
    own = {
        key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)
    }
    build = _builder(metadata.get("general.architecture"), own)
    if build is None or not isinstance(own.get("tokens"), list):
        return None
    tokenizer = build(own)
    _add_tokens(tokenizer, own)
    named = {
        name: own["tokens"][number]
        for name, key in NAMED.items()
        if isinstance(number := own.get(key), int) and number < len(own["tokens"])
    }
    # Files of SentencePiece's vocabularies need not say that a text begins with a token.
    begins = own.get("add_bos_token", own["model"] == "llama")
    tokenizer.post_processor = _ends(
        tokenizer,
        named.get("bos_token") if begins else None,
        named.get("eos_token") if own.get("add_eos_token", False) else None,
    )
    from transformers import PreTrainedTokenizerFast  # heavy

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **named,
    )


def _builder(
    architecture: object, own: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], Tokenizer] | None:
    kind = own.get("model")
    if kind == "gpt2" and own.get("pre") in SPLITS and "merges" in own:
        return _byte_level
    if kind != "llama" or ("scores" not in own and "merges" not in own):
        return None
    return {"llama": _llama, "gemma3": _gemma}.get(str(architecture))


def _byte_level(own: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE. A token that is written in other characters is spelled in bytes."""
    letters, in_bytes = set(ByteLevel.alphabet()), ByteLevel(False, use_regex=False)
    vocab = {
        token if letters.issuperset(token) else in_bytes.pre_tokenize_str(token)[0][0]: number
        for number, token in enumerate(own["tokens"])
    }
    merges = [tuple(merge.split(" ")) for merge in own["merges"]]
    model = models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="")
    tokenizer = Tokenizer(model)
    split = SPLITS[own.get("pre")]
    tokenizer.pre_tokenizer = ByteLevel(False)
    if split is not None:
        parts = [pre_tokenizers.Split(Regex(split), "isolated")]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _llama(own: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece's BPE, which begins a text with a space."""
    tokens: list[str] = own["tokens"]
    scores = dict(zip(tokens, own.get("scores", ()), strict=False))
    tokenizer = _sentencepiece(tokens, own.get("merges"), scores)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return tokenizer


def _gemma(own: Mapping[str, Any]) -> Tokenizer:
    """The same without that space. The order of its tokens, not their scores, is that of the
    merges; runs of spaces are written as they are."""
    tokens = [
        SPACE * len(token) if " " in token and not token.strip() else token
        for token in own["tokens"]
    ]
    order = {token: -number for number, token in enumerate(tokens)}
    tokenizer = _sentencepiece(tokens, own.get("merges"), order, unk_token="<unk>")
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _sentencepiece(
    tokens: Sequence[str], merges: Sequence[str] | None, scores: Mapping[str, float], **options: Any
) -> Tokenizer:
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs = _merges(vocab, scores) if merges is None else [_pair(each) for each in merges]
    return Tokenizer(models.BPE(vocab, pairs, fuse_unk=True, byte_fallback=True, **options))


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two, the best token first; of equal ones the longer left part
    first, then that whose parts come first."""
    found = []
    for token, score in scores.items():
        ways = [
            (vocab[left], vocab[right], left, right)
            for cut in range(1, len(token))
            if (left := token[:cut]) in vocab and (right := token[cut:]) in vocab
        ]
        ways.sort()
        found += [(score, len(left), len(right), left, right) for *_, left, right in ways]
    found.sort(key=lambda each: each[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_tokens(tokenizer: Tokenizer, own: Mapping[str, Any]) -> None:
    """Control tokens and those of the user are never cut into pieces. A control token of a
    byte-level vocabulary that has other characters is a mistake of the file, and left out."""
    kinds = own.get("token_type") or ()
    tokens = list(zip(own["tokens"], kinds, strict=False))
    letters = set(ByteLevel.alphabet()) if own["model"] == "gpt2" else None
    vocab = tokenizer.get_vocab()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in tokens
            if kind == CONTROL and (letters is None or letters >= set(token))
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, kind in tokens
            if kind == USER_DEFINED and token in vocab
        ]
    )


def _ends(tokenizer: Tokenizer, begin: str | None, end: str | None) -> TemplateProcessing:
    """Adds the tokens at both ends of a text."""
    first, second = (
        [*([f"{begin}:{n}"] if begin else []), text, *([f"{end}:{n}"] if end else [])]
        for n, text in enumerate(("$A:0", "$B:1"))
    )
    ids = [(token, tokenizer.token_to_id(token)) for token in (begin, end) if token]
    return TemplateProcessing(single=first, pair=[*first, *second], special_tokens=ids)
