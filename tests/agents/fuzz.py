"""Random answers in each family's format, which `tllm-serve` gives with a scripted model and
drafts, against what they were made from: `python -m tests.agents.fuzz --minutes 20`.

The formats are written here by their own functions, which share nothing with the product's. The
checks: reasoning, content and calls are those of the answer, streamed or not, forced or not, cut or
not; a thinking budget leaves exactly its tokens; and texts do not depend on the drafter."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.agents.run import KEY, MODEL, served
from tests.scripted_model import save_scripted
from tllm_spec.chat_formats.names import MARKERS

Call = tuple[str, dict[str, Any]]
NAMES = ("get_weather", "f", "search-web", "Ns.lookup", "a1")
WORDS = (
    "Paris",
    "a b",
    "x<y",
    "21",
    "true",
    "null",
    "{",
    'say "hi"',
    "back\\slash",
    "日本",
    "東京",
)
MARK = re.compile(r"<.*>", re.DOTALL)  # llguidance takes any such token for a special one
TYPES = ("string", "integer", "number", "boolean", "array", "object")
NUM_SCRIPTS = 12  # of one server
SLOW = 20.0  # seconds for an answer


def json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: object) -> str:
    return value if isinstance(value, str) else json_text(value)


def hermes(call: Call, place: int) -> str:
    return f"<tool_call>\n{json_text({'name': call[0], 'arguments': call[1]})}\n</tool_call>"


def qwen_xml(call: Call, place: int) -> str:
    parts = [f"<parameter={key}>\n{plain(each)}\n</parameter>\n" for key, each in call[1].items()]
    return f"<tool_call>\n<function={call[0]}>\n{''.join(parts)}</function>\n</tool_call>"


def glm(call: Call, place: int, end: str = "\n") -> str:
    parts = [
        f"<arg_key>{key}</arg_key>{end}<arg_value>{plain(each)}</arg_value>{end}"
        for key, each in call[1].items()
    ]
    return f"<tool_call>{call[0]}{end}{''.join(parts)}</tool_call>"


def kimi(call: Call, place: int) -> str:
    return (
        f"<|tool_call_begin|>functions.{call[0]}:{place}<|tool_call_argument_begin|>"
        f"{json_text(call[1])}<|tool_call_end|>"
    )


def deepseek_v3(call: Call, place: int) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n```json\n{json_text(call[1])}\n```"
        "<｜tool▁call▁end｜>"
    )


def deepseek_v31(call: Call, place: int) -> str:
    return f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{json_text(call[1])}<｜tool▁call▁end｜>"


def deepseek_dsml(call: Call, place: int) -> str:
    parts = []
    for key, each in call[1].items():
        head = f'<｜DSML｜parameter name="{key}" string="{json_text(isinstance(each, str))}">'
        parts.append(f"{head}{plain(each)}</｜DSML｜parameter>\n")
    return f'<｜DSML｜invoke name="{call[0]}">\n{"".join(parts)}</｜DSML｜invoke>\n'


def minimax(call: Call, place: int) -> str:
    parts = [
        f'<parameter name="{key}">{plain(each)}</parameter>\n' for key, each in call[1].items()
    ]
    return f'<invoke name="{call[0]}">\n{"".join(parts)}</invoke>\n'


def gemma(call: Call, place: int) -> str:
    def value(each: object) -> str:
        if isinstance(each, str):
            return f'<|"|>{each}<|"|>'
        if isinstance(each, dict):
            return "{" + ",".join(f"{key}:{value(own)}" for key, own in each.items()) + "}"
        if isinstance(each, list):
            return f"[{','.join(map(value, each))}]"
        return json_text(each)

    return f"<|tool_call>call:{call[0]}{value(call[1])}<tool_call|>"


def mistral(call: Call, place: int) -> str:
    return f"[TOOL_CALLS]{call[0]}[ARGS]{json_text(call[1])}"


@dataclass(frozen=True)
class Family:
    """around: what stands before and after all calls. marks: others that may be tokens. template:
    what the family's chat template has."""

    reasoning: str
    tools: str
    write: Callable[[Call, int], str]
    around: tuple[str, str] = ("", "")
    between: str = ""
    thinks: tuple[str, str] = ("<think>", "</think>")
    marks: Sequence[str] = ()
    template: str = ""


