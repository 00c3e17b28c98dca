"""The commands of docs/recording.md: what is recorded over HTTP, is trained on, swapped, replayed,
tuned and erased."""

import json
import shutil
import signal
from pathlib import Path
from time import sleep
from typing import Any

import httpx
import yaml
from click.testing import CliRunner, Result

from tests.server.served_process import MODEL, ServedProcess
from tllm_spec.cli.bench import main
from tllm_spec.cli.train import main as train
from tllm_spec.recording.traffic_folder import read_records
from tllm_spec.zoo.registry import resolve_model

KEYS = {"team-a": "a" * 20, "b": "b" * 20}
HEAD = "zoo:llama-eagle3"
SPEC = {"decoding_type": "Eagle3", "speculative_model": HEAD, "max_draft_len": 3}


def bench(*command: str) -> Result:
    result = CliRunner().invoke(main, list(command))
    assert result.exit_code == 0, result.output
    return result


def complete(url: str, client: str, **body: Any) -> str:
    answer = httpx.post(
        f"{url}/v1/completions",
        json={"model": MODEL, "prompt": "a b a b a b", "max_tokens": 12, "seed": 1, **body},
        headers={"Authorization": f"Bearer {KEYS[client]}"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def swap(url: str, client: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEYS[client]}"}
    return httpx.post(f"{url}/v1/draft_model", json=body, headers=headers, timeout=60)


def train_on(traffic: Path, output: Path) -> None:
    """On the three records of the test, when they are written."""
    while not list(traffic.glob("*.jsonl")) or len(read_records(traffic)) < 3:
        sleep(0.05)
    command = ["head", "--model", "zoo:llama", "--data", str(traffic), "--output", str(output)]
    run = "--init zoo:llama-eagle3 --steps 5 --unroll 3 --batch_tokens 64 --device cpu"
    result = CliRunner().invoke(train, [*command, *run.split()])
    assert result.exit_code == 0 and '"acceptance_length"' in result.output, result.output
    assert "Warning: 1 texts are held out" in result.output
    assert '"replayed": 1' in result.output and 'POST /v1/draft_model {"folder": "new"}' in (
        result.output
    )


def check_swaps(url: str) -> None:
    """In the folder of draft weights there are `other`, a trained head `new`, and a link that leads
    out of it."""
    text, headers = complete(url, "b"), {"Authorization": f"Bearer {KEYS['team-a']}"}
    told = swap(url, "team-a", folder="other").json()
    reason = told.pop("reason")
    assert "3 requests are recorded, and 8 are needed" in reason and "store: true" in reason
    assert told == {"version": 1, "folder": "other", "replayed": 0}
    assert complete(url, "b") == text
    assert swap(url, "team-a", folder="new").json()["version"] == 2
    assert complete(url, "b") == text
    weights = httpx.get(f"{url}/server_info", headers=headers).json()["internal_states"][0][
        "draft_weights"
    ]
    assert weights["version"] == 2 and {"0", "1", "2"} == {*weights["by_version"]}
    assert all(row["rounds"] for row in weights["by_version"].values())
    metrics = httpx.get(f"{url}/metrics", headers=headers).text
    assert 'tllm_spec_draft_version_rounds_total{draft_version="2"}' in metrics
    assert swap(url, "b", folder="other").status_code == 403
    for folder in ("../keys", "..", "/etc", "link", "nowhere", "other/config.json", "oth\0er"):
        assert swap(url, "team-a", folder=folder).status_code == 400, folder
    answer = swap(url, "team-a", folder="narrow")
    assert answer.status_code == 400 and "do not fit" in answer.json()["error"]["message"]


def test_served_traffic_is_recorded_replayed_and_erased(tmp_path: Path) -> None:
    keys, traffic = tmp_path / "keys", tmp_path / "traffic"
    keys.write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    heads = tmp_path / "heads"
    shutil.copytree(resolve_model(HEAD), heads / "other")
    shutil.copytree(resolve_model(HEAD), heads / "narrow")
    config = json.loads((heads / "narrow" / "config.json").read_text())
    (heads / "narrow" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    (heads / "link").symlink_to(tmp_path)
    operator = "--draft_model_root", str(heads), "--draft_model_key", "team-a"
    flags = "--record_traffic", str(traffic), "--api_key", f"@{keys}", *operator
    with ServedProcess(tmp_path, *flags, speculative_config=SPEC) as server:
        url = server.url
        complete(url, "b")  # of a key with a cache of its own, without consent
        complete(url, "team-a", store=True, user="u")
        complete(url, "team-a", store=True)
        complete(url, "b", store=True, temperature=0)
        complete(url, "b", store=False)
        train_on(traffic, heads / "new")
        check_swaps(url)
        assert server.end(signal.SIGTERM) == 0
    assert "record_traffic: prompts and outputs are written to" in server.text
    records = read_records(traffic)
    assert len(records) == 3

    config, report = tmp_path / "same.yaml", tmp_path / "report.json"
    config.write_text(json.dumps({"speculative_config": SPEC}))
    command = "replay", str(traffic), "--config", str(config), "--report_json", str(report)
    assert "tokens/round" in bench(*command).output
    served, replayed = json.loads(report.read_text())
    assert replayed.pop("other_rounds") == 0.0
    assert served | {"name": ""} == replayed | {"name": ""}

    best = tmp_path / "best.yaml"
    config.write_text(json.dumps({"speculative_config": SPEC | {"max_draft_len": 1}}))
    tuned = bench("tune", str(traffic), "--config", str(config), "--output", str(best)).output
    assert "plain" in tuned and "same 1" in tuned
    assert best.read_text().startswith("# ") and "speculative_config" in yaml.safe_load(best.open())

    trace = "adaptive-replay", str(traffic), "--config", str(tmp_path / "adaptive.json")
    (tmp_path / "adaptive.json").write_text("{}")
    assert "slots" in bench(*trace).output

    assert (
        "1 record erased"
        in bench("erase-traffic", str(traffic), "--client", "team-a", "--user", "u").output
    )
    assert "1 record erased" in bench("erase-traffic", str(traffic), "--client", "team-a").output
    assert [each.sampling["temperature"] for each in read_records(traffic)] == [0.0]
