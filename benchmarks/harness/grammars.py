"""A grammar of JSON lines that never ends, for a vocabulary of any size without a model; schemas of
JSON objects; and how long masks take."""

import json
import re
import string
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from random import Random
from time import perf_counter
from typing import Any

import torch

from tllm_spec.chat_formats.chat_format import Function
from tllm_spec.chat_formats.qwen import HERMES
from tllm_spec.executor.sampling.grammar_masks import NUM_THREADS
from tllm_spec.grammar.grammar_state import CompiledGrammar, GrammarState
from tllm_spec.grammar.grammar_text import compiled, json_grammar
from tllm_spec.grammar.guided_decoding import GrammarSource, Kind
from tllm_spec.zoo.corpus import heldout_files, read_source


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMA = _object(
    {
        "name": {"type": "string"},
        "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "where": _object({"path": {"type": "string"}, "ok": {"type": "boolean"}}),
    }
)
NAMES = ("name", "file_name", "line_number", "is_valid", "description", "count", "created_at")
KINDS: tuple[dict[str, Any], ...] = (
    {"type": "integer", "minimum": 0, "maximum": 400},
    {"type": "boolean"},
    {"type": "string", "maxLength": 6},
    {"enum": ["pending", "running", "finished"]},
)


def random_object(seed: int) -> dict[str, Any]:
    """Three properties, of which one is an object of two."""
    random = Random(seed)
    names = random.sample(NAMES, 3)
    inner = _object({name: random.choice(KINDS) for name in random.sample(NAMES, 2)})
    return _object({name: random.choice(KINDS) for name in names[:2]} | {names[2]: inner})


SUMS = 'root ::= term | root " + " term\nterm ::= [a-z]+ | [0-9]+ | "(" root ")"'
END = 0  # the end token
LONG = {name: {"type": "string", "maxLength": 200} for name in NAMES[:3]}
THOUGHTS = {"type": "reasoning", "section": "inside", "begin": "<think>", "end": "</think>"}
REASONED = {
    "type": "sequence",
    "elements": [THOUGHTS, {"type": "json_schema", "json_schema": SCHEMA}],
}
CALLS = HERMES.answer_tag([Function("place", SCHEMA, is_strict=True)], is_parallel=True)
# Kind and grammar.
FILLED: dict[str, tuple[Kind, str]] = {
    "JSON schema": ("json_schema", json.dumps(SCHEMA)),
    "any JSON object": ("json_schema", '{"type": "object"}'),
    "long bounded strings": ("json_schema", json.dumps(_object(LONG))),
    "words": ("regex", "[a-z]+( [a-z]+)*[.]"),
    "sums": ("grammar", SUMS),
    "inside reasoning": ("structural_tag", json.dumps({"format": REASONED})),
    "text with calls": ("structural_tag", json.dumps({"format": CALLS})),
    "nested repetitions": ("regex", "((a|[a-z])*( |[a-z]{2,5})*)*"),
}


class JsonLines:
    """Objects of `SCHEMA`, one after another."""

    def __init__(self, vocab_size: int) -> None:
        from llguidance import LLMatcher  # an extra

        tokenizer = masks_tokenizer(vocab_size)
        made = [{"lark_grammar": 'start: (@line "\\n")+'}, {"name": "line", **json_grammar(SCHEMA)}]
        start: Any = LLMatcher(tokenizer, json.dumps({"grammars": made}))
        source = GrammarSource("json_schema", json.dumps(SCHEMA))
        self._grammar = CompiledGrammar(source, start, frozenset({END}), -(-vocab_size // 32))

    def states(self, number: int) -> list[GrammarState]:
        return [GrammarState(self._grammar) for _ in range(number)]


def walks_of(
    kind: Kind,
    text: str,
    size: int,
    number: int,
    num_tokens: int,
    draft_len: int = 0,
    seed: int = 0,
) -> tuple[list[float], list[float]]:
    """Seconds of single masks, and of the masks of a round of `number` texts with windows of
    `draft_len` drafts, all `size` tokens wide. Texts of random tokens, half of them the first ones:
    characters. The drafts are the texts' own."""
    source, tokenizer = GrammarSource(kind, text), masks_tokenizer(size)
    start = compiled(source, tokenizer)
    grammar = CompiledGrammar(source, start, frozenset({END}), -(-size // 32))
    texts = [_random_text(grammar, size, num_tokens, seed + i) for i in range(number)]
    states, masks, rounds = [GrammarState(grammar) for _ in texts], list[float](), list[float]()
    rows = torch.full((number, 1 + draft_len, -(-size // 32)), -1, dtype=torch.int32)
    shortest = min(map(len, texts))
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for position in range(0, shortest, 1 + draft_len):

            def fill(i: int, position: int = position) -> None:
                states[i].read(texts[i][:position], 0)
                window = [0, *texts[i][position : position + draft_len]]
                began = perf_counter()
                states[i].fill(window, range(-1, len(window) - 1), rows[i].fill_(-1))
                masks.append((perf_counter() - began) / len(window))

            began = perf_counter()
            parts = [range(first, number, NUM_THREADS) for first in range(NUM_THREADS)]
            list(threads.map(lambda part: [fill(i) for i in part], parts))
            rounds.append(perf_counter() - began)
    return masks, rounds


def _random_text(grammar: CompiledGrammar, size: int, num_tokens: int, seed: int) -> list[int]:
    """It ends where no other token can follow."""
    state, random, text = GrammarState(grammar), Random(seed), list[int]()
    row = torch.full((1, grammar.num_words), -1, dtype=torch.int32)
    while len(text) < num_tokens:
        state.fill([0], [-1], row.fill_(-1))
        bits = row.view(torch.uint8).unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
        allowed = bits.flatten()[:size].nonzero().flatten().tolist()
        if not (allowed := [each for each in allowed if each != END]):
            break
        first = [each for each in allowed if each <= len(string.printable)]
        text.append(random.choice(first if first and random.random() < 0.5 else allowed))
        state.read(text, 0)
    return text


@cache
def masks_tokenizer(size: int) -> Any:
    """llguidance's, of a BPE tokenizer whose tokens are characters, words and pieces of Python
    source."""
    from llguidance import LLTokenizer  # an extra

    return LLTokenizer(_bpe(size), n_vocab=size, eos_token=[END])


def _bpe(size: int) -> str:
    """A tokenizer of `tokenizers`, trained on Python source and random words, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "show_progress": False, "max_token_length": 16}
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<end>"], **options)
    made.train_from_iterator(_texts(size), trainer)
    text: str = made.to_str()
    return text


def _texts(size: int) -> Sequence[str]:
    return [*map(read_source, heldout_files()), *vocabulary(size)]


def vocabulary(size: int) -> list[str]:
    text = "\n".join(map(read_source, heldout_files()))
    found = dict.fromkeys([*string.printable, *re.findall(r" ?\w+|[^\w\s]+|\s+", text)])
    random = Random(0)
    while len(found) < size:
        word = "".join(random.choices(string.ascii_lowercase, k=random.randint(3, 8)))
        found.setdefault(random.choice(("", " ")) + word)
    return list(found)[:size]