FAMILIES = (
    Family("qwen3", "qwen3", hermes, between="\n", marks=("<tool_call>", "</tool_call>")),
    Family("qwen3_5", "qwen3_coder", qwen_xml, between="\n"),
    Family("glm45", "glm45", glm, between="\n"),
    Family("glm45", "glm47", lambda *each: glm(*each, end="")),
    Family(
        "kimi_k2", "kimi_k2", kimi, ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    ),
    Family(
        "deepseek_r1",
        "deepseek_v3",
        deepseek_v3,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        "\n",
    ),
    Family(
        "deepseek_v3",
        "deepseek_v31",
        deepseek_v31,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    Family(
        "deepseek_v3",
        "deepseek_v32",
        deepseek_dsml,
        ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    ),
    Family(
        "deepseek_v3",
        "deepseek_v4",
        deepseek_dsml,
        ("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
    ),
    Family(
        "minimax_m2",
        "minimax_m2",
        minimax,
        ("<minimax:tool_call>\n", "</minimax:tool_call>"),
    ),
    Family("gemma4", "gemma4", gemma, thinks=("<|channel>thought\n", "<channel|>")),
    Family(
        "mistral",
        "mistral",
        mistral,
        thinks=("[THINK]", "[/THINK]"),
        template="[TOOL_CALLS][ARGS]",
    ),
)
DRAFTERS: Mapping[str, dict[str, Any] | None] = {
    "plain": None,
    "own text": {"decoding_type": "Draft_Target", "max_draft_len": 5, "speculative_model": "MODEL"},
    "other text": {
        "decoding_type": "Draft_Target",
        "max_draft_len": 3,
        "speculative_model": "OTHER",
    },
    "ngram": {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 2},
    "tree": {
        "decoding_type": "Draft_Target",
        "max_draft_len": 3,
        "speculative_model": "MODEL",
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 2,
        "max_total_draft_tokens": 6,
    },
}


@dataclass(frozen=True)
class Answer:
    """What an answer is made from, its text, what of that follows reasoning, and the tools that it
    may call. section: of the prompt."""

    reasoning: str
    content: str
    calls: Sequence[Call]
    text: str
    said: str
    tools: Sequence[dict[str, Any]]
    section: str
    is_object: bool


def random_value(rng: random.Random, kind: str, depth: int = 0) -> Any:
    if kind == "string":
        return " ".join(rng.sample(WORDS, rng.randint(1, 3)))
    if kind == "integer":
        return rng.randint(-999, 999)
    if kind == "number":
        return rng.choice((0.5, -2.25, 1e6 + 0.5, 3.0))
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        return [random_value(rng, rng.choice(TYPES[:4])) for _ in range(rng.randint(0, 3))]
    keys = rng.sample(("k", "key two", "z"), rng.randint(0, 2))
    return {key.replace(" ", "_"): random_value(rng, rng.choice(TYPES[:4])) for key in keys}


def random_tools(rng: random.Random) -> list[dict[str, Any]]:
    tools = []
    for name in rng.sample(NAMES, rng.randint(1, 3)):
        kinds = {f"p{place}": rng.choice(TYPES) for place in range(rng.randint(0, 3))}
        schema = {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in kinds.items()},
            "required": list(kinds),
            "additionalProperties": False,
        }
        function = {"name": name, "parameters": schema, "strict": rng.random() < 0.5}
        tools.append({"type": "function", "function": function})
    return tools


def random_answer(rng: random.Random, family: Family, number: int) -> Answer:
    tools = random_tools(rng)
    calls = []
    for tool in rng.choices(tools, k=rng.choice((0, 1, 1, 2, 3))):
        kinds = tool["function"]["parameters"]["properties"].items()
        values = {key: random_value(rng, each["type"]) for key, each in kinds}
        calls.append((tool["function"]["name"], values))
    is_object = not calls and rng.random() < 0.5
    section = rng.choice(("inside", "over", "undecided"))
    has_reasoning = section == "inside" or (section == "undecided" and rng.random() < 0.7)
    reasoning = f"Thought {number}, {rng.choice(WORDS)}." if has_reasoning else ""
    content = f"Text {number} {rng.choice(WORDS)}." if not calls or rng.random() < 0.3 else ""
    if is_object:
        content = json_text({"number": number, "word": rng.choice(WORDS)})
    opener, closer = family.thinks
    head = "" if section == "inside" or not has_reasoning else opener
    if has_reasoning:
        head += reasoning + closer + rng.choice(("", "\n\n"))
    said = content
    if calls:
        written = [family.write(call, place) for place, call in enumerate(calls)]
        gap = rng.choice(("", "\n\n")) if content else ""
        said += gap + family.around[0] + family.between.join(written) + family.around[1]
    text = head + said
    return Answer(reasoning, content, calls, text, said, tools, section, is_object)


def pieces_of(rng: random.Random, text: str, marks: Sequence[str], used: set[str]) -> list[str]:
    """The text cut at random into pieces that are not in `used`, which grows by them, and look like
    no marker; `marks` are pieces of their own."""

    def is_taken(piece: str) -> bool:
        return piece in used or MARK.fullmatch(piece) is not None

    pieces: list[str] = []
    for part in re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]:
        own = [part] if part in marks else []
        rest = "" if own else part
        while rest:
            length = rng.randint(2, 12)
            while is_taken(rest[:length]) and length < len(rest):
                length += 1
            while is_taken(rest[:length]) and own:
                used.discard(own[-1])
                rest = own.pop() + rest
                length = len(rest)
            assert not is_taken(rest[:length]), f"{rest!r} cannot be cut"
            own.append(rest[:length])
            used.add(rest[:length])
            rest = rest[length:]
        pieces += own
    return pieces


