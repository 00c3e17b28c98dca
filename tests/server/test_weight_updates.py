"""A server's weights are updated, and it pauses, for the operator's key only."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from tests.executor.test_draft_weights import copy_of
from tests.server.http_answers import SECONDS
from tests.server.served_process import SHORT, ServedProcess
from tllm_spec.cli.serve_options import options_of, server_options
from tllm_spec.llm import LLM
from tllm_spec.zoo.registry import resolve_model

KEY, OTHER_KEY = "a" * 20, "b" * 20
BODY = SHORT | {"max_tokens": 20, "ignore_eos": True, "temperature": 0.5, "seed": 3}


def headers_of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def shared(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """A body with these tensors in shared memory."""
    memory = SharedMemory(create=True, size=sum(each.nbytes for each in tensors.values()))
    named, offset = list[dict[str, Any]](), 0
    for name, each in tensors.items():
        end = offset + each.nbytes
        memory.buf[offset:end] = each.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(each.dtype).removeprefix("torch.")
        named.append({"name": name, "dtype": dtype, "shape": list(each.shape), "offset": offset})
        offset = end
    try:
        yield {"named_tensors": named, "shared_memory": memory.name}
    finally:
        memory.close()
        memory.unlink()


def expected(model: str) -> str:
    with LLM(model, device="cpu", max_batch_size=4) as llm:
        params = {name: value for name, value in BODY.items() if name not in ("model", "prompt")}
        text: str = llm.generate(BODY["prompt"], params).outputs[0].text
        return text


def check_sleep(served: "Served", choices: Any) -> None:
    ask, is_sleeping = served.ask, partial(served.client.get, "/is_sleeping")
    for path in ("/pause", "/resume", "/sleep", "/wake_up"):
        assert ask(path, OTHER_KEY).status_code == 403
    for path in ("/is_paused", "/is_sleeping"):
        found = [served.client.get(path, headers=headers_of(key)) for key in (OTHER_KEY, "none")]
        assert [each.status_code for each in found] == [403, 401]
    assert ask("/sleep?level=1").json()["memory"]["freed_bytes"] > 0
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(served.choices)
        assert is_sleeping(headers=headers_of(KEY)).json() == {"is_sleeping": True}
        assert ask("/wake_up?tags=weight").status_code == 400
        assert ask("/wake_up?tags=weights").json()["is_sleeping"]
        assert not ask("/wake_up?tags=weights,kv_cache").json()["is_sleeping"]
        assert waiting.result() == choices


@dataclass
class Served:
    """A server of zoo:llama. root: has another checkpoint in the folder b."""

    client: httpx.Client
    root: Path

    def ask(self, path: str, key: str = KEY, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers_of(key))

    def update(self, folder: str, key: str = KEY, **more: Any) -> httpx.Response:
        return self.ask("/update_weights_from_disk", key, model_path=folder, **more)

    def choices(self) -> Any:
        return self.ask("/v1/completions", **BODY).json()["choices"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    keys, root = folder / "keys", folder / "weights"
    root.mkdir()
    keys.write_text(f"operator: {KEY}\nclient: {OTHER_KEY}\n")
    shutil.copytree(resolve_model("zoo:llama"), root / "a")
    copy_of("zoo:llama", root / "b", 0.9)
    flags = "--allow_weight_updates", "--weights_root", str(root), "--weights_key", "operator"
    spec = {"decoding_type": "NGram", "max_draft_len": 3}
    with (
        ServedProcess(
            folder, *("--api_key", f"@{keys}", *flags), load_format="auto", speculative_config=spec
        ) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        yield Served(client, root)


def test_the_operator_updates_the_weights_and_pauses(served: Served) -> None:
    ask, update = served.ask, served.update
    broken = copy_of("zoo:llama", served.root / "broken", 0.9) / "model.safetensors"
    save_file(load_file(broken) | {"model.norm.weight": torch.ones(3)}, broken)
    before = ask("/v1/completions", **BODY).json()
    assert before["weight_version"] == "default"
    (served.root / "link").symlink_to(resolve_model("zoo:llama"))
    assert update("b", OTHER_KEY).status_code == 403
    for folder, why in (
        ("../weights", "model_path"),
        ("link", "is not a folder below --weights_root"),
        ("b/config.json", "is not a folder below --weights_root"),
        ("b\0", "is not a folder below --weights_root"),
        ("", "is not a folder below --weights_root"),
        (str(served.root.parent), "is not a folder below --weights_root"),
        ("broken", "model.norm.weight has the shape [3]"),
    ):
        refused = update(folder)
        assert refused.status_code == 400 and why in refused.text
    assert update("b", flush_cache=False).status_code == 400
    assert served.choices() == before["choices"]

    told = update("b", weight_version="step 1").json()
    assert told["success"] and told["weight_version"] == "step 1"
    after = ask("/v1/completions", **BODY).json()
    assert after["weight_versions"] == [{"version": "step 1", "start": 0, "end": 20}]
    texts = [each["choices"][0]["text"] for each in (before, after)]
    other = str(served.root / "b")
    assert texts == [expected("zoo:llama"), expected(other)] and texts[0] != texts[1]

    assert ask("/pause?mode=keep").json() == {"is_paused": True}
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(served.choices)
        assert served.client.get("/health").text == "paused"
        assert ask("/resume").json() == {"is_paused": False}
        assert waiting.result() == after["choices"]
    assert ask("/pause").json() == {"is_paused": True}, "abort, as at vLLM"
    refused = ask("/v1/completions", **BODY)
    assert refused.status_code == 503 and "paused and takes no requests" in refused.text
    paused = served.client.get("/is_paused", headers=headers_of(KEY))
    assert paused.json() == {"is_paused": True}
    ask("/resume")
    assert served.choices() == after["choices"]
    check_sleep(served, after["choices"])


def test_every_kind_of_answer_says_which_weights_computed_it(served: Served) -> None:
    """A stream does in its last chunk, and in that of the usage."""
    served.update("b", weight_version="step 1")
    body = {"model": BODY["model"], "temperature": 0.5, "max_tokens": 9}
    turn = body | {"messages": [{"role": "user", "content": "a"}]}
    usage = {"stream_options": {"include_usage": True}}
    for path, asked, last in (
        ("completions", body | {"prompt": "a"}, [-3]),
        ("completions", body | {"prompt": "a"} | usage, [-4, -3]),
        ("chat/completions", turn, [-3]),
        ("messages", turn, [-3]),
        ("responses", {"model": BODY["model"], "input": "a", "max_output_tokens": 9}, [-2]),
    ):
        if "stream_options" not in asked:
            whole = served.ask(f"/v1/{path}", **asked).json()
            assert whole["weight_version"] == whole["weight_versions"][0]["version"] == "step 1"
        events = served.ask(f"/v1/{path}", **asked, stream=True).text.split("\n\n")
        having = ['"weight_version": "step 1"' in event for event in events]
        assert [index - len(events) for index, has in enumerate(having) if has] == last


def test_tensors_come_from_the_memory_of_another_process(served: Served) -> None:
    served.update("b")
    expected = served.choices()
    served.update("a")
    before = served.choices()
    with shared(load_file(served.root / "b" / "model.safetensors")) as body:
        send, tensors = partial(served.ask, "/update_weights_from_tensor"), body["named_tensors"]
        assert send(OTHER_KEY, **body).status_code == 403
        for wrong, why in (
            ({"named_tensors": [*tensors[:-1], tensors[-1] | {"offset": 1 << 30}]}, "ends at byte"),
            ({"named_tensors": tensors[1:]}, "missing"),
            ({"named_tensors": []}, "at least one tensor"),
            ({"shared_memory": "../x"}, "shared_memory"),
            ({"shared_memory": "none"}, "No such file"),
            ({"cuda_handle": "0" * 128, "pid": 1}, "either shared_memory or cuda_handle"),
            ({"serialized_named_tensors": ["gASV"]}, "are pickles, which run code"),
        ):
            refused = send(**body | wrong)
            assert refused.status_code == 400 and why in refused.text
        assert served.choices() == before != expected
        assert send(**body, weight_version="step 2").json()["weight_version"] == "step 2"
    assert served.choices() == expected


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((), None),
        (("--allow_weight_updates",), "need each other"),
        (("--weights_root", ".", "--weights_key", "operator"), "need each other"),
        (("--weights_root", "."), "--weights_root and --weights_key need each other"),
        (
            ("--allow_weight_updates", "--weights_root", ".", "--weights_key", "x"),
            "--weights_key x",
        ),
    ],
)
def test_the_flags_of_weight_updates_need_each_other(
    tmp_path: Path, flags: tuple[str, ...], why: str | None
) -> None:
    (tmp_path / "keys").write_text(f"operator: {KEY}\n")

    def run(**given: Any) -> None:
        options_of(given, "127.0.0.1")

    command = click.command()(server_options(run))
    result = CliRunner().invoke(command, ["--api_key", f"@{tmp_path / 'keys'}", *flags])
    assert (result.exception is None) if why is None else (why in str(result.exception))
