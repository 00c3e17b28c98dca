"""Texts that match a regular expression, against Python's `re`."""

import json
import random
import re
from itertools import product
from typing import Any

import pytest

from tests.grammar.walks import accepts, compiled, random_text

ATOMS = ["a", "b", r"\"", r"\\", r"\n", r"\x01", ".", "[a-c]", r"[^a\"]", r"\d", r"[\s\\]"]
TEXTS = ["".join(each) for length in range(4) for each in product('ab"\\\n0', repeat=length)]
SEEDS = [range(40), pytest.param(range(40, 340), marks=pytest.mark.slow)]


def random_pattern(rng: random.Random, depth: int = 2) -> str:
    kind = rng.randrange(6 if depth else 1)
    if kind == 1:
        return "".join(random_pattern(rng, depth - 1) for _ in range(rng.randint(2, 3)))
    if kind == 2:
        return f"({random_pattern(rng, depth - 1)}|{random_pattern(rng, depth - 1)})"
    if kind == 3:
        count = rng.choice(["?", "*", "+", "{2}", "{1,2}", "{0,2}", "{2,}"])
        return f"(?:{random_pattern(rng, depth - 1)}){count}"
    return rng.choice(ATOMS)


def random_expression(rng: random.Random) -> str:
    start, end = rng.choice([("^", "$"), ("^", ""), ("", "$"), ("", "")])
    return f"{start}(?:{random_pattern(rng)}){end}"


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
def test_random_patterns_mean_what_they_mean_to_re(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        expression = random_expression(rng)
        python = expression.removesuffix("$") + r"\Z" * expression.endswith("$")
        found = compiled({"type": "string", "pattern": expression})
        whole = compiled(expression, "regex")
        for text in rng.sample(TEXTS, 40):
            written = json.dumps(text, ensure_ascii=False)
            assert accepts(found, written) == bool(re.search(python, text)), (expression, text)
            assert accepts(whole, text) == bool(re.fullmatch(python, text)), (expression, text)
        for text in filter(None, (random_text(found, rng) for _ in range(4))):
            assert re.search(expression, json.loads(text)), (expression, text)


@pytest.mark.parametrize(
    ("expression", "texts", "others"),
    [
        (r"^[A-Z]{2}(-[0-9]+)?$", ["AB", "AB-1"], ["AB1", "A"]),
        (r'^"[a-z]{1,4}"$', ['"ab"'], ["ab"]),
        (r"^[A-Z]:\\[a-z]{1,4}$", [r"C:\ab"], ["C:ab"]),
        (r"^a\tb\n$", ["a\tb\n"], ["ab"]),
        (r"^https?://", ["https://x", "http://"], ["ftp://"]),
        (r"(^|,)x(,|$)", ["x", "a,x", "x,b"], ["ax", "xb"]),
        (r"[^\x00-\x7f]", ["a日b", "😀"], ["a"]),
        (r"^.$", ["a", "😀", "\u2028"], ["\n"]),
        (r"^\w\d$", ["a1"], ["é1", "a٣"]),
        (r"^(?i)a\p{L}$", ["Aé"], ["b1"]),
    ],
)
def test_a_pattern_has_its_texts_and_no_others(
    expression: str, texts: list[str], others: list[str]
) -> None:
    grammar = compiled({"type": "string", "pattern": expression})
    assert [each for each in texts if not accepts(grammar, written(each))] == []
    assert [each for each in others if accepts(grammar, written(each))] == []


def written(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def test_a_regular_expression_is_for_the_whole_text() -> None:
    grammar = compiled(r'[a-c"/]{2}|^\d$', "regex")
    assert all(accepts(grammar, each) for each in ("bc", 'b"', "a/", "7"))
    assert not any(accepts(grammar, each) for each in ("b", "bcb", "xbc", "", "٣"))


@pytest.mark.parametrize(
    "expression", [r"(a)\1", r"\bword", "a(?=b)", "(?<!a)b", "(a", "a{2,1}", r"\ud800"]
)
def test_what_is_not_served_in_a_pattern_is_refused(expression: str) -> None:
    for kind, source in (("regex", expression), ("json_schema", {"pattern": expression})):
        with pytest.raises(ValueError, match=f"guided_decoding = {kind}: "):
            compiled(source, kind)  # type: ignore[arg-type] # each is a kind


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (r'root ::= "\x41\u0042" [\x43-\x45]', ["ABC"], ["ABF"]),
        (r'root ::= "a/\"b\\" [/\]\-^]', ['a/"b\\/', 'a/"b\\]', 'a/"b\\-', 'a/"b\\^'], []),
        ('root ::= "a" # one\n  | "é" # "two\n  | [^\\n"]{2}', ["a", "é", "bc"], ["b", '""']),
        ('root ::= a-b | a_C\na-b ::= "(" root ")"\na_C ::= [0-9]+', ["((12))"], ["()"]),
        ('root ::= ("a" | "b")* "c"?', ["", "abc", "c"], ["ca"]),
        ("root ::= .", ["x"], [""]),
    ],
)  # fmt: skip
def test_ebnf_has_its_texts_and_no_others(
    grammar: str, texts: list[str], others: list[str]
) -> None:
    made = compiled(grammar, "grammar")
    assert [each for each in texts if not accepts(made, each)] == []
    assert [each for each in others if accepts(made, each)] == []


@pytest.mark.parametrize("text", ["😀", "é", '"\\', "\n", "\u2028", "\x01", "a/b", "{x}"])
def test_a_choice_may_have_any_character(text: str) -> None:
    made: Any = compiled([text, "zz"], "choice")
    assert accepts(made, text) and accepts(made, "zz") and not accepts(made, text + "z")
