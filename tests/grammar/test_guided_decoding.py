"""What `guided_decoding` takes, and which grammars are refused when they are compiled."""

import threading
from collections.abc import Callable
from typing import Any

import pydantic
import pytest

from tests.grammar.walks import allowed_tokens
from tests.server.http_answers import wait_for
from tllm_spec import grammars
from tllm_spec.grammar import grammar_text
from tllm_spec.grammar.guided_decoding import MAX_GRAMMAR_CHARS, GuidedDecodingParams
from tllm_spec.grammars import Grammars
from tllm_spec.request_errors import SLOW_GRAMMAR
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import load_tokenizer

END = (1,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "guided_decoding has nothing; exactly one of json, regex"),
        ({"regex": "a", "choice": ["b"]}, "guided_decoding has regex, choice"),
        ({"regex": ""}, "a non-empty text"),
        ({"regex": 3}, "a non-empty text"),
        ({"choice": []}, "a list of non-empty strings"),
        ({"choice": "abc"}, "a list of non-empty strings"),
        ({"json": "{"}, "guided_decoding.json is not JSON"),
        ({"json": "[" * 20000}, "guided_decoding.json is not JSON"),
        ({"json": int}, "a JSON schema or a pydantic model"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "at most 65536 are accepted"),
        ({"jason": {}}, "jason.*are accepted"),
        ({"regex": "a\ud800"}, r"guided_decoding.regex: character 1 is U\+D800, one half"),
        ({"grammar": 'root ::= "\udc00"'}, "guided_decoding.grammar: character 10 is"),
        ({"choice": ["a", "\ud800"]}, "guided_decoding.choice: character 0 is"),
    ],
)
def test_what_cannot_be_a_grammar_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(guided_decoding=options)


def test_a_schema_may_be_a_pydantic_model_a_dict_or_text() -> None:
    class Point(pydantic.BaseModel):
        x: int

    schema = Point.model_json_schema()
    sources = [
        GuidedDecodingParams(json=each).source for each in (Point, schema, pydantic_text(schema))
    ]
    assert sources[0] == sources[1] == sources[2]


def pydantic_text(schema: dict[str, Any]) -> str:
    return pydantic.TypeAdapter(dict[str, Any]).dump_json(schema).decode()


@pytest.mark.parametrize(
    "options", [{"regex": r"\ud83d\ude00"}, {"grammar": r'root ::= "\\\uD83D"'}]
)
def test_the_escape_of_half_a_character_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        GuidedDecodingParams(**options)
    assert GuidedDecodingParams(regex=r"\\ud83d\u00e9")


@pytest.fixture(scope="module")
def made() -> Grammars:
    pytest.importorskip("llguidance")
    return Grammars("llguidance", load_tokenizer("zoo:llama"), 2048, END)


Compile = Callable[..., Any]


@pytest.fixture(scope="module")
def compile_with(made: Grammars) -> Compile:
    return lambda **options: made.states_of(GuidedDecodingParams(**options).source, 1)[0]


def test_the_tokenizer_of_masks_is_made_ready_before_the_first_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = threading.Event()

    def fail(*arguments: object) -> None:
        started.set()
        raise ValueError("the requests with grammars are told so")

    monkeypatch.setattr(grammars, "masks_tokenizer", fail)
    Grammars("llguidance", object(), 2048, END).prepare()
    assert started.wait(60)


