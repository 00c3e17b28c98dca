"""Our grammars of forced calls accept the same calls as xgrammar's structural tags of the models,
where xgrammar is installed. What differs by decision is listed with the reason."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.chat_formats.samples import ARGUMENTS, FUNCTIONS, SAMPLES
from tests.chat_formats.test_call_grammars import accepts, family
from tests.chat_formats.test_families import rendered
from tests.grammar.walks import CHARACTERS

xgrammar = pytest.importorskip("xgrammar")
testing = pytest.importorskip("xgrammar.testing")
# Of Mistral and Python's lists xgrammar has none; of Harmony we force JSON.
OURS = {
    "deepseek_r1": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v31",
    "deepseek_v3_2": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "exaone": "hermes",
    "gemma_4": "gemma4",
    "glm_4_7": "glm47",
    "kimi": "kimi_k2",
    "llama": "llama3_json",
    "mimo": "qwen3_coder",
    "minimax": "minimax_m2",
    "qwen_3": "hermes",
    "qwen_3_5": "qwen3_coder",
    "qwen_3_coder": "qwen3_coder",
}
KNOWN = xgrammar.builtin_structural_tag._structural_tag_registry
TOOLS = [
    {"type": "function", "function": {"name": each.name, "parameters": dict(each.parameters)}}
    for each in FUNCTIONS
]
# Ours takes any white space between tags, none included, as models leave line ends out. xgrammar
# has the line ends of a model's template, and here those that no sample writes.
EMPTY_LINE = ("<function=now>\n</function>", "<function=now>\n\n</function>")
LINE_ENDS: dict[str, tuple[str, str]] = {
    "qwen_3_coder": EMPTY_LINE,
    "qwen_3_5": EMPTY_LINE,
    "deepseek_r1": ("end｜><｜tool▁call▁begin", "end｜>\n<｜tool▁call▁begin"),
}
AROUND = [(a, b) for a in ("", "\n", "\n\n", "\n</think>\n\n\n\n\n") for b in ("", "\n")]
# What llguidance excludes of JSON's strings: escapes of what may stand as it is, and U+007F.
NEEDLESS, DELETE = "/u", "\x7f"
# Of a call of Kimi K2; ours have four digits at most.
LONG_NUMBER = re.compile(r"functions\.\w+:\d{5}")
ROME: dict[str, Any] = {"city": "Rome", "days": 3}
# By name: calls, and whether they match.
CASES: dict[str, tuple[list[tuple[str, Any]], bool]] = {
    "one": ([("get_weather", ROME)], True),
    "all members": ([("get_weather", ARGUMENTS)], True),
    "no arguments": ([("now", {})], True),
    "two calls": ([("get_weather", ROME), ("now", {})], True),
    "signs": ([("get_weather", {"city": 'a "b" <c> {d}\n\\ 日本', "days": -3})], True),
    "empty text": ([("get_weather", {"city": "", "days": 3})], True),
    "wrong type": ([("get_weather", {"city": "Rome", "days": "many"})], False),
    "fraction": ([("get_weather", {"city": "Rome", "days": 1.5})], False),
    "wrong choice": ([("get_weather", {**ROME, "unit": "K"})], False),
    "missing member": ([("get_weather", {"city": "Rome"})], False),
    "another order": ([("get_weather", {"days": 3, "city": "Rome"})], False),
    "unknown member": ([("get_weather", {**ROME, "x": 1})], False),
    "unknown function": ([("other", {})], False),
    "no call": ([], False),
}


def tag_of(name: str, **options: Any) -> Any:
    return xgrammar.get_model_structural_tag(
        name, TOOLS, "required", reasoning="disabled", **options
    )


def theirs(name: str) -> Callable[[str], bool]:
    grammar = xgrammar.Grammar.from_structural_tag(tag_of(name))
    matches = testing._is_grammar_accept_string
    return lambda text: any(matches(grammar, before + text + after) for before, after in AROUND)


@pytest.mark.parametrize("name", [each for each in OURS if each in KNOWN])
def test_calls_match_as_those_of_xgrammars_tag(name: str) -> None:
    accepted = theirs(name)
    sample = next(each for each in SAMPLES if each.name == OURS[name])
    part = family(sample).calls_tag(FUNCTIONS, is_parallel=True)
    for case, (calls, is_right) in CASES.items():
        texts = [rendered(each, calls) for each in (sample.template, sample.dense) if each]
        texts += [texts[0].replace(*LINE_ENDS.get(name, ("", "")))]
        stripped = [each.strip() for each in texts]
        assert {accepts(part, each) for each in stripped} == {is_right}, case
        assert any(map(accepted, stripped)) == is_right, case


@pytest.mark.parametrize("name", [each for each in OURS if each in KNOWN])
def test_an_object_without_named_members_is_open_in_ours_only(name: str) -> None:
    """As JSON Schema says; xgrammar closes the objects of strict tools."""
    sample = next(each for each in SAMPLES if each.name == OURS[name])
    part = family(sample).calls_tag(FUNCTIONS, is_parallel=True)
    text = rendered(sample.template, [("now", {"a": "b"})]).strip()
    assert accepts(part, text) and not theirs(name)(text)


@pytest.mark.parametrize("name", [each for each in OURS if each in KNOWN])
def test_any_call_of_xgrammars_tag_is_one_of_ours(name: str) -> None:
    """Random walks through its masks, with one call each."""
    sample = next(each for each in SAMPLES if each.name == OURS[name])
    chosen = family(sample)
    part = chosen.calls_tag(FUNCTIONS, is_parallel=False)
    words = [each for each in [*CHARACTERS, *"｜▁"] if each != DELETE]
    info = xgrammar.TokenizerInfo([*words, "</s>"], stop_token_ids=[len(words)])
    compiler = xgrammar.GrammarCompiler(info)
    grammar = compiler.compile_structural_tag(tag_of(name, parallel_tool_calls=False))
    bitmask = xgrammar.allocate_token_bitmask(1, len(words) + 1)
    rng, num_found = random.Random(1), 0
    for _ in range(30):
        matcher, text = xgrammar.GrammarMatcher(grammar), ""
        while len(text) < 400 and not matcher.is_terminated():
            matcher.fill_next_token_bitmask(bitmask)
            row = bitmask[0].tolist()
            allowed = [i for i in range(len(words) + 1) if row[i // 32] >> (i % 32) & 1]
            if text.endswith("\\"):
                allowed = [i for i in allowed if words[i] not in NEEDLESS] or allowed
            dense = [i for i in allowed if i == len(words) or words[i] not in " \t\r\n"]
            closing = [i for i in dense if i < len(words) and words[i] in '<"}],|']
            token = rng.choice(closing if closing and rng.random() < 0.4 else dense or allowed)
            matcher.accept_token(token)
            text += words[token] if token < len(words) else ""
        if matcher.is_terminated():
            num_found += 1
            begin = chosen.begin or chosen.call_begin
            call = text[text.find(begin) :].strip()
            assert accepts(part, call) != bool(LONG_NUMBER.search(call)), call
    assert num_found >= 5, num_found
