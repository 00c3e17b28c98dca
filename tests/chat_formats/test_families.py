"""Every family's calls: what its template writes is read back, however it is split."""

import json
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Any

import jinja2
import pytest

from tests.chat_formats.joined import joined
from tests.chat_formats.samples import CALLS, FUNCTIONS, SAMPLES, Sample
from tllm_spec.chat_formats.names import TOOLS, tools_format
from tllm_spec.chat_formats.pieces import Piece, Text

IDS = [f"{sample.name}{number}" for number, sample in enumerate(SAMPLES)]


def rendered(template: str, calls: Any = CALLS) -> str:
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    named = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return environment.from_string(template, globals={}).render(calls=named)


def parsed(name: str, parts: Sequence[str]) -> list[Piece]:
    parser = TOOLS[name][0].new_parser(FUNCTIONS)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return joined(pieces + parser.finish())


def calls_of(pieces: Sequence[Piece]) -> list[tuple[str, Any]]:
    names = [text for kind, text in pieces if kind == "call"]
    arguments = [json.loads(text) for kind, text in pieces if kind == "arguments"]
    return list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_what_a_template_writes_is_read_back(sample: Sample) -> None:
    for template in filter(None, (sample.template, sample.dense)):
        pieces = parsed(sample.name, [rendered(template)])
        assert calls_of(pieces) == CALLS
        assert tuple(text for kind, text in pieces if kind == "call_id") == sample.ids
        assert not [text for kind, text in pieces if kind == "content"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_an_answer_split_at_every_pair_of_places_is_read_as_the_whole(
    sample: Sample, step: int
) -> None:
    calls = [("get_weather", {"city": '<"a\nb', "days": 3}), ("now", {})]
    has_text = sample.name not in ("llama3_json", "llama4_json", "pythonic", "llama4_pythonic")
    for template in filter(None, (sample.template, sample.dense)):
        text = rendered(template, calls)
        text = f"Let me see.{text}\nSo." if has_text else text
        whole = parsed(sample.name, [text])
        assert calls_of(whole) == calls
        if has_text:
            assert (whole[0], whole[-1]) == (Text("Let me see."), Text("So."))
        for first, second in combinations_with_replacement(range(0, len(text), step), 2):
            parts = [text[:first], text[first:second], text[second:]]
            assert parsed(sample.name, parts) == whole, parts
        assert parsed(sample.name, list(text)) == whole


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_a_marker_without_a_call_is_text_and_the_next_call_is_read(sample: Sample) -> None:
    family = tools_format(sample.name, sample.template)
    marker = next((each for each in (family.call_begin, family.begin) if each[1:]), None)
    if marker is None:
        return
    text = f"{marker} is how a call begins.\n {rendered(sample.template).lstrip()}"
    pieces = parsed(sample.name, [text])
    assert pieces[0] == Text(f"{marker} is how a call begins.")
    assert calls_of(pieces) == CALLS
    assert parsed(sample.name, list(text)) == pieces


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_an_answer_cut_anywhere_keeps_what_is_there(sample: Sample) -> None:
    text = rendered(sample.template)
    for length in range(0, len(text), 3):
        pieces = parsed(sample.name, [text[:length]])
        assert parsed(sample.name, list(text[:length])) == pieces
        names = [name for kind, name in pieces if kind == "call"]
        assert names == [name for name, _ in CALLS][: len(names)]
