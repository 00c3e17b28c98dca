"""A grammar of JSON lines that never ends, for a vocabulary of any size without a tokenizer; and
schemas of JSON objects."""

import json
import re
import string
from random import Random
from typing import Any

from tllm_spec.grammar_child import MAX_WHITESPACE
from tllm_spec.grammar_state import GrammarState
from tllm_spec.zoo.corpus import heldout_files, read_source

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "where": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "ok": {"type": "boolean"}},
            "required": ["path", "ok"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "size", "tags", "where"],
    "additionalProperties": False,
}


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


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


class JsonLines:
    """Objects of `SCHEMA`, one after another. The vocabulary: characters, words and punctuation of
    Python source, then random words."""

    def __init__(self, vocab_size: int) -> None:
        import xgrammar  # an extra

        tokens = xgrammar.TokenizerInfo(
            vocabulary(vocab_size), xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=[]
        )
        text = json.dumps(SCHEMA)
        grammar = str(xgrammar.Grammar.from_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE))
        grammar = re.sub(r"\broot\b", "line", grammar)
        grammar += '\nroot ::= line "\\n" root | line "\\n"\n'
        self._compiled: Any = xgrammar.GrammarCompiler(tokens).compile_grammar(grammar)
        self._matcher: Any = xgrammar.GrammarMatcher

    def states(self, number: int) -> list[GrammarState]:
        return [GrammarState(self._matcher(self._compiled)) for _ in range(number)]


def vocabulary(size: int) -> list[str]:
    text = "\n".join(map(read_source, heldout_files()))
    found = dict.fromkeys([*string.printable, *re.findall(r" ?\w+|[^\w\s]+|\s+", text)])
    random = Random(0)
    while len(found) < size:
        word = "".join(random.choices(string.ascii_lowercase, k=random.randint(3, 8)))
        found.setdefault(random.choice(("", " ")) + word)
    return list(found)[:size]
