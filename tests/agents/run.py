"""Serves a scripted model, which calls a tool, and lets agents' client libraries use it, each in an
environment of its own: `make agents`. Prints client, version and whether it passed."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.scripted_model import save_scripted

HERE = Path(__file__).parent
START_SECONDS, CLIENT_SECONDS = 120, 300
KEY, MODEL = "any-key", "scripted"
FIRST, AFTER, OBJECT, EDIT = "<|first|>", "<|after|>", "<|object|>", "<|edit|>"
# By the piece that ends the prompt. The first begins inside reasoning, the others after it.
SCRIPTS = {
    FIRST: [
        *("I should look it up.", "</think>", "\n\n", "<tool_call>", "\n<function=get_weather>\n"),
        *("<parameter=city>\n", "Paris", "\n</parameter>\n", "</function>\n", "</tool_call>"),
    ],
    AFTER: ["It is 21 degrees", " in Paris."],
    OBJECT: ['{"city": "Paris",', ' "celsius": 21}'],
    EDIT: ["hello.py\n", "```\n", "print('yes')\n", "```"],
}
TEMPLATE = (
    "{% set found = namespace(kind='first') %}"
    "{% if tools %}{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n{{ value }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|end|>\n"
    "{% if message.role == 'tool' %}{% set found.kind = 'after' %}"
    "{% elif 'An object, please.' in (message.content or '') %}{% set found.kind = 'object' %}"
    "{% elif 'An edit, please.' in (message.content or '') %}{% set found.kind = 'edit' %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant\n<think>\n"
    "{% if found.kind != 'first' %}\n</think>\n\n{% endif %}<|{{ found.kind }}|>{% endif %}"
)
# Drafts are the model's own text, so that reasoning's end and a call's begin share a window.
OPTIONS = """
speculative_config: {decoding_type: Draft_Target, max_draft_len: 4, speculative_model: MODEL}
kv_cache_config: {max_tokens: 65536}
"""


@dataclass(frozen=True)
class Client:
    """packages: of pip, or of npm for a script that Node runs. The first one's version is shown."""

    script: str
    packages: Sequence[str]
    name: str = ""


CLIENTS = (
    Client("openai_chat.py", ("openai<2",), "openai_1"),
    Client("openai_chat.py", ("openai",)),
    Client("openai_responses.py", ("openai",)),
    Client("openai_agents.py", ("openai-agents",)),
    Client("pydantic_ai_agent.py", ("pydantic-ai-slim[openai]",)),
    Client("langchain_agent.py", ("langchain", "langchain-openai")),
    Client("litellm_chat.py", ("litellm",)),
    Client("anthropic_messages.py", ("anthropic",)),
    Client("aider_edit.py", ("aider-chat",)),
    Client(
        "ai_sdk.mjs",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
    ),
)


def main() -> int:
    """Returns 0 if all clients passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build/agents"))
    parser.add_argument("--only", default="", help="a part of the names of clients to run")
    options = parser.parse_args()
    build = options.build.resolve()
    model = save_scripted(build / MODEL, SCRIPTS, TEMPLATE)
    chosen = [client for client in CLIENTS if options.only in (client.name or client.script)]
    results = []
    options_yaml = OPTIONS.replace("MODEL", str(model))
    with served(model, build / "server.log", options_yaml, ("auto", "auto")) as url:
        environment = os.environ | {
            "MODEL": MODEL,
            "OPENAI_API_KEY": KEY,
            "OPENAI_BASE_URL": f"{url}/v1",
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_BASE_URL": url,
        }
        for client in chosen:
            results.append(ran(client, build, environment))
            print("| {:<24} | {:<28} | {} |".format(*results[-1]), flush=True)
    return int(any(result != "passed" for _, _, result in results))


@contextmanager
def served(model: Path, log: Path, yaml: str, parsers: tuple[str, str]) -> Iterator[str]:
    """Yields the URL of a server, which ends afterwards. yaml: extra options of the LLM. parsers:
    of reasoning and of tools."""
    options = model / "options.yaml"
    options.write_text(yaml)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tllm_spec.cli.serve", str(model), "--port", str(port)]
    command += ["--extra_llm_api_options", str(options), "--served_model_name", MODEL]
    command += ["--reasoning_parser", parsers[0], "--tool_parser", parsers[1]]
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(f"{url}/health"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ran(client: Client, build: Path, environment: dict[str, str]) -> tuple[str, str, str]:
    """The client's name, its version and "passed", or what went wrong."""
    script = HERE / "clients" / client.script
    name, first = client.name or script.stem, re.split("[<[]", client.packages[0])[0]
    folder = build / re.sub(r"\W+", "_", client.packages[0])
    try:
        if script.suffix == ".mjs":
            runner, version = node(folder, client.packages, first)
            shutil.copy(script, folder)
            script = folder / script.name
        else:
            runner, version = python(folder, client.packages, first)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        return name, first, f"not installed: {error}"
    try:
        run = subprocess.run(
            [runner, str(script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=CLIENT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return name, f"{first} {version}", f"took more than {CLIENT_SECONDS} s"
    (build / f"{name}.log").write_text(run.stdout + run.stderr)
    reason = (run.stdout + run.stderr).strip().split("\n")[-1][:200]
    return name, f"{first} {version}", "failed: " + reason if run.returncode else "passed"


def python(folder: Path, packages: Sequence[str], first: str) -> tuple[str, str]:
    """Path of a Python with the packages, and the version of the first."""
    runner = folder / "bin" / "python"
    if not runner.exists():
        venv.create(folder, with_pip=True)
        _command(runner, "-m", "pip", "install", "-q", *packages)
    code = f"import importlib.metadata as m; print(m.version({first!r}))"
    return str(runner), _command(runner, "-c", code)


def node(folder: Path, packages: Sequence[str], first: str) -> tuple[str, str]:
    """Path of Node, with the packages in `folder`, and the version of the first."""
    if not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _command("npm", "install", "--silent", "--prefix", folder, *packages)
    code = f"console.log(require('{folder}/node_modules/{first}/package.json').version)"
    return str(shutil.which("node")), _command("node", "-e", code)


def _command(*command: object) -> str:
    done = subprocess.run([str(each) for each in command], capture_output=True, check=True)
    return done.stdout.decode().strip()


if __name__ == "__main__":
    sys.exit(main())
