"""`/` and `/dashboard`: what they show, that they need no other host, and that they work in a
browser."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.random_examples import examples
from tests.server.fake_llm import MODEL, STATE, FakeLLM
from tests.server.hosted import hosted
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.server.app import OpenAIServer
from tllm_spec.server.histograms import HISTOGRAMS
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.pages import dashboard_data, facts_of, measured, shape_name, why

CHROMIUM = shutil.which("chromium")
NAME = '<b onclick="x">model'


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(OpenAIServer(FakeLLM(), NAME).app()) as client:
        yield client


def changed(state: dict[str, Any], **controller: Any) -> dict[str, Any]:
    return state | {"controller": controller}


def test_home_says_what_runs_and_how_to_call_it(client: TestClient) -> None:
    page = client.get("/").text
    assert "http://testserver/v1/chat/completions" in page and "plain decoding" in page
    assert "<b onclick" not in page and "&lt;b onclick" in page
    for link in re.findall(r'href="(\w+(?:\.\w+)?)"', page):
        assert client.get(f"/{link}").status_code == 200, link


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_a_page_loads_nothing_from_another_host(client: TestClient, path: str) -> None:
    answer = client.get(path)
    text = answer.text.replace("http://testserver", "")
    assert not re.findall(r"(?:https?:)?//[a-zA-Z]|<link|<script src|@import", text)
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
def test_fastapis_pages_whose_scripts_another_host_has_are_not_served(
    client: TestClient, path: str
) -> None:
    assert client.get(path).status_code == 404
    assert client.get("/openapi.json").status_code == 200


def test_the_data_have_what_the_page_reads(client: TestClient) -> None:
    page, data = client.get("/dashboard").text, client.get("/dashboard/data").json()
    read = set(re.findall(r"\b(?:now|minute|a|b|last)\.([a-z_]+)\b", page))
    assert read - {"length", "alpha"} <= data.keys(), read - data.keys()
    assert data["what"] == "none: plain decoding · on cuda:0"
    assert (data["running"], data["waiting"], data["draft_len"]) == (3, 4, 2)
    assert data["histograms"].keys() == HISTOGRAMS.keys()
    assert data["kv"] == {"num_pages": 10, "free": 1, "cached": 3, "used": 6}
    for name in re.findall(r'"(trtllm_\w+)"', page):
        assert name in data["histograms"]


def test_the_page_needs_no_key_and_its_data_do() -> None:
    options = ServerOptions(api_key="secret")
    with TestClient(OpenAIServer(FakeLLM(), MODEL, options).app()) as client:
        assert client.get("/dashboard").status_code == 200
        assert client.get("/dashboard/data").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert client.get("/dashboard/data", headers=headers).status_code == 200
        assert "Bearer KEY" in client.get("/", headers=headers).text


def test_a_page_says_nothing_that_is_only_automatic() -> None:
    facts = facts_of(LlmArgs.from_kwargs("zoo:llama", device="cpu"), 9)
    assert facts["device"] == "cpu" and "auto" not in facts.values() and "attention" not in facts
    facts = facts_of(LlmArgs.from_kwargs("zoo:llama", attn_backend="VANILLA"), 9)
    assert facts["attention"] == "VANILLA" and "device" not in facts


def test_a_tree_is_named_with_its_size() -> None:
    tree = {
        "decoding_type": "Eagle3",
        "max_draft_len": 3,
        "speculative_model": "zoo:llama-eagle3",
        "eagle_choices": [[0], [1], [0, 0], [0, 0, 0]],
    }
    args = LlmArgs.from_kwargs("zoo:llama", speculative_config=tree)
    assert facts_of(args, 9)["drafter"] == "Eagle3, trees of 4 nodes, 3 deep at most"
    tree_shape = {"name": "2x2/4", "depth": 2, "drafts": 4, "topk": 2}
    switch = {"old_steps": 3, "new_steps": "2x2/4", "batch_size": 1, "reason": "+5 %"}
    state = changed(STATE, decisions={"last": [switch]}) | {"draft_shape": tree_shape}
    assert why(state) == "Draft length 2x2/4, decided at batch size 1: +5 %."
    assert shape_name(state) == "2x2/4"


def test_every_control_is_reached_by_keyboard_and_has_a_name(client: TestClient) -> None:
    page = client.get("/dashboard").text
    assert not re.findall(
        r"outline: *(?:none|0)|tabindex=\"[1-9]|onclick=|<div[^>]*role=\"button", page
    )
    assert ":focus-visible" in page
    for control in re.findall(r"addEventListener\(\"(\w+)\"", page):
        assert control in ("input", "click")
    clicked = re.findall(r'byId\("(\w+)"\)\.addEventListener\("click"', page)
    assert clicked and all(f'<button id="{each}" type="button"' in page for each in clicked)
    assert page.count('<label for="${id}">') == 1 and "<label id=" in page


def test_why_names_what_decided() -> None:
    switch = {"old_steps": 3, "new_steps": 2, "batch_size": 8, "reason": "+5 % tokens per second"}
    assert why(changed(STATE)) == "Draft length 2: it is configured and does not adapt."
    before = switch | {"old_steps": 0, "new_steps": 3, "reason": "+9 %"}
    decided = changed(STATE, decisions={"last": [before, switch]})
    assert why(decided) == "Draft length 2, decided at batch size 8: +5 % tokens per second."
    others = dashboard_data(decided, {})["decisions"]
    assert others == ["0 → 3 at batch size 8: +9 %"], "the first sentence has the reason of 3 → 2"
    gate = {"is_closed": True, "acceptance_rate": 0.1}
    assert "closed the gate" in why(changed(STATE, limits={"gate": gate}))
    assert "no other one" in why(changed(STATE, draft_lens=["0", "2"], slots={"1": {}}))
    fixed = why(changed(STATE, draft_lens=["2"], slots={"1": {}}))
    assert fixed == "Draft length 2: it is configured and does not adapt."
    plain = changed(STATE) | {"draft_shape": {"name": "0"}}
    assert why(plain).startswith("No drafts")


def test_shared_rows_are_counted_next_to_the_reason() -> None:
    totals = STATE["totals"] | {"offered_drafts": 90, "verified_drafts": 40}
    totals["speculation"] = totals["speculation"] | {"num_accepted_tokens": 30}
    shared = changed(STATE) | {"draft_shape": {"name": "7@4"}, "totals": totals}
    found = dashboard_data(shared, {})["why"]
    assert found.endswith(" Rounds had room for 90 drafts; 40 were checked, and 30 accepted.")
    assert "had room for" not in dashboard_data(changed(STATE), {})["why"]


def row(rounds: int, emitted: int, seconds: float, batch_size: int = 1) -> dict[str, Any]:
    requests = {"request_rounds": rounds * batch_size, "emitted_tokens": emitted * batch_size}
    return {"rounds": rounds, "timed_rounds": rounds, "seconds": seconds} | requests


def counted(plain: dict[str, Any], drafted: dict[str, Any]) -> dict[str, Any]:
    """A state with rounds of both lengths."""
    latest = {"batch_size": 3, "draft_len": 0}
    totals = STATE["totals"] | {"latest_round": latest, "by_draft_len": {"0": plain, "2": drafted}}
    return changed(STATE) | {"totals": totals}


def test_the_verdict_is_what_both_lengths_took() -> None:
    found = measured(counted(row(250, 250, 37.31), row(144, 226, 36.22)))
    assert found is not None and found["speed_up"] == pytest.approx(0.931, abs=1e-3)
    assert found["plain_ms"] == pytest.approx(149.2, abs=0.1) and found["draft_len"] == 2


@pytest.mark.parametrize(
    ("plain", "drafted"),
    [
        (row(29, 29, 1.0), row(99, 200, 2.0)),
        (row(99, 99, 1.0), row(29, 50, 2.0)),
        (row(99, 99, 1.0), row(99, 200, 2.0, batch_size=2)),
    ],
)
def test_few_rounds_and_those_of_other_batch_sizes_are_no_measurement(
    plain: dict[str, Any], drafted: dict[str, Any]
) -> None:
    state = counted(plain, drafted)
    found = measured(state)
    assert found is not None and found["speed_up"] is found["plain_ms"] is None
    # The controller's own times are of the latest batch size.
    of_controller = measured(changed(state, round_ms={"3": {"0": 10.0, "2": 12.0}}))
    assert of_controller is not None
    assert of_controller["speed_up"] == pytest.approx(found["tokens_per_round"] * 10 / 12)


def test_a_server_that_has_not_drafted_has_no_verdict() -> None:
    assert measured(counted(row(99, 99, 1.0), row(0, 0, 0.0))) is None


def test_pauses_are_told_next_to_the_reason() -> None:
    data = dashboard_data(counted(row(250, 250, 37.31), row(144, 226, 36.22)), {})
    assert "250 of 394 rounds had no drafts: a request whose drafts are rejected" in data["why"]
    assert (data["draft_len"], data["round_draft_len"]) == (2, 0)
    assert "rounds had no drafts" not in dashboard_data(changed(STATE), {})["why"]
    chosen = changed(counted(row(9, 9, 1.0), row(9, 9, 1.0)), draft_lens=["0", "2"])
    assert "rounds had no drafts" not in dashboard_data(chosen, {})["why"]


def test_the_page_calls_nothing_measured_that_comes_from_its_sliders(client: TestClient) -> None:
    page = client.get("/dashboard").text
    assert "drafting pays" not in page and "estimated" not in page
    assert page.count("(measured)") == 1 and "of without (measured)" in page


def browse(url: str, folder: Path, *options: str) -> str:
    """The page after its scripts have run, as HTML."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder}", "--virtual-time-budget=4000", *options, url]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env={**os.environ}
    )
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_draws_the_dashboard(tmp_path: Path) -> None:
    with hosted(FakeLLM()) as url:
        assert httpx.get(f"{url}/dashboard/data").status_code == 200
        page = browse(f"{url}/dashboard", tmp_path, "--dump-dom")
    tiles = dict(re.findall(r'id="tile-(\w+)">([^<]*)<', page))
    assert (tiles["running"], tiles["waiting"], tiles["kv"]) == ("3", "4", "60 %")
    drawn = page.split("<script>")[0]
    assert drawn.count("<svg") == 6 and "NaN" not in drawn
    assert re.search(r'id="problem"[^>]*></p>', page), "no message about a problem"
    assert "not measured" in drawn and "live server" not in drawn