def test_a_grammar_is_compiled_once_and_a_refused_one_is_not_compiled_again(
    made: Grammars, compile_with: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, compiled = list[str](), grammars.compiled

    def counted(source: Any, *arguments: Any) -> Any:
        number.append(source.text)
        return compiled(source, *arguments)

    monkeypatch.setattr(grammars, "compiled", counted)
    for _ in range(2):
        assert compile_with(regex="once+") is not None
        with pytest.raises(ValueError, match="unclosed group"):
            compile_with(regex="(once")
    assert number == ["once+", "(once"]
    monkeypatch.setattr(grammars, "MAX_KNOWN", 1)
    compile_with(regex="another")
    assert not made.keeps(GuidedDecodingParams(regex="once+").source)


def test_what_a_client_has_sent_is_not_written_to_the_log(
    compile_with: Compile, capfd: pytest.CaptureFixture[str]
) -> None:
    compile_with(json={"title": "b\nFORGED", "anyOf": [{}, {}]})
    compile_with(grammar='root ::= "a" # FORGED')
    for options in ({"json": {"format": "a\nFORGED"}}, {"regex": "(FORGED"}):
        with pytest.raises(ValueError, match="FORGED"):
            compile_with(**options)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "(a"}, "guided_decoding = regex: "),
        ({"grammar": "no root"}, "guided_decoding = grammar: EBNF: "),
        ({"grammar": "start: a"}, "guided_decoding = grammar: EBNF: "),  # no Lark
        ({"json": {"type": "objekt"}}, "guided_decoding = json_schema: .*objekt"),
        ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance in a JSON schema is refused"),
        ({"json": {"items": {"x-guidance": {}}}}, "x-guidance in a JSON schema is refused"),
        ({"grammar": "root ::= root"}, "guided_decoding = grammar: no text matches it"),
        ({"regex": r"[^\s\S]"}, "no text matches it"),
        ({"json": False}, "guided_decoding has nothing"),
        ({"json": "false"}, "no text matches it"),
        ({"json": {"$ref": "#"}}, "no text matches it"),
        ({"regex": "(" * 5000 + ")" * 5000}, "guided_decoding = regex: "),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "it is nested too deeply"),
        ({"grammar": "".join(f'a{i} ::= "a"\n' for i in range(501))}, "more than 500 rules"),
        (
            {"json": {"patternProperties": {f"^{i}$": {} for i in range(33)}}},
            "patternProperties has more than 32 names",
        ),
        (
            {"json": {"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(20)]}},
            "more than 12 patterns and formats, where schemas hold together",
        ),
        (
            {"json": {"anyOf": [{"pattern": f"a{i}"} for i in range(20)], "pattern": "b"}},
            "more than 12 patterns and formats, where schemas hold together",
        ),
        ({"json": {"properties": {"default": {"multipleOf": 999983}}}}, "at most 100000 are serv"),
        ({"json": {"multipleOf": 9999.99999}}, "multipleOf = 9999.99999: at most 100000"),
        ({"regex": r"[\w\W]{0,1000}" * 60}, "guided_decoding = regex: lexer"),
        (
            {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(2000)}}},
            "guided_decoding = json_schema: ",
        ),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_with_the_reason(
    compile_with: Compile, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compile_with(**options)


def test_many_patterns_in_different_places_are_served(compile_with: Compile) -> None:
    fields = {
        f"p{i}": {"type": "string", "pattern": f"^a{{{i}}}$", "title": "a"} for i in range(20)
    }
    fields["r"] = {"$ref": "#/$defs/A", "description": "b"}
    assert compile_with(json={"properties": fields, "$defs": {"A": {"format": "date"}}}) is not None


def test_references_that_are_thousands_deep_do_not_end_the_process(compile_with: Compile) -> None:
    definitions: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1800)}
    definitions["a1800"] = {"type": "integer"}
    assert compile_with(json={"$ref": "#/$defs/a0", "$defs": definitions}) is not None
    rules = "\n".join(f'a{i} ::= ("x" a{i + 1})?' for i in range(490))
    assert compile_with(grammar=f'root ::= a0 "!"\n{rules}\na490 ::= "y"') is not None


def test_a_grammar_that_ends_at_a_limit_is_refused_from_then_on(
    made: Grammars, compile_with: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grammar_text.LIMITS, "max_items_in_row", 60)
    options = {"grammar": "root ::= s\ns ::= [a-z] | s s | s s s"}
    state = compile_with(**options)
    state.read([0, *range(71, 87)], 1)
    assert state.why_no_token([0, *range(71, 87)], 1) == SLOW_GRAMMAR
    with pytest.raises(ValueError, match="the grammar takes too long"):
        compile_with(**options)


def test_grammars_are_compiled_next_to_each_other(
    compile_with: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, go_on, slow = grammars.compiled, threading.Event(), list[str]()

    def slowly(source: Any, *arguments: Any) -> Any:
        if "slow" in source.text:
            slow.append(source.text)
            assert go_on.wait(60)
        return compiled(source, *arguments)

    monkeypatch.setattr(grammars, "compiled", slowly)
    threads = [
        threading.Thread(target=compile_with, kwargs={"regex": f"slow{i}"}) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(slow) == 4)
    assert compile_with(regex="next to them") is not None
    go_on.set()
    for thread in threads:
        thread.join()


def test_a_model_may_have_more_or_fewer_tokens_than_its_tokenizer() -> None:
    pytest.importorskip("llguidance")
    source = GuidedDecodingParams(choice=["no", "yes"]).source
    for size in (2000, 2048, 2100):
        made = Grammars("llguidance", load_tokenizer("zoo:llama"), size, END)
        (state,) = made.states_of(source, 1)
        assert state is not None and 81 in allowed_tokens(state, size)
        state.read([81, 82], 0)
        assert allowed_tokens(state, size) == [*END]


def test_a_tokenizer_without_a_readable_vocabulary_is_refused() -> None:
    pytest.importorskip("llguidance")
    source = GuidedDecodingParams(regex="a").source
    with pytest.raises(ValueError, match="cannot use this tokenizer"):
        Grammars("llguidance", object(), 10, END).states_of(source, 1)
