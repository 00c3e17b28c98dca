"""Replicas of the server on Ray Serve, where Ray is installed."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.test_deploy_files import DEPLOY
from tests.deploy.test_rolling_restart import free_ports
from tests.server.http_answers import SECONDS, wait_for
from tllm_spec import LLM, SamplingParams

ray = pytest.importorskip("ray")
from ray import serve  # noqa: E402
from ray.serve.schema import ServeDeploySchema  # noqa: E402

from tllm_spec.ray_serve import NAME, WAITING, build_app, by_waiting_requests  # noqa: E402

ROOT = Path(__file__).parents[2]
MODEL = "zoo:llama"
PROMPTS = [f"import os{' ' * n}" for n in range(8)]
# None waits in a replica, also if Ray gives it more than the other one.
COMMAND = f"{MODEL} --max_batch_size {len(PROMPTS)}"
NUM_TOKENS = 1500  # that take longer than it takes to kill a replica

# On a busy machine. By default Ray gives a replica nothing that takes 0.1 s to say how many
# requests it has, and starts a proxy again that takes 5 s to start.
PATIENCE = (
    "QUEUE_LENGTH_RESPONSE_DEADLINE",
    "MAX_QUEUE_LENGTH_RESPONSE_DEADLINE",
    "PROXY_READY_CHECK_TIMEOUT",
)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--port 80", "--port: not served here"),
        ("--dp_size 2 --drain_delay 1", "--dp_size, --drain_delay: not served here"),
        ("--max_batch_size none", "not a valid integer"),
        ("--enable_lora", "lora_config: adapters are not served here; tllm-serve serves them"),
        ("--skip_tokenizer_init", "skip_tokenizer_init"),
    ],
)
def test_a_command_that_cannot_be_served_is_refused_before_a_replica_starts(
    flags: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_app({"command": f"{COMMAND} {flags}"})


def test_other_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'model'"):
        build_app({"model": MODEL})


@pytest.mark.parametrize(
    ("waiting", "current", "wanted"),
    [([0, 0], 2, 1), ([3, 1], 2, 2), ([9, 0], 2, 3), ([40], 1, 10)],
)
def test_replicas_are_as_many_as_waiting_requests_need(
    waiting: list[float], current: int, wanted: int
) -> None:
    reported = {WAITING: dict(enumerate(waiting))}
    context: Any = SimpleNamespace(aggregated_metrics=reported, current_num_replicas=current)
    assert by_waiting_requests(context)[0] == wanted


def test_the_configuration_names_what_exists() -> None:
    read = yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(read).applications
    assert application.import_path == f"{build_app.__module__}:{build_app.__name__}"
    (deployment,) = application.deployments
    assert deployment.name == NAME
    policy = deployment.autoscaling_config["policy"]["policy_function"]
    assert policy == f"{by_waiting_requests.__module__}:{by_waiting_requests.__name__}"


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two replicas."""
    (port,) = free_ports(1)
    for name in PATIENCE:
        monkeypatch.setenv(f"RAY_SERVE_{name}_S", str(SECONDS))
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": paths})
    try:
        serve.start(http_options={"port": port})
        serve.run(build_app({"command": COMMAND, "num_replicas": 2}))
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


def replicas() -> list[int]:
    found = subprocess.run(
        ["pgrep", "-f", "^ray::ServeReplica"], capture_output=True, text=True, check=False
    )
    return [int(line) for line in found.stdout.split()]


class Client(threading.Thread):
    """Asks once. `text`: None if the answer was not complete."""

    def __init__(self, url: str, prompt: str) -> None:
        super().__init__()
        self.text: str | None = None
        self.has_begun = threading.Event()
        self._url, self._prompt = url, prompt

    def run(self) -> None:
        asked = {"prompt": self._prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        body = asked | {"model": MODEL, "stream": True, "temperature": 0}
        text, lines = "", []
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=body, timeout=SECONDS
            ) as got:
                for line in got.iter_lines():
                    self.has_begun.set()
                    lines.append(line)
                    if line.startswith("data: {"):
                        text += yaml.safe_load(line[6:])["choices"][0]["text"]
        except httpx.HTTPError:
            pass
        self.has_begun.set()
        if "data: [DONE]" in lines:
            self.text = text


@pytest.mark.slow
def test_a_killed_replica_loses_its_own_streams_only_and_is_replaced(url: str) -> None:
    clients = [Client(url, prompt) for prompt in PROMPTS]
    for client in clients:  # one after the other: each goes to the replica that has fewer
        client.start()
        client.has_begun.wait()
    first, second = replicas()
    os.kill(first, signal.SIGKILL)
    for client in clients:
        client.join()
    complete = {client._prompt: client.text for client in clients if client.text is not None}
    assert 0 < len(complete) < len(clients)
    with LLM(MODEL, max_batch_size=len(PROMPTS)) as llm:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        wanted = llm.generate(list(complete), params, use_tqdm=False)
    assert list(complete.values()) == [each.outputs[0].text for each in wanted]
    wait_for(lambda: len(replicas()) == 2 and second in replicas())
    metrics = httpx.get(f"{url}/metrics").text.splitlines()
    assert all('replica="' in line for line in metrics if not line.startswith("#"))
    again = Client(url, PROMPTS[0])
    again.start()
    again.join()
    assert again.text is not None