def template_of(family: Family, answers: Sequence[Answer]) -> str:
    """Its generation prompt opens or closes reasoning as the chosen answer wants it, and ends with
    the piece that the answer's script begins with. The last message is the answer's number."""
    opener, closer = family.thinks
    sections = {"inside": opener, "over": f"{opener}\n\n{closer}\n\n", "undecided": ""}
    cases = "".join(
        f"{{% elif number == '{place}' %}}{sections[answer.section]}{{{{ '«start {place}»' }}}}"
        for place, answer in enumerate(answers)
    )
    return (
        f"{{# {family.template} #}}"
        "{% if tools %}{{ tools | tojson }}<|end|>{% endif %}"
        "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"
        "{% set number = messages[-1].content %}"
        f"{{% if number == 'none' %}}{cases}{{% endif %}}"
    )


def random_body(
    rng: random.Random, answer: Answer, number: int, num_pieces: int, *, has_tokens: bool
) -> dict[str, Any]:
    """has_tokens: whether marks are tokens, so that the script goes on after a forced closer."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": str(number)}],
        "stream": rng.random() < 0.5,
        "temperature": rng.choice((0.0, 1.0)),
        "seed": rng.randint(0, 9),
        "max_tokens": rng.randint(1, num_pieces) if rng.random() < 0.25 else 400,
        "tools": answer.tools,
    }
    choices: list[Any] = ["auto"]
    if answer.calls and not answer.content:
        choices.append("required")
        names = {name for name, _ in answer.calls}
        if len(answer.calls) == len(names) == 1:
            choices.append({"type": "function", "function": {"name": answer.calls[0][0]}})
    body["tool_choice"] = rng.choice(choices)
    if len(answer.calls) < 2 and rng.random() < 0.3:
        body["parallel_tool_calls"] = False
    if answer.is_object:
        del body["tools"], body["tool_choice"]
        schema = {
            "type": "object",
            "properties": {"number": {"type": "integer"}, "word": {"type": "string"}},
            "required": ["number", "word"],
            "additionalProperties": False,
        }
        # Without a section before it, JSON may only be written with the usual tokens of its keys.
        if answer.section != "over" and rng.random() < 0.7:
            shape = {"name": "s", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": shape}
    if has_tokens and rng.random() < 0.4:
        body["thinking_token_budget"] = rng.choice((0, 1, 2, 3, 50))
    return body


def ask(client: httpx.Client, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer's message, with its finish reason, joined if it was streamed."""
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        choice = answer.json()["choices"][0]
        return {**choice["message"], "finish_reason": choice["finish_reason"]}
    made: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for line in answer.text.split("\n"):
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        assert "choices" in chunk, chunk
        for choice in chunk["choices"]:
            made["finish_reason"] = choice["finish_reason"] or made.get("finish_reason")
            delta = choice["delta"]
            for kind in ("content", "reasoning_content"):
                made[kind] += delta.get(kind) or ""
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(made["tool_calls"]):
                    made["tool_calls"].append({"id": call["id"], "function": call["function"]})
                else:
                    assert call["index"] == len(made["tool_calls"]) - 1, answer.text
                    assert call["function"].get("name") is None, answer.text
                    own = made["tool_calls"][-1]["function"]
                    own["arguments"] += call["function"]["arguments"]
    return made