# `/openapi.json` describes bodies: those made from it are never answered with 500.


ROUTES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses"),
    *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)


@pytest.fixture(scope="module")
def openapi_client() -> Iterator[TestClient]:
    server = OpenAIServer(FakeLLM(), "fake", ServerOptions(tool_call_parser="hermes"))
    with TestClient(server.app(), raise_server_exceptions=False) as openapi_client:
        yield openapi_client


@pytest.fixture(scope="module")
def schema(openapi_client: TestClient) -> Any:
    return openapi_client.get("/openapi.json").json()


def values_of(schema: Any, root: Any) -> st.SearchStrategy[Any]:
    """Values that match a schema of this server, or nearly."""
    if "$ref" in schema:
        return values_of(root["components"]["schemas"][schema["$ref"].split("/")[-1]], root)
    if schema.get("anyOf") and "properties" in schema:
        ways = [schema | each for each in schema["anyOf"]]
        names = schema.get("required", [])
        merged = [way | {"required": names + way["required"], "anyOf": []} for way in ways]
        return st.one_of([values_of(each, root) for each in merged])
    if schema.get("anyOf"):
        return st.one_of([values_of(each, root) for each in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        needed = {
            name: values_of(each, root)
            for name, each in schema["properties"].items()
            if name in schema.get("required", ())
        }
        others = [name for name in schema["properties"] if name not in needed]
        options = {name: values_of(schema["properties"][name], root) for name in others}
        few = st.lists(st.sampled_from(others), max_size=3, unique=True) if others else st.just([])
        return few.flatmap(
            lambda names: st.fixed_dictionaries(needed | {name: options[name] for name in names})
        )
    simple: dict[str | None, Callable[[], st.SearchStrategy[Any]]] = {
        "string": lambda: st.text(max_size=5),
        "integer": lambda: st.integers(schema.get("minimum", -2), schema.get("maximum", 20)),
        "number": lambda: st.floats(-1, 2) | st.integers(0, 1),
        "boolean": st.booleans,
        "null": st.none,
        "array": lambda: st.lists(values_of(schema.get("items", {}), root), max_size=3),
    }
    return simple.get(kind, lambda: ANYTHING)()


def test_fields_with_several_forms_have_them_in_the_schema(schema: Any) -> None:
    bodies = schema["components"]["schemas"]
    prompt = bodies["CompletionRequest"]["properties"]["prompt"]
    assert [each["type"] for each in prompt["anyOf"]] == ["string", "array", "array", "array"]
    content = bodies["ChatMessage"]["properties"]["content"]
    assert [each["type"] for each in content["anyOf"]] == ["string", "array", "null"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("path", ROUTES)
@given(data=st.data())
@settings(examples(60), suppress_health_check=list(HealthCheck))
def test_bodies_made_from_the_schema_are_answered_or_refused(
    openapi_client: TestClient, schema: Any, path: str, data: st.DataObject
) -> None:
    given_schema = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    body = data.draw(values_of(given_schema["schema"], schema))
    if "model" in body:
        body["model"] = data.draw(st.sampled_from(["fake", "fake", "fake", "other"]))
    answer = openapi_client.post(path, json=body)
    if answer.status_code == 200 and body.get("stream"):
        assert answer.text.rstrip().splitlines()[-1].startswith("data: ")
    elif answer.status_code == 200:
        assert "error" not in answer.json() or answer.json()["error"] is None
    else:
        assert answer.status_code in (400, 404), answer.text
        more = set() if path.startswith("/v1/messages") else {"param", "code"}
        assert {"message", "type"} | more == answer.json()["error"].keys()
