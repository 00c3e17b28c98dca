"""Where reasoning begins and ends: what a prompt's end says, and markers that are tokens."""

from typing import Any

import pytest

from tests.chat_formats.joined import joined
from tests.chat_formats.samples import FUNCTIONS, SAMPLES
from tllm_spec.chat_formats.marked_text import MarkedText, unsplit
from tllm_spec.chat_formats.names import (
    AUTO_REASONING,
    AUTO_TOOLS,
    REASONING,
    TOOLS,
    name_of,
    tools_format,
)
from tllm_spec.chat_formats.pieces import Arguments, CallStart, Piece, PlainText, Reasoning, Text
from tllm_spec.chat_formats.reasoning import ReasoningParser
from tllm_spec.outputs import CompletionOutput
from tllm_spec.text.reasoning import Section, marker_tokens, section_after
from tllm_spec.text.tokenizer import load_tokenizer

TURN = "<|im_start|>assistant\n"


def new_tokenizer(special: list[str], plain: list[str]) -> Any:
    tokenizer: Any = load_tokenizer("zoo:llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *special]})
    tokenizer.add_tokens(plain)
    return tokenizer


@pytest.mark.parametrize("name", sorted(REASONING))
@pytest.mark.parametrize("kind", ["text", "special", "plain"])
def test_a_prompt_says_whether_its_answer_begins_inside_reasoning(name: str, kind: str) -> None:
    form = REASONING[name]
    tokens = [form.opener.removesuffix("thought\n"), form.closer]
    tokenizer = new_tokenizer(
        tokens if kind == "special" else [], tokens if kind == "plain" else []
    )
    markers = marker_tokens(tokenizer, (form.opener, form.closer))
    opened, closed = form.opener, f"{form.opener}\n\n{form.closer}\n\n"
    cases: list[tuple[str, Section]] = [
        (TURN, "undecided"),
        (f"{TURN}{opened}\n", "inside"),
        (f"{TURN}{closed}", "over"),
        (f"{opened}a{form.closer}b{TURN}", "undecided"),
        (f"What is {form.closer}?{TURN}{opened}", "inside"),
        (f"What is {form.opener}?{TURN}", "undecided"),
    ]
    for prompt, section in cases:
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        assert section_after(ids, form, markers, tokenizer) == section, prompt


def test_an_opener_that_is_a_token_is_not_the_same_text_in_other_tokens() -> None:
    tokenizer = new_tokenizer([], ["<think>", "</think>"])
    markers = marker_tokens(tokenizer, ("<think>", "</think>"))
    parts = [
        token
        for part in (TURN, "<", "think>")
        for token in tokenizer.encode(part, add_special_tokens=False)
    ]
    assert section_after(parts, REASONING["qwen3"], markers, tokenizer) == "undecided"


def read(name: str, section: Section, text: str, size: int = 3) -> list[Piece]:
    parser = ReasoningParser(
        TOOLS["glm45" if name == "glm45" else "hermes"][0].new_parser(FUNCTIONS),
        REASONING[name],
        section,
    )
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    return joined([piece for part in parts for piece in parser.feed(part)] + parser.finish())


@pytest.mark.parametrize("size", [1, 3, 100])
def test_sections_of_reasoning(size: int) -> None:
    cases: list[tuple[str, Section, str, list[Piece]]] = [
        ("qwen3", "inside", "a</think>\n\nb", [Reasoning("a"), Text("b")]),
        ("deepseek_r1", "undecided", "a</think>b", [Text("a</think>b")]),
        ("qwen3", "undecided", "\n<think>a</think>b", [Reasoning("a"), Text("b")]),
        ("qwen3", "over", "</think>b", [Text("</think>b")]),
        ("qwen3", "over", "<think>b", [Text("<think>b")]),
        ("qwen3", "inside", "all of it", [Reasoning("all of it")]),
        ("qwen3", "inside", "a</thi", [Reasoning("a</thi")]),
        # An empty section before the real one.
        ("qwen3", "undecided", "<think>\n</think>\n<think>a</think>b", [Reasoning("a"), Text("b")]),
        ("qwen3", "inside", "\n</think><think>a</think>b", [Reasoning("a"), Text("b")]),
        ("qwen3", "inside", "a</think><think>b", [Reasoning("a"), Text("<think>b")]),
        # A call ends reasoning in some families.
        (
            "glm45",
            "inside",
            "I call <tool_call>now</tool_call>",
            [Reasoning("I call"), CallStart("now"), Arguments("{}")],
        ),
        (
            "qwen3",
            "inside",
            "I call <tool_call>now</tool_call>",
            [Reasoning("I call <tool_call>now</tool_call>")],
        ),
        ("gemma4", "undecided", "<|channel>thought\na<channel|>b", [Reasoning("a"), Text("b")]),
        ("mistral", "undecided", "[THINK]a[/THINK]b", [Reasoning("a"), Text("b")]),
    ]
    for name, section, text, expected in cases:
        assert read(name, section, text, size) == expected, (name, section, text)


@pytest.mark.parametrize("kind", ["special", "plain"])
def test_only_the_token_is_a_marker_where_there_is_one(kind: str) -> None:
    names = ["<think>", "</think>"]
    tokenizer = new_tokenizer(names if kind == "special" else [], names if kind == "plain" else [])
    tokens = marker_tokens(tokenizer, names)
    assert sorted(tokens.values()) == sorted(names)

    def encoded(*parts: str) -> list[int]:
        return [t for each in parts for t in tokenizer.encode(each, add_special_tokens=False)]

    ids = encoded("<think>", "say <", "/think> 日本", "</think>", "yes <", "think>")
    for size in (1, 2, len(ids)):
        reader = MarkedText(tokenizer, {token: (name, name) for token, name in tokens.items()})
        parser = ReasoningParser(PlainText(), REASONING["qwen3"], "undecided")
        output, pieces = CompletionOutput(0), list[Piece]()
        for start in range(0, len(ids), size):
            output.token_ids += ids[start : start + size]
            output.text = tokenizer.decode(output.token_ids, skip_special_tokens=True)
            pieces += parser.feed(reader.new(output))
        output.finish_reason = "stop"
        pieces += [*parser.feed(reader.new(output)), *parser.finish()]
        found = joined([Piece(piece.kind, unsplit(piece.text)) for piece in pieces])
        assert found == [Reasoning("say </think> 日本"), Text("yes <think>")]


def test_a_stop_string_is_no_text_where_markers_are_tokens() -> None:
    tokenizer = new_tokenizer([], ["<think>", "</think>"])
    tokens = marker_tokens(tokenizer, ["<think>", "</think>"])
    ids = tokenizer.encode("<think>return values", add_special_tokens=False)
    for stop, text in (("lues", "<think>return va"), ("<think>return values", "")):
        reader = MarkedText(tokenizer, {token: (name, name) for token, name in tokens.items()})
        output = CompletionOutput(0, text, ids, finish_reason="stop", stop_reason=stop)
        assert reader.new(output) == text


def test_auto_finds_the_format_in_the_chat_template() -> None:
    for sample in SAMPLES:
        name = name_of("auto", AUTO_TOOLS, sample.template)
        if sample.name not in ("llama3_json", "llama4_json", "pythonic", "llama4_pythonic"):
            assert name is not None
            assert tools_format(name, sample.template) in TOOLS[sample.name]
    assert (
        name_of("auto", AUTO_TOOLS, "{{ x }}") is None
        and name_of("auto", AUTO_REASONING, "{{ x }}") is None
    )
    assert name_of("qwen3-coder", AUTO_TOOLS, "") == "qwen3_coder"
    assert name_of("deepseek-r1", AUTO_REASONING, "") == "deepseek_r1"
    assert name_of("auto", AUTO_REASONING, "<think>\n</think>") == "qwen3"
    assert name_of("auto", AUTO_REASONING, "</think> <arg_key>") == "glm45"
    assert name_of("auto", AUTO_REASONING, "[THINK]") == "mistral"
    assert name_of("auto", AUTO_REASONING, "<|channel>thought") == "gemma4"


def test_the_template_says_which_of_two_formats_a_name_means() -> None:
    usual, named = TOOLS["mistral"]
    assert tools_format("mistral", "[TOOL_CALLS]") is usual
    assert tools_format("mistral", "[TOOL_CALLS] [ARGS]") is named
    assert tools_format("qwen3", "<tool_call> <function=") is TOOLS["qwen3_coder"][0]
