"""A grammar of JSON lines that never ends, for a vocabulary of any size without a tokenizer;
schemas of JSON objects; and how long a mask takes."""

import json
import re
import string
from random import Random
from time import perf_counter
from typing import Any

from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.grammar.xgrammar_source import MAX_WHITESPACE, compile_text
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
# Kind, grammar and a text of it.
FILLED: dict[str, tuple[str, str, str]] = {
    "JSON schema": (
        "json_schema",
        json.dumps(SCHEMA),
        '{"name": "a b", "size": 12, "tags": ["red"], "where": {"path": "/x", "ok": true}}',
    ),
    "any JSON": ("json_schema", "{}", '{"a": [1, 2.5e3, "x"], "b": {"c": null}}'),
    "words": ("regex", "[a-z]+( [a-z]+)*[.]", "hello big wide world."),
    "sums": ("grammar", SUMS, "a + (b + 12) + foo"),
    "nested repetitions": ("regex", "((a|[a-z])*( |[a-z]{2,5})*)*", "hello big wide world"),
}


class JsonLines:
    """Objects of `SCHEMA`, one after another. The vocabulary: characters, words and punctuation of
    Python source, then random words."""

    def __init__(self, vocab_size: int) -> None:
        import xgrammar  # an extra

        tokens = _tokens(vocabulary(vocab_size), [])
        text = json.dumps(SCHEMA)
        grammar = str(xgrammar.Grammar.from_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE))
        grammar = re.sub(r"\broot\b", "line", grammar)
        grammar += '\nroot ::= line "\\n" root | line "\\n"\n'
        self._compiled: Any = xgrammar.GrammarCompiler(tokens).compile_grammar(grammar)
        self._matcher: Any = xgrammar.GrammarMatcher

    def states(self, number: int) -> list[GrammarState]:
        return [GrammarState(self._matcher(self._compiled)) for _ in range(number)]


def fill_seconds(kind: str, grammar: str, text: str, size: int, turns: int) -> list[list[float]]:
    """Seconds of the masks after each character of a text, `size` tokens wide: when the grammar
    has just been read, and again. The fastest of some turns each."""
    import xgrammar

    words = ["<end>", *vocabulary(size - 1)]
    tokens, ids = _tokens(words, [0]), {word: number for number, word in enumerate(words)}
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
    packed = compile_text(compiler, kind, grammar).serialize_json()

    def walk(compiled: Any) -> list[float]:
        matcher, found = xgrammar.GrammarMatcher(compiled), list[float]()
        bitmask = xgrammar.allocate_token_bitmask(1, size)
        for character in text:
            start = perf_counter()
            matcher.fill_next_token_bitmask(bitmask)
            found.append(perf_counter() - start)
            assert matcher.accept_token(ids[character])
        return found

    first, again = list[list[float]](), list[list[float]]()
    for _ in range(turns):
        compiled = xgrammar.CompiledGrammar.deserialize_json(packed, tokens)
        first.append(walk(compiled))
        again.append(walk(compiled))
    return [list(map(min, zip(*walks, strict=True))) for walks in (first, again)]


def _tokens(words: list[str], end_ids: list[int]) -> Any:
    import xgrammar

    return xgrammar.TokenizerInfo(
        words, xgrammar.VocabType.RAW, vocab_size=len(words), stop_token_ids=end_ids
    )


def vocabulary(size: int) -> list[str]:
    text = "\n".join(map(read_source, heldout_files()))
    found = dict.fromkeys([*string.printable, *re.findall(r" ?\w+|[^\w\s]+|\s+", text)])
    random = Random(0)
    while len(found) < size:
        word = "".join(random.choices(string.ascii_lowercase, k=random.randint(3, 8)))
        found.setdefault(random.choice(("", " ")) + word)
    return list(found)[:size]
