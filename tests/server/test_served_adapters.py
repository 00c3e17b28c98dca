"""Adapters of real engines behind a server: all engines load one, or none, and no request is lost
while adapters come and go."""

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.server.engine_fleet import Fleet, write_adapters
from tests.server.engine_thread import PROMPT
from tests.server.http_answers import SECONDS, wait_for
from tests.server.served_process import ServedProcess
from tests.server.test_replicas import CACHE
from tllm_spec import LLM, LoRARequest, SamplingParams
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.sampling_params import RequestOptions
from tllm_spec.server.engine_process import with_served_adapters
from tllm_spec.server.fleet import FleetAdapters, ServedAdapter
from tllm_spec.server.replicas import Replicas

MODEL = "zoo:llama"
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_batch_size": 4,
    "guided_decoding_backend": None,
    "kv_cache_config": CACHE,
    "speculative_config": {"decoding_type": "NGram", "max_draft_len": 3},
    "lora_config": {"max_loras": 2},
}
ARGS = LlmArgs.from_kwargs(MODEL, **OPTIONS)
PARAMS: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.7, "seed": 5}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders a, b and c; nan, cut, wide and linked are not served."""
    root = tmp_path_factory.mktemp("adapters")
    write_adapters(root, "a", "b", "c", "nan", "cut", "wide")
    tensors = load_file(root / "nan" / "adapter_model.safetensors")
    first = next(iter(tensors))
    nan = {first: torch.full_like(tensors[first], float("nan"))}
    save_file(tensors | nan, root / "nan" / "adapter_model.safetensors")
    wide = {first: torch.zeros(4, 3)}
    save_file(tensors | wide, root / "wide" / "adapter_model.safetensors")
    write_adapters(root.parent / "outside", "linked")
    (root / "linked").mkdir()
    for file in (root.parent / "outside" / "linked").iterdir():
        (root / "linked" / file.name).symlink_to(file)
    cut = root / "cut" / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    return root


@pytest.fixture(scope="module")
def texts(root: Path) -> dict[str, str]:
    """The text of PROMPT with each adapter, and with none."""
    with LLM(MODEL, **OPTIONS) as llm:
        found: dict[str, str] = {}
        for name in ("", "a", "b", "c"):
            request = LoRARequest(name, lora_path=root / name) if name else None
            output: Any = llm.generate(PROMPT, PARAMS, lora_request=request)
            found[name] = output.outputs[0].text
    assert len({*found.values()}) == 4
    return found


class AdapterFleet(Fleet):
    def served(self) -> list[dict[str, str]]:
        """The folders by the names of adapters, for each engine."""
        infos = [parts.adapters.infos.values() for parts in self.parts]
        return [{each.name: Path(each.folder).name for each in own} for own in infos]

    def load(self, adapters: FleetAdapters, name: str, folder: str) -> ServedAdapter:
        wanted = ServedAdapter.of_folder(name, f"{self.root}/{folder}")
        return adapters.load(wanted, str(self.root), replaces=True)


@pytest.fixture
def fleet(tmp_path: Path, root: Path) -> Iterator[AdapterFleet]:
    fleet = AdapterFleet(tmp_path, root)
    yield fleet
    fleet.close()


def test_all_engines_load_while_requests_run_and_each_request_keeps_its_version(
    fleet: AdapterFleet, texts: dict[str, str]
) -> None:
    params = SamplingParams(**PARAMS)

    async def change(replicas: Replicas) -> None:
        async def written(adapter: str | None) -> set[str]:
            options = RequestOptions(adapter=adapter)
            handles = [replicas.submit(PROMPT, params, options) for _ in range(3)]
            return {(await handle).outputs[0].text for handle in handles}

        assert await written("x") == {texts["a"]} and await written(None) == {texts[""]}
        during = asyncio.create_task(written("x"))
        await asyncio.sleep(0)
        await asyncio.to_thread(fleet.load, replicas.adapters, "x", "b")
        assert await during == {texts["a"]}
        assert await written("x") == {texts["b"]}
        await asyncio.to_thread(fleet.load, replicas.adapters, "y", "c")
        assert await written("y") == {texts["c"]} and await written(None) == {texts[""]}
        await asyncio.to_thread(replicas.adapters.unload, "x")
        with pytest.raises(LookupError):
            await asyncio.to_thread(replicas.adapters.unload, "x")

    fleet.use(change)
    assert fleet.served() == [{"y": "c"}] * 2
    again = with_served_adapters(fleet.args, FleetAdapters(fleet.paths[0]).read())
    assert again.lora_config is not None
    assert again.lora_config.lora_dir == {"y": f"{fleet.root}/c"}, "of one started again"


def test_an_engine_does_not_serve_a_folder_that_has_changed_since_others_loaded_it(
    fleet: AdapterFleet,
) -> None:
    infos = fleet.engines[0].part("adapters").infos
    other = [type(infos[0])("x", "0" * 64, 4, "folder")]
    with pytest.raises(ValueError, match="folder has changed since it was loaded"):
        FleetAdapters(fleet.paths[0]).publish(other)
    assert fleet.served() == [{"x": "a"}] * 2


def test_no_adapter_makes_room_when_all_engines_have_ended_meanwhile(tmp_path: Path) -> None:
    served = {"x": ServedAdapter.of_folder("x", "folder", from_request=True)}
    assert FleetAdapters(str(tmp_path / "engine"))._with_room(served, 1) == served


KEY = "a" * 20
# What is said of folders that are refused.
BAD = {
    "nan": "finite",
    "cut": "",
    "wide": "its layer",
    "../outside": "below",
    "linked": "files outside of",
}
BODY: dict[str, Any] = {"prompt": PROMPT, **PARAMS}


class Site:
    """A server of processes whose operator may load the folders of the root."""

    def __init__(self, folder: Path, root: Path, *flags: str) -> None:
        (folder / "keys").write_text(f"operator: {KEY}\n")
        own = "--lora_root", str(root), "--lora_key", "operator", "--api_key", f"@{folder}/keys"
        modules = "--lora_modules", f"a={root / 'a'}"
        self.process = ServedProcess(folder, *own, *flags, *modules, load_format="auto", **OPTIONS)
        headers = {"Authorization": f"Bearer {KEY}"}
        self.http = httpx.Client(headers=headers, timeout=SECONDS)

    def __enter__(self) -> "Site":
        self.http.base_url = httpx.URL(self.process.url)
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.close()
        self.process.__exit__(*exception)

    def load(self, name: str, folder: str) -> httpx.Response:
        body = {"lora_name": name, "lora_path": folder, "load_inplace": True}
        return self.http.post("/v1/load_lora_adapter", json=body)

    def text(self, model: str) -> str:
        answer = self.http.post("/v1/completions", json=BODY | {"model": model})
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["choices"][0]["text"]
        return found

    def engines(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.http.get("/server_info").json()["internal_states"]
        return found


@pytest.mark.slow
def test_adapters_come_and_go_under_load_without_a_lost_request(
    tmp_path: Path, root: Path, texts: dict[str, str]
) -> None:
    over, seen = Event(), {"a": set[str](), "b": set[str](), MODEL: set[str]()}

    def ask(model: str) -> None:
        while not over.is_set():
            seen[model].add(site.text(model))

    with Site(tmp_path, root) as site, ThreadPoolExecutor(3) as threads, ExitStack() as at_end:
        at_end.callback(over.set)
        assert site.load("b", "b").status_code == 200
        asking = [threads.submit(ask, model) for model in seen]
        for bad, why in BAD.items():
            refused = site.load("a", bad)
            message = refused.json()["error"]["message"]
            assert refused.status_code == 400 and why in message and "\n" not in message
        wait_for(lambda: all(seen.values()))
        assert seen == {"a": {texts["a"]}, "b": {texts["b"]}, MODEL: {texts[""]}}
        assert site.load("a", "c").json()["success"]
        wait_for(lambda: len(seen["a"]) == 2)
        assert site.load("c", "c").status_code == 200 and site.text("c") == texts["c"]
        unload = {"lora_name": "c"}
        assert site.http.post("/v1/unload_lora_adapter", json=unload).status_code == 200
        over.set()
        assert [each.result() for each in asking] == [None] * 3
        assert seen == {"a": {texts["a"], texts["c"]}, "b": {texts["b"]}, MODEL: {texts[""]}}
        assert site.text("a") == texts["c"]
        assert site.process.end(signal.SIGTERM) == 0
        assert "Traceback" not in site.process.text
        assert ", adapter b, " in site.process.text


@pytest.mark.slow
def test_an_engine_that_is_started_again_has_the_adapters_of_the_others(
    tmp_path: Path, root: Path, texts: dict[str, str]
) -> None:
    with Site(tmp_path, root, "--dp_size", "2", "--frontends", "2") as site:
        wait_for(lambda: len(site.engines()) == 2)
        assert site.load("a", "b").status_code == 200 and site.load("y", "c").status_code == 200
        os.kill(site.engines()[0]["ranks"][0]["process"], signal.SIGKILL)
        wait_for(lambda: len(site.engines()) == 1)
        assert [site.text("a"), site.text("y")] == [texts["b"], texts["c"]]
        wait_for(lambda: len(site.engines()) == 2)
        for engine in site.engines():
            assert sorted(engine["adapters"]["loaded"]) == ["a", "y"]
        found = [site.text(name) for name in ("a", "y", MODEL) for _ in range(4)]
        assert found == [texts[name] for name in ("b", "c", "") for _ in range(4)]
        assert site.process.end(signal.SIGTERM) == 0
        assert "Traceback" not in site.process.text
