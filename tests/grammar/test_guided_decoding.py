"""What `guided_decoding` takes, and how the compiler ends grammars that would harm others."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pydantic
import pytest

from tests.server.http_answers import wait_for
from tllm_spec import grammars
from tllm_spec.grammar import grammar_compiler
from tllm_spec.grammar.grammar_compiler import GrammarCompiler
from tllm_spec.grammar.guided_decoding import MAX_GRAMMAR_CHARS, GuidedDecodingParams
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
        (
            {"structural_tag": {"structures": [{"begin": "<", "schema": {}}], "triggers": ["<"]}},
            'guided_decoding.structural_tag: a structural tag has a format, such as {"type": '
            '"structural_tag", "format": {"type": "triggered_tags"',
        ),
        ({"structural_tag": []}, "a structural tag has a format"),
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


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    pytest.importorskip("xgrammar")
    return GrammarCompiler(load_tokenizer("zoo:llama"), 2048, END)


def test_what_the_first_grammar_would_wait_for_is_made_ready_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = threading.Event()

    class Compiler:
        def __init__(self, *arguments: object) -> None:
            pass

        def start(self) -> None:
            started.set()
            raise RuntimeError("the requests with grammars are told so")

    monkeypatch.setattr(grammars, "GrammarCompiler", Compiler)
    grammars.Grammars("xgrammar", object(), 2048, END).prepare()
    assert started.wait(30)


def compile_with(compiler: GrammarCompiler, **options: Any) -> Any:
    return compiler.compile(GuidedDecodingParams(**options).source)


def test_a_compiled_grammar_is_kept(compiler: GrammarCompiler) -> None:
    assert compile_with(compiler, regex="ab+") is compile_with(compiler, regex="ab+")


def test_the_compilers_process_fills_the_masks_of_all_states(compiler: GrammarCompiler) -> None:
    """Nothing is left for the first visit of a state, which is in a round."""
    import xgrammar

    compiled = compile_with(compiler, json={"properties": {"a": {"type": "string"}}})
    before = compiled.serialize_json()
    assert json.loads(before)["adaptive_token_mask_cache"]
    matcher = xgrammar.GrammarMatcher(compiled)
    bitmask = xgrammar.allocate_token_bitmask(1, 2048)
    for letter in '{"a": "bc"}':
        matcher.fill_next_token_bitmask(bitmask)
        assert matcher.accept_string(letter)
    assert compiled.serialize_json() == before


def test_compiled_grammars_are_kept_within_the_limit(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_with(compiler, regex="a+")
    monkeypatch.setattr(grammar_compiler, "MAX_KEPT_BYTES", first.memory_size_bytes)
    compile_with(compiler, regex="b+")
    assert compile_with(compiler, regex="a+") is not first


def test_what_a_client_has_sent_is_not_written_to_the_log(
    compiler: GrammarCompiler, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler.close()  # a new process has this test's standard error
    texts = [{"type": "string", "format": "a\nFORGED"}, {"$id": "b\nFORGED", "anyOf": [{}, {}]}]
    for schema in texts:
        compile_with(compiler, json=schema)
    compile_with(compiler, grammar='root ::= "a" # FORGED')
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "(a"}, "guided_decoding = regex: it is no regular expression: missing"),
        ({"grammar": "no root"}, "guided_decoding = grammar: EBNF"),
        ({"json": {"type": "objekt"}}, 'Unsupported type "objekt"'),
        (
            {"structural_tag": {"format": {"type": "tagged"}}},
            "guided_decoding = structural_tag: Invalid structural tag error: Format type not",
        ),
        ({"grammar": "root ::= root"}, "guided_decoding = grammar: no text matches it"),
        ({"regex": r"[^\s\S]"}, "no text matches it"),
        ({"regex": "(" * 5000 + ")" * 5000}, "it is nested too deeply"),
        ({"json": {"$ref": "#"}}, "no text matches it"),
        (
            {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(2000)}}},
            "it needs too much memory",
        ),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_with_the_reason(
    compiler: GrammarCompiler,
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_SECONDS", 300.0)  # a busy machine is slow
    with pytest.raises(ValueError, match=message):
        compile_with(compiler, **options)
    assert compile_with(compiler, regex="still here") is not None


def slow_schema() -> dict[str, Any]:
    """It takes minutes."""
    schema: dict[str, Any] = {"type": "string"}
    for level in range(300):
        other = schema if level < 3 else {"type": "integer"}
        schema = {"properties": {"a": schema, "b": other}, "required": ["a", "b"]}
    return schema


def test_a_grammar_that_takes_too_long_is_ended_and_others_go_on(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = slow_schema()
    monkeypatch.setattr(grammar_compiler, "MAX_SECONDS", 0.2)
    with pytest.raises(ValueError, match="takes more than 0 seconds to compile"):
        compile_with(compiler, json=schema)
    monkeypatch.undo()
    assert compile_with(compiler, regex="and again") is not None


@pytest.mark.slow
def test_another_grammar_is_compiled_next_to_a_slow_one(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_SECONDS", 300.0)
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(compile_with, compiler, json=slow_schema())
        wait_for(lambda: compiler._idle.qsize() == grammar_compiler.NUM_PROCESSES - 1)
        assert compile_with(compiler, regex="next to it") is not None and not slow.done()
        compiler.close()
        with pytest.raises(ValueError, match="memory"):
            slow.result()
    assert compile_with(compiler, regex="and after it") is not None


def test_a_tokenizer_without_a_readable_vocabulary_is_refused() -> None:
    pytest.importorskip("xgrammar")
    with pytest.raises(ValueError, match="cannot use this tokenizer"):
        GrammarCompiler(object(), 10, END)
