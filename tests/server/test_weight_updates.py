"""A server's weights are updated, and it pauses, for the operator's key only."""

import json
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
        for path in ("/pause", "/resume"):
            assert ask(path, OTHER_KEY).status_code == 403
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
        for last in (3, 4):  # with the usage, and before it
            streamed = ask("/v1/completions", **BODY, **options).text.split("\n\n")
            told = json.loads(streamed[-last].removeprefix("data: "))
            assert told["weight_versions"] == after["weight_versions"]
        turn = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20}
        for path, body, last in (
            ("chat/completions", turn, -3),
            ("messages", turn, -3),
            ("responses", {"input": "a", "max_output_tokens": 20}, -2),
        ):
            chat = {"model": BODY["model"], "temperature": 0.5, **body}
            whole = ask(f"/v1/{path}", **chat).json()
            assert whole["weight_version"] == whole["weight_versions"][0]["version"] == "step 1"
            events = ask(f"/v1/{path}", **chat, stream=True).text.split("\n\n")
            assert '"weight_version": "step 1"' in events[last]
            assert not any("weight_version" in each for each in events[:last])

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
