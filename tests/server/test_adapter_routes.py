"""Adapters by name, over engines without a model: who may load, use and see which."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from tests.server.fake_llm import MODEL, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import CHAT, SECONDS
from tllm_spec.cli.serve import main
from tllm_spec.lora_request import UnknownAdapter
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import DEFAULT_OPTIONS
from tllm_spec.server.fleet import FleetAdapters, ServedAdapter
from tllm_spec.server.options import ServerOptions

KEYS = {"operator": "o" * 20, "alice": "a" * 20, "bob": "b" * 20}
BAD, GONE = "bad", "gone"  # what a folder's file may say


class FakeEngine:
    """Its adapters are folders with one file, whose text is the hash."""

    is_running = True

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}  # hashes by name
        self.busy = {"busy"}

    def step(self, part: str, step: str, *given: Any) -> dict[str, Any]:
        steps: dict[str, Callable[..., dict[str, Any]]] = {
            "stage": self.stage,
            "keep": self.keep,
            "idle": lambda: {"names": [each for each in self.loaded if each not in self.busy]},
        }
        assert part == "adapters"
        return steps[step](*given)

    def stage(self, name: str, folder: str, root: str) -> dict[str, Any]:
        found = (Path(folder) / "adapter_config.json").read_text()
        if found == BAD:
            raise ValueError(f"{folder}: use_dora = True is refused, and outside of {root}")
        if found == GONE:
            raise RuntimeError("the engine has ended")
        return {"content_hash": found, "rank": 2}

    def keep(self, served: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
        self.loaded = {name: content_hash for name, _, content_hash in served}
        return {}


class Site:
    """A server with adapter folders a, b and bad below its root."""

    url = ""  # once it serves

    def __init__(self, root: Path) -> None:
        self.http = httpx.Client(timeout=SECONDS)
        self.root, self.llm, self.engine = root / "adapters", FakeLLM(), FakeEngine()
        engine: Any = self.engine
        self.adapters = FleetAdapters(str(root / "engine0"), lambda: [engine])
        for name in ("a", "b", "auto", BAD, GONE):
            self.write(name, name)
        (root / "outside").mkdir()
        (root / "outside" / "adapter_config.json").write_text("outside")
        (self.root / "link").symlink_to(root / "outside")
        (self.root / "loop").symlink_to("loop")
        self.options: dict[str, Any] = {
            "api_key": KEYS,
            "lora_root": str(self.root),
            "lora_key": "operator",
            "shutdown_timeout": 5,
        }

    def write(self, name: str, text: str) -> None:
        (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / name / "adapter_config.json").write_text(text)

    def ask(self, path: str, sender: str = "operator", **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEYS[sender]}"}
        method = "POST" if body else "GET"
        return self.http.request(method, f"{self.url}{path}", headers=headers, json=body or None)

    def load(self, name: str, path: str, sender: str = "operator", **more: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": path, **more}
        return self.ask("/v1/load_lora_adapter", sender, **body)

    def use(self, model: str, sender: str = "alice", **more: Any) -> httpx.Response:
        body = {"model": model, "prompt": "a", "max_tokens": 1, **more}
        return self.ask("/v1/completions", sender, **body)

    def names(self, sender: str) -> list[str]:
        return [each["id"] for each in self.ask("/v1/models", sender).json()["data"]]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    with hosted(found.llm, ServerOptions(**found.options), found.adapters) as found.url:
        yield found


def error_of(answer: httpx.Response) -> str:
    message: str = answer.json()["error"]["message"]
    assert "\n" not in message
    return message


def test_an_adapter_is_loaded_used_under_its_name_replaced_and_unloaded(site: Site) -> None:
    told = site.load("sql", "a")
    assert (told.status_code, told.json()["content_hash"], told.json()["rank"]) == (200, "a", 2)
    data = site.ask("/v1/models", "alice").json()["data"]
    assert [(each["id"], each.get("parent")) for each in data] == [(MODEL, None), ("sql", MODEL)]
    assert site.ask("/v1/models/sql", "alice").json() == data[1]
    assert site.use("sql").json()["model"] == "sql" and site.use(MODEL).json()["model"] == MODEL
    assert site.llm.adapters == ["sql", None]

    assert "lora_name = 'sql' is in use" in error_of(refused := site.load("sql", "b"))
    assert refused.status_code == 400 and site.engine.loaded == {"sql": "a"}
    assert site.load("sql", "b", load_inplace=True).json()["content_hash"] == "b"
    assert site.engine.loaded == {"sql": "b"}

    unload = "/v1/unload_lora_adapter"
    assert site.ask(unload, lora_name="sql").status_code == 200
    assert site.ask(unload, lora_name="sql").status_code == 404
    assert site.use("sql").status_code == 404 and site.engine.loaded == {}


def test_every_route_takes_the_name_in_each_form_that_clients_have(site: Site) -> None:
    assert site.ask("/load_lora_adapter", lora_name="x", lora_path="a").status_code == 200
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": CHAT},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": CHAT, "max_tokens": 2},
        "/v1/completions": {"prompt": "a"},
        "/tokenize": {"prompt": "a"},
        "/v1/messages/count_tokens": {"messages": CHAT},
    }
    choice = {"lora_name": "x", "lora_int_id": 3, "lora_path": ""}
    named = {"model": "x"}, {"model": f"{MODEL}:x"}, {"model": MODEL, "lora_request": choice}
    for path, body in bodies.items():
        for model in named[: 2 if "token" in path else 3]:
            answer = site.ask(path, **body, **model)
            assert answer.status_code == 200, answer.text
    assert site.llm.adapters == ["x"] * 12
    with_path = site.use(MODEL, lora_request=choice | {"lora_path": "/adapters/a"})
    assert "POST /v1/load_lora_adapter loads a folder" in error_of(with_path)
    two = site.use("y", lora_request=choice)
    assert (with_path.status_code, two.status_code) == (400, 400) and "two adapters" in two.text
    assert site.ask("/unload_lora_adapter", lora_name="x").status_code == 200


@pytest.mark.parametrize(
    ("name", "path", "why"),
    [
        ("x", "../outside", "lora_path = '../outside' is not a folder below --lora_root"),
        ("x", "/etc", "lora_path = '/etc' is not a folder below --lora_root"),
        ("x", "link", "lora_path = 'link' is not a folder below --lora_root"),
        ("x", "", "lora_path = '' is not a folder below --lora_root"),
        ("x", "loop", "lora_path = 'loop' is not a folder below --lora_root"),
        ("x", "a" * 5000, "... is not a folder below --lora_root"),
        ("x", "\0", "lora_path = '\\x00' is not a folder below --lora_root"),
        ("x", BAD, "x: use_dora = True is refused, and outside of --lora_root"),
        ("../x", "a", "lora_name = '../x': 1 to 128 letters"),
        (MODEL, "a", "lora_name = 'fake' is the model's own name"),
    ],
)
def test_a_wrong_name_or_folder_is_refused_in_one_sentence(
    site: Site, name: str, path: str, why: str
) -> None:
    assert site.load("kept", "a").status_code == 200
    refused = site.load(name, path)
    assert refused.status_code == 400 and why in error_of(refused)
    assert str(site.root) not in refused.text
    assert site.engine.loaded == {"kept": "a"} and site.use("kept").status_code == 200


def test_a_body_without_a_name_or_path_and_an_engine_that_ends_load_nothing(site: Site) -> None:
    for body in ({"lora_name": "x"}, {"lora_path": "a"}):
        refused = site.ask("/v1/load_lora_adapter", **body)
        assert refused.status_code == 400 and "is required" in refused.text
    refused = site.load("x", GONE)
    assert refused.status_code == 503 and "the engine has ended" in refused.text
    assert site.names("operator") == [MODEL]


def test_only_the_operator_loads_and_a_client_sees_and_uses_its_own_adapters(site: Site) -> None:
    assert site.load("x", "a", "alice").status_code == 403
    assert site.ask("/v1/unload_lora_adapter", "alice", lora_name="x").status_code == 403
    assert "no key's name" in error_of(site.load("x", "a", client="carol"))
    assert site.load("own", "a", client="alice").status_code == 200
    assert site.load("all", "b").status_code == 200
    assert site.names("alice") == site.names("operator") == [MODEL, "all", "own"]
    assert site.names("bob") == [MODEL, "all"]
    assert site.use("own", "bob").status_code == 404
    assert site.ask("/v1/models/own", "bob").status_code == 404
    assert site.load("own", "b", load_inplace=True).status_code == 200
    assert site.use("own", "bob").status_code == 404, "a replaced adapter keeps its client"
    assert site.use("own", "alice").status_code == 200
    assert site.llm.adapters == ["own"]


def test_a_request_loads_the_folder_of_its_model_only_where_it_may(tmp_path: Path) -> None:
    site = Site(tmp_path)
    options = site.options | {"lora_key": None, "lora_auto_load": True}
    options["lora_clients"] = {"a": "alice"}
    with hosted(site.llm, ServerOptions(**options), site.adapters) as site.url:
        refused = site.load("x", "a")
        assert refused.status_code == 404 and "--lora_root and --lora_key" in error_of(refused)
        assert site.use("a", "bob").status_code == 404 and not site.engine.loaded
        assert [site.use("a").status_code, site.use("auto", "bob").status_code] == [200, 200]
        assert site.engine.loaded == {"a": "a", "auto": "auto"}
        assert site.names("bob") == [MODEL, "auto"]
        for name in ("link", "loop", "..", "nothing", f"{MODEL}:nothing"):
            assert site.use(name).status_code == 404
        refused = site.use(BAD)
        assert refused.status_code == 400 and error_of(refused).startswith("bad: use_dora")


def test_adapters_that_requests_have_loaded_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    keep = site.engine.keep

    def keep_what_is_served(served: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
        names = {name for name, _, _ in served}
        assert site.adapters.served().keys() <= names, "a front would choose one that has left"
        return keep(served)

    monkeypatch.setattr(site.engine, "keep", keep_what_is_served)
    site.llm = FakeLLM(lora_config={"max_loras": 2, "max_cpu_loras": 3})
    site.write("busy", "busy")
    options = site.options | {"lora_auto_load": True}
    with hosted(site.llm, ServerOptions(**options), site.adapters) as site.url:
        assert site.load("kept", "a").status_code == 200
        for name in ("busy", "a", "b", "auto", "a"):
            assert site.use(name).status_code == 200
        assert [*site.engine.loaded] == ["kept", "busy", "a"]
        assert site.use(BAD).status_code == 400 and [*site.engine.loaded] == ["kept", "busy", "a"]
        site.engine.busy.add("a")
        refused = site.use("b")
        assert refused.status_code == 503 and "requests use those that could" in error_of(refused)
        assert [*site.engine.loaded] == ["kept", "busy", "a"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_that_made_room_before_its_request_reached_the_engine_is_loaded_again(
    stream: bool, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    site.llm = FakeLLM(lora_config={"max_loras": 1, "max_cpu_loras": 1})
    submit, others = site.llm.submit, ["b"]

    def submit_late(inputs: Any, params: Any, options: Any = DEFAULT_OPTIONS) -> RequestHandle:
        if options.adapter == "a" and others:
            other = ServedAdapter.of_folder("b", str(site.root / others.pop()), from_request=True)
            site.adapters.load(other, str(site.root), most=1)
        if options.adapter in {None, *site.engine.loaded}:
            return submit(inputs, params, options)
        handle = RequestHandle(0, inputs, [1], params, None, lambda: None)
        handle.fail(str(UnknownAdapter(options.adapter)))
        return handle

    site.llm.submit = submit_late  # type: ignore[method-assign]  # as a slow front would
    options = ServerOptions(**site.options | {"lora_auto_load": True})
    with hosted(site.llm, options, site.adapters) as site.url:
        answer = site.use("a", prompt=["a", "b"], stream=stream)
        assert answer.status_code == 200 and "error" not in answer.text
        assert not others and [*site.engine.loaded] == ["a"]
        assert answer.text.replace(" ", "").count('"finish_reason":"length"') == 2
    site.options["lora_auto_load"] = False
    with hosted(site.llm, ServerOptions(**site.options), site.adapters) as site.url:
        others.append("b")
        assert "no adapter with this name is loaded" in site.use("a", stream=stream).text


def test_fronts_that_load_the_same_folder_for_requests_at_the_same_time_load_it_once(
    site: Site,
) -> None:
    wanted = ServedAdapter.of_folder("a", str(site.root / "a"), from_request=True)
    made = site.adapters.load(wanted, str(site.root))
    assert site.adapters.load(wanted, str(site.root)) == made
    with pytest.raises(ValueError, match="lora_name = 'a' is in use"):
        site.adapters.load(ServedAdapter.of_folder("a", wanted.folder), str(site.root))


def test_a_request_does_not_get_an_adapter_that_has_just_become_another_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    load = site.adapters.load

    def load_after_the_operator(wanted: ServedAdapter, root: str, **given: Any) -> ServedAdapter:
        load(ServedAdapter.of_folder("a", wanted.folder, client="alice"), root)
        return load(wanted, root, **given)

    monkeypatch.setattr(site.adapters, "load", load_after_the_operator)
    options = ServerOptions(**site.options | {"lora_auto_load": True})
    with hosted(site.llm, options, site.adapters) as site.url:
        assert [site.use("a", name).status_code for name in ("bob", "alice")] == [404, 200]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--lora_root", "."), "--lora_root and --lora_key need each other"),
        (("--lora_auto_load",), "--lora_auto_load needs --lora_root"),
        (("--lora_root", ".", "--lora_key", "x"), "--lora_key x is not the name of a key"),
        (("--lora_clients", "a=carol"), "--lora_clients a=carol: ADAPTER=KEYNAME is needed"),
        (("--lora_root", ".", "--lora_auto_load"), "--lora_root: lora_config (--enable_lora)"),
        (("--lora_modules", "zoo:llama=x"), "lora_dir: 'zoo:llama' is the model's own name"),
        (("--lora_modules", "/x/a", "--served_model_name", "a"), "'a' is the model's own name"),
    ],
)
def test_flags_that_nobody_may_use_stop_the_start(flags: tuple[str, ...], why: str) -> None:
    result = CliRunner().invoke(main, ["zoo:llama", *flags])
    assert result.exit_code == 1 and why in result.output


@pytest.mark.parametrize(
    ("flags", "most"),
    [((), 16), (("--max_loras", "2"), 8), (("--max_cpu_loras", "5"), 5)],
)
def test_what_requests_may_load_is_bounded(flags: tuple[str, ...], most: int) -> None:
    own = "--enable_lora", "--lora_root", ".", "--lora_auto_load", "--print_config"
    result = CliRunner().invoke(main, ["zoo:llama", *own, *flags])
    assert f"  max_cpu_loras: {most}  #" in result.output


def test_what_is_served_outlives_a_front_and_the_file_is_read_again_only_if_it_has_changed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.load("x", "a", client="bob")
    other: Any = FleetAdapters(str(site.root.parent / "engine0"))
    assert other.read()["x"].client == "bob" and other.read()["x"].version == "x@a"
    monkeypatch.setattr(other, "made", None)
    assert list(other.read()) == ["x"]
    monkeypatch.undo()
    site.load("y", "b")
    assert sorted(other.read()) == ["x", "y"]


def test_openais_client_lists_adapters(site: Site) -> None:
    site.load("sql", "a")
    key = KEYS["bob"]
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0) as client:
        assert [each.id for each in client.models.list()] == [MODEL, "sql"]
        messages: Any = CHAT
        assert client.chat.completions.create(model="sql", messages=messages).model == "sql"
