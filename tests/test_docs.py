"""The documents: links lead somewhere, named files exist, lines and pages stay short."""

import importlib.util
import json
import re
import shutil
import signal
import sys
from pathlib import Path
from time import sleep
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml
from click.testing import CliRunner, Result

from tests.server.served_process import MODEL, ServedProcess
from tllm_spec.chat_formats.names import REASONING, TOOLS
from tllm_spec.cli.bench import main
from tllm_spec.cli.train import main as train
from tllm_spec.models.automatic import as_yaml, with_drafter
from tllm_spec.recording.traffic_folder import read_records
from tllm_spec.zoo.registry import resolve_model
from tools import chat

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MAX_COLUMNS = 100
MAX_LINES = {"README.md": 150, "architecture.md": 120, "performance.md": 400, "adaptive.md": 120}
SOURCES = ("tllm_spec", "executor", "kernels")
FOLDERS = (
    "tllm_spec/",
    "executor/",
    "kernels/",
    "benchmarks/",
    "tests/",
    "docs/",
    "yaml_examples/",
    "tools/",
)


def name_of(path: Path) -> str:
    return path.name


def anchors(document: Path) -> set[str]:
    """Those of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_relative_links_lead_to_files_and_headings(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", document.read_text(encoding="utf-8"))
    targets = [(document.parent / path if path else document, anchor) for path, anchor in links]
    assert [path for path, _ in targets if not path.exists()] == []
    assert [each for each in targets if each[1] and each[1] not in anchors(each[0])] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_named_files_exist(document: Path) -> None:
    quoted = re.findall(r"`([\w/.]+)`", document.read_text(encoding="utf-8"))
    paths = [path for path in quoted if path.startswith(FOLDERS)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_lines_are_short_except_in_tables(document: Path) -> None:
    lines = document.read_text(encoding="utf-8").splitlines()
    long = [
        number
        for number, line in enumerate(lines, start=1)
        if len(line) > MAX_COLUMNS and not line.startswith("|") and "`python -m" not in line
    ]
    assert long == []


@pytest.mark.parametrize("name", MAX_LINES)
def test_pages_are_short(name: str) -> None:
    (document,) = [path for path in DOCUMENTS if path.name == name]
    assert len(document.read_text(encoding="utf-8").splitlines()) <= MAX_LINES[name]


def test_the_page_about_auto_names_every_example_in_its_table() -> None:
    page = (ROOT / "docs" / "auto.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {path.stem for path in (ROOT / "yaml_examples").glob("*.yaml")} <= named


def test_the_formats_of_the_page_about_agents_are_those_of_the_server() -> None:
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    formats = text.partition("## Clients")[0].splitlines()
    rows = [line.split("|") for line in formats if line.startswith("|") and "--" not in line]
    for column, known in ((2, REASONING), (3, TOOLS)):
        named = {name for row in rows for name in re.findall(r"`(\w+)`", row[column])}
        assert named and named <= known.keys()


def extras() -> set[str]:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    block = setup[setup.index("extras_require") :].partition("}")[0]
    return set(re.findall(r'^ +"(\w+)":', block, re.MULTILINE))


def test_the_readme_lists_every_extra_but_dev() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"'\.\[([\w,]+)\]'", readme)
    assert {extra for each in listed for extra in each.split(",")} == extras() - {"dev"}


def test_every_extra_that_a_refusal_names_can_be_installed() -> None:
    sources = [path for name in SOURCES for path in (ROOT / name).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    named = {extra for text in texts for extra in re.findall(r"tllm_spec\[(\w+)\]", text)}
    assert {"tensorrt", "onnxruntime"} <= named <= extras()


# docs/options.md is what the code says, and every option has a description.


DOCS = Path(__file__).parent.parent / "docs"
UNDESCRIBED = re.compile(r"^\| `([a-z_]+)`.*\| +\|$", re.M)


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_options", DOCS / "generate_options.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    written = (DOCS / "options.md").read_text(encoding="utf-8")
    assert written == generator.page(), "run `make docs`"


def test_every_option_of_a_configuration_is_described(generator: ModuleType) -> None:
    assert UNDESCRIBED.findall("| `some_option` | text | `null` |  |") == ["some_option"]
    assert not UNDESCRIBED.findall(generator.page())


# The examples of docs/python.md, the quick start of the README and `make chat` run as they are.


def examples(page: str, language: str = "python") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_options_file_of_the_readme_is_what_the_log_says() -> None:
    (options,) = examples("README.md", "yaml")
    chosen = with_drafter("zoo:llama", {"speculative_config": "auto"})
    assert options == as_yaml(chosen["speculative_config"])


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "docs/lora.md"])
def test_the_examples_of_a_page_run_in_their_order_and_print_something(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = examples(page)
    assert found
    names: dict[str, Any] = {"__name__": "examples"}
    for example in found:
        exec(compile(example, page, "exec"), names)
        assert capsys.readouterr().out.strip()


def test_the_chat_script_compares_the_answers_without_and_with_drafts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["chat.py", "zoo:llama", "def add(a, b):"])
    chat.main()
    out = capsys.readouterr().out
    assert "> def add(a, b):" in out and "tok/s with an acceptance length of" in out
    assert "the same text" in out
    assert out.splitlines()[-1].endswith("tllm-serve zoo:llama --speculate")


# The commands of docs/recording.md: what is recorded over HTTP, is trained on, swapped, replayed,
# tuned and erased.


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


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three records of a server, which swaps heads that were trained on them."""
    tmp_path = tmp_path_factory.mktemp("served")
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
    return traffic


@pytest.mark.slow  # each command has tests of its own
def test_recorded_traffic_is_replayed_and_tuned(traffic: Path, tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_served_traffic_is_recorded_and_erased(traffic: Path) -> None:
    assert len(read_records(traffic)) == 3
    assert (
        "1 record erased"
        in bench("erase-traffic", str(traffic), "--client", "team-a", "--user", "u").output
    )
    assert "1 record erased" in bench("erase-traffic", str(traffic), "--client", "team-a").output
    assert [each.sampling["temperature"] for each in read_records(traffic)] == [0.0]
