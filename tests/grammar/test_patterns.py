"""Texts that match a regular expression, against Python's `re`."""

import json
import random
import re
from itertools import product

import pytest

from tests.grammar.walks import accepts, compiled, random_text
from tllm_spec.grammar.regexes import texts_with_match, whole_texts
from tllm_spec.grammar.text_sets import TextSets
from tllm_spec.grammar.text_states import holds

ATOMS = ["a", "b", r"\"", r"\\", r"\n", r"\x01", ".", "[a-c]", r"[^a\"]", r"\d", r"\W", r"[\s\\]"]
LETTERS = 'ab"\\\n\x010é '
TEXTS = ["".join(each) for length in range(4) for each in product('ab"\\\n0', repeat=length)]


def random_pattern(rng: random.Random, depth: int = 2) -> str:
    kind = rng.randrange(6 if depth else 1)
    if kind == 1:
        return "".join(random_pattern(rng, depth - 1) for _ in range(rng.randint(2, 3)))
    if kind == 2:
        return f"({random_pattern(rng, depth - 1)}|{random_pattern(rng, depth - 1)})"
    if kind == 3:
        count = rng.choice(["?", "*", "+", "{2}", "{1,2}", "{0,2}", "{2,}", "*?"])
        return f"(?:{random_pattern(rng, depth - 1)}){count}"
    return rng.choice(ATOMS)


def random_expression(rng: random.Random) -> str:
    """With anchors and looks at the text, at the places where these are served."""
    seen = random_pattern(rng, 1)
    look = rng.choice(["", "", f"(?={seen})", f"(?!{seen})", f"(?!.*{seen})"])
    back = rng.choice(["", "", "", f"(?<!{rng.choice(ATOMS)})"])
    start, end = rng.choice([("^", "$"), ("^", ""), ("", "$"), ("", "")])
    return f"{start}{look}{random_pattern(rng)}{'' if look else back}{end}"


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 340), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_random_patterns_mean_what_they_mean_to_re(seeds: range) -> None:
    """By ECMA-262 and in ASCII: so no line end in `.`, which Python allows for some."""
    for seed in seeds:
        expression = random_expression(random.Random(seed))
        sets = TextSets()
        found, whole = texts_with_match(sets, expression), whole_texts(sets, expression)
        for text in TEXTS:
            # `$` of Python is also before a line end at the end of the text.
            python = expression.removesuffix("$") + r"\Z" * expression.endswith("$")
            assert holds(sets, found, text) == bool(re.search(python, text)), (expression, text)
            assert holds(sets, whole, text) == bool(re.fullmatch(python, text)), (expression, text)


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(40, 340), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_all_texts_of_a_pattern_in_a_schema_are_json_and_match(seeds: range) -> None:
    num_texts = 0
    for seed in seeds:
        rng = random.Random(seed)
        expression = random_expression(rng)
        try:
            grammar = compiled({"type": "string", "pattern": expression})
        except ValueError as error:
            assert "no text matches it" in str(error)
            continue
        for text in filter(None, (random_text(grammar, rng) for _ in range(8))):
            num_texts += 1
            assert re.search(expression, json.loads(text)), (expression, text)
        for text in TEXTS:
            if re.search(expression.replace("$", r"\Z"), text):
                assert accepts(grammar, json.dumps(text, ensure_ascii=False)), (expression, text)
    assert num_texts > 3 * len(seeds)


@pytest.mark.parametrize(
    ("expression", "texts", "others"),
    [
        (r"^[A-Z]{2}(-[0-9]+)?$", ["AB", "AB-1"], ["AB1", "A"]),
        (r'^"[a-z]{1,4}"$', ['"ab"'], ["ab"]),
        (r"^[A-Z]:\\[a-z]{1,4}$", [r"C:\ab"], ["C:ab"]),
        (r"^a\tb\n$", ["a\tb\n"], ["ab"]),
        (r"^(?!a)[a-c]{2}$", ["bc"], ["ab"]),
        (r"^(?=.*[0-9])(?!.*--)[a-z0-9-]+(?<!-)$", ["a-1"], ["a--1", "ab", "1-"]),
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["+1.5", "7"], ["+.", ""]),
        (r"^https?://", ["https://x", "http://"], ["ftp://"]),
        (r"(^|,)x(,|$)", ["x", "a,x", "x,b"], ["ax", "xb"]),
        (r"[^\x00-\x7f]", ["a日b", "😀"], ["a"]),
        (r"^.$", ["a", "😀"], ["\u2028", "\n"]),
        (r"^\s\W$", [" -", "\t😀"], ["\u00a0-", " é"]),
    ],
)
def test_a_pattern_has_its_texts_and_no_others(
    expression: str, texts: list[str], others: list[str]
) -> None:
    grammar = compiled({"type": "string", "pattern": expression})
    assert all(accepts(grammar, json.dumps(each, ensure_ascii=False)) for each in texts)
    assert not any(accepts(grammar, json.dumps(each, ensure_ascii=False)) for each in others)


def test_a_regular_expression_is_for_the_whole_text() -> None:
    grammar = compiled(r'(?!a)[a-c"]{2}|^\d$', "regex")
    assert all(accepts(grammar, each) for each in ("bc", 'b"', "7"))
    assert not any(accepts(grammar, each) for each in ("ab", "bcb", "xbc", ""))


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (r"(a)\1", "a reference to a group is not supported"),
        (r"\bword", "a word boundary is not supported"),
        (r"a^b", r"\^ or \$ in the middle of the expression is not supported"),
        (r"(a(?!b))+c", "look-ahead inside a group is only supported where"),
        (r"a(?=b)(?<!c)d", "look-behind is only supported where"),
        (r"(?i)a", "flags"),
        (r"a(?i:b)", "flags"),
        (r"\p{L}", "it is no regular expression: bad escape"),
        (r"(a", "it is no regular expression: missing"),
        (r"a{70000}", "a repetition of more than 65536 times"),
        (r"\ud800", "half of a surrogate pair"),
        (r"^(?!a)a$", "no text matches it"),
    ],
)
def test_what_is_not_served_in_a_pattern_is_refused_with_the_reason(
    expression: str, reason: str
) -> None:
    for kind, source in (("regex", expression), ("json_schema", {"pattern": expression})):
        with pytest.raises(ValueError, match=reason):
            compiled(source, kind)
