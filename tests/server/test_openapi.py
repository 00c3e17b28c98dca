"""`/openapi.json` describes bodies: those made from it are never answered with 500."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.fake_llm import FakeLLM
from tllm_spec.server.app import OpenAIServer
from tllm_spec.server.options import ServerOptions

ROUTES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses"),
    *("/tokenize", "/detokenize"),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    server = OpenAIServer(FakeLLM(), "fake", ServerOptions(tool_call_parser="hermes"))
    with TestClient(server.app(), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def schema(client: TestClient) -> Any:
    return client.get("/openapi.json").json()


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


@pytest.mark.parametrize("path", ROUTES)
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_bodies_made_from_the_schema_are_answered_or_refused(
    client: TestClient, schema: Any, path: str, data: st.DataObject
) -> None:
    given_schema = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    body = data.draw(values_of(given_schema["schema"], schema))
    if "model" in body:
        body["model"] = data.draw(st.sampled_from(["fake", "fake", "fake", "other"]))
    answer = client.post(path, json=body)
    if answer.status_code == 200 and body.get("stream"):
        assert answer.text.rstrip().splitlines()[-1].startswith("data: ")
    elif answer.status_code == 200:
        assert "error" not in answer.json() or answer.json()["error"] is None
    else:
        assert answer.status_code in (400, 404), answer.text
        assert {"message", "type", "param", "code"} == answer.json()["error"].keys()
