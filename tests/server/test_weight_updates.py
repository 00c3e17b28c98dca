"""A server's weights are updated, and it pauses, for the operator's key only."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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

KEY, OTHER_KEY = "a" * 20, "b" * 20
BODY = SHORT | {"max_tokens": 20, "ignore_eos": True, "temperature": 0.5, "seed": 3}


def headers_of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def expected(model: str) -> str:
    with LLM(model, device="cpu", max_batch_size=4) as llm:
        params = {name: value for name, value in BODY.items() if name not in ("model", "prompt")}
        text: str = llm.generate(BODY["prompt"], params).outputs[0].text
        return text


def check_sleep(ask: Callable[..., httpx.Response], client: httpx.Client, choices: Any) -> None:
    for path in ("/pause", "/resume", "/sleep", "/wake_up"):
        assert ask(path, OTHER_KEY).status_code == 403
    assert ask("/sleep?level=1").json()["memory"]["freed_bytes"] > 0
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ask, "/v1/completions", **BODY)
        assert client.get("/is_sleeping", headers=headers_of(KEY)).json() == {"is_sleeping": True}
        assert ask("/wake_up?tags=weight").status_code == 400
        assert ask("/wake_up?tags=weights").json()["is_sleeping"]
        assert not ask("/wake_up?tags=weights,kv_cache").json()["is_sleeping"]
        assert waiting.result().json()["choices"] == choices


def test_the_operator_updates_the_weights_and_pauses(tmp_path: Path) -> None:
    keys, root = tmp_path / "keys", tmp_path / "weights"
    root.mkdir()
    keys.write_text(f"operator: {KEY}\nclient: {OTHER_KEY}\n")
    other = copy_of("zoo:llama", root / "b", 0.9)
    broken = copy_of("zoo:llama", root / "broken", 0.9) / "model.safetensors"
    save_file(load_file(broken) | {"model.norm.weight": torch.ones(3)}, broken)
    flags = "--allow_weight_updates", "--weights_root", str(root), "--weights_key", "operator"
    spec = {"decoding_type": "NGram", "max_draft_len": 3}
    with (
        ServedProcess(
            tmp_path, *("--api_key", f"@{keys}", *flags), load_format="auto",
            speculative_config=spec,
        ) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
        ThreadPoolExecutor(1) as thread,
    ):  # fmt: skip

        def ask(path: str, key: str = KEY, **body: Any) -> httpx.Response:
            return client.post(path, json=body, headers=headers_of(key))

        def update(folder: str, key: str = KEY, **more: Any) -> httpx.Response:
            return ask("/update_weights_from_disk", key, model_path=folder, **more)

        before = ask("/v1/completions", **BODY).json()
        assert before["weight_version"] == "default"
        assert update("b", OTHER_KEY).status_code == 403
        for folder, why in (
            ("../weights", "model_path"),
            (str(tmp_path), "is not a folder below --weights_root"),
            ("broken", "model.norm.weight has the shape [3]"),
        ):
            refused = update(folder)
            assert refused.status_code == 400 and why in refused.text
        assert update("b", flush_cache=False).status_code == 400
        assert ask("/v1/completions", **BODY).json()["choices"] == before["choices"]

        told = update("b", weight_version="step 1").json()
        assert told["success"] and told["weight_version"] == "step 1"
        after = ask("/v1/completions", **BODY).json()
        assert after["weight_versions"] == [{"version": "step 1", "start": 0, "end": 20}]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = ask("/v1/completions", **BODY, **options).text.split("\n\n")
        assert json.loads(streamed[-3].removeprefix("data: "))["weight_version"] == "step 1"

        assert ask("/pause?mode=keep").json() == {"is_paused": True}
        waiting = thread.submit(ask, "/v1/completions", **BODY)
        assert client.get("/health").text == "paused"
        assert ask("/resume").json() == {"is_paused": False}
        assert waiting.result().json()["choices"] == after["choices"]
        assert ask("/pause").json() == {"is_paused": True}, "abort, as at vLLM"
        refused = ask("/v1/completions", **BODY)
        assert refused.status_code == 503 and "paused and takes no requests" in refused.text
        assert client.get("/is_paused", headers=headers_of(KEY)).json() == {"is_paused": True}
        ask("/resume")
        assert ask("/v1/completions", **BODY).json()["choices"] == after["choices"]

        check_sleep(ask, client, after["choices"])
    texts = [each["choices"][0]["text"] for each in (before, after)]
    assert texts == [expected("zoo:llama"), expected(str(other))] and texts[0] != texts[1]


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