def check(
    answer: Answer,
    pieces: Sequence[str],
    body: Mapping[str, Any],
    found: Mapping[str, Any],
    family: Family,
) -> None:
    reasoning, content = answer.reasoning, answer.content
    calls = [
        (each["function"]["name"], each["function"]["arguments"])
        for each in found.get("tool_calls") or ()
    ]
    told = (found.get("reasoning_content") or "", found.get("content") or "", calls)
    if (budget := body.get("thinking_token_budget")) is not None and reasoning:
        begin = int(answer.section != "inside")  # after the opener
        thought = pieces[begin : pieces.index(family.thinks[1])]
        reasoning = "".join(thought[:budget]).rstrip()
    if found["finish_reason"] == "length":
        # What `max_tokens` cuts inside a marker or before a call's name is shown as it is.
        for shown, whole in ((told[0], reasoning), (told[1], content)):
            is_cut = shown.startswith(whole) and shown.removeprefix(whole).strip() in answer.text
            assert whole.startswith(shown) or is_cut or family.thinks[0].startswith(shown), told
        assert [name for name, _ in calls] == [name for name, _ in answer.calls][: len(calls)], told
        for (_, arguments), (_, wanted) in list(zip(calls, answer.calls, strict=False))[:-1]:
            assert json.loads(arguments) == wanted, told
        return
    made = [(name, json.loads(arguments)) for name, arguments in calls]
    assert told[:2] == (reasoning, content), (told, reasoning, content)
    assert made == list(answer.calls), (made, answer.calls)
    is_named = isinstance(body.get("tool_choice"), dict)
    reason = "tool_calls" if calls else "stop"
    assert found["finish_reason"] in (reason, "stop" if is_named else reason), found


def main() -> int:
    """Returns 0 if no answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", default="", help="a tool parser's name")
    options = parser.parse_args()
    rng, end = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    chosen = [each for each in FAMILIES if options.family in (each.tools, "")]
    num_answers, wrong, turn = 0, 0, 0
    while time.monotonic() < end:
        family, drafter = chosen[turn % len(chosen)], rng.choice(list(DRAFTERS))
        turn += 1
        asked, mistakes = run_server(rng, family, drafter)
        num_answers, wrong = num_answers + asked, wrong + len(mistakes)
        print(f"{family.tools:14} {drafter:10} {asked} answers, {len(mistakes)} wrong", flush=True)
        for mistake in mistakes[:3]:
            print(f"  {mistake}", flush=True)
    print(f"{num_answers} answers, {wrong} wrong")
    return int(wrong > 0)


def run_server(rng: random.Random, family: Family, drafter: str) -> tuple[int, list[str]]:
    """How many answers were asked for, and what was wrong with some. Half of the servers' models
    have marks as tokens; these have one script, as a token has one successor."""
    has_tokens = rng.random() < 0.5
    number = 1 if has_tokens else NUM_SCRIPTS
    answers = [random_answer(rng, family, each) for each in range(number)]
    text, used = answers[0].text, set(MARKERS)  # a piece that is a marker would be its only form
    marks = [*family.thinks, *family.around, *family.marks] if has_tokens else []
    marks = [mark for mark in marks if text.count(mark) == 1]
    scripts = {
        f"«start {place}»": pieces_of(rng, answer.text, marks, used)
        for place, answer in enumerate(answers)
    }
    tokens = [*family.thinks] if has_tokens else []
    with tempfile.TemporaryDirectory() as folder:
        model = save_scripted(
            Path(folder, MODEL), scripts, template_of(family, answers), tokens=tokens
        )
        backwards = {start: script[::-1] for start, script in scripts.items()}
        other = save_scripted(Path(folder, "other"), backwards, "{{ '' }}", tokens=tokens)
        spec = json.dumps(DRAFTERS[drafter])
        spec = spec.replace("MODEL", str(model)).replace("OTHER", str(other))
        yaml = f"speculative_config: {spec}\nkv_cache_config: {{max_tokens: 16384}}\n"
        names, mistakes, asked = (family.reasoning, family.tools), list[str](), 0
        with (
            served(model, Path(folder, "log"), yaml, names) as url,
            httpx.Client(timeout=SLOW) as client,
        ):
            for place, answer in enumerate(answers):
                pieces = scripts[f"«start {place}»"]
                for _ in range(30 // number):
                    asked += 1
                    body = random_body(rng, answer, place, len(pieces), has_tokens=has_tokens)
                    try:
                        check(answer, pieces, body, ask(client, url, body), family)
                    except (AssertionError, httpx.HTTPError) as error:
                        shown = {key: each for key, each in body.items() if key != "tools"}
                        mistakes.append(f"{error!r:.800} for {shown} of {answer.text!r}")
    return asked, mistakes


if __name__ == "__main__":
    sys.exit(main())
