"""The files in `deploy/`: the tools that read them accept them, and their times fit together."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tllm_spec.cli.serve import main
from tllm_spec.config.llm_args import LlmArgs

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes/base"
REQUEST_TIMEOUT = 3600


def tool(name: str) -> str:
    """The path of a program; without it the test is skipped."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def seconds_of(arguments: str, flag: str) -> int:
    found = re.search(rf"--{flag}[ =]\"?(\d+)", arguments)
    return int(found[1]) if found else 0


def check_flags(arguments: list[str]) -> None:
    """Every flag of `tllm-serve` exists."""
    known = {
        name for option in main.params for name in option.opts if isinstance(option, click.Option)
    }
    flags = [each.partition("=")[0] for each in arguments if each.startswith("--")]
    assert flags and set(flags) <= known, set(flags) - known


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def test_every_yaml_file_is_read() -> None:
    paths = sorted(DEPLOY.rglob("*.y*ml"))
    assert len(paths) > 8 and all(all(documents(path)) for path in paths)


def test_the_image_has_two_targets_of_another_user_than_root_with_a_cache() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    assert [re.match(r"\S+ AS (\w+)", stage)[1] for stage in stages] == ["cpu", "cuda"]  # type: ignore[index]
    for stage in stages:
        user = re.findall(r"^USER (\S+)", stage, re.MULTILINE)[-1]
        assert user not in ("root", "0") and f"--uid {user}" in stage
        assert "VOLUME /cache" in stage and "XDG_CACHE_HOME=/cache" in stage
        assert '"tllm-serve"' in stage
        extras = re.findall(r"/src\[([\w,]+)\]", stage)[0].split(",")
        assert all(f'"{extra}":' in (ROOT / "setup.py").read_text() for extra in extras)


def test_compose_starts_a_server_that_prometheus_and_grafana_know() -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    server = compose["services"]["server"]
    check_flags(server["command"])
    command = " ".join(server["command"])
    grace = int(server["stop_grace_period"].removesuffix("s"))
    assert grace > seconds_of(command, "drain_delay") + seconds_of(command, "shutdown_timeout")
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).is_file(), source
    (scrape,) = documents(DEPLOY / "prometheus.yml")
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}]


def test_prometheus_accepts_its_configuration() -> None:
    run(tool("promtool"), "check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml"))


def test_kubernetes_files_fit_together() -> None:
    built = yaml.safe_load_all(run(tool("kubectl"), "kustomize", str(BASE)))
    objects = {each["kind"]: each for each in built}
    deployment = objects["Deployment"]["spec"]
    pod = deployment["template"]["spec"]
    (server,) = pod["containers"]
    check_flags(server["args"])
    arguments = " ".join(server["args"])
    hook = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    ending = seconds_of(arguments, "drain_delay") + seconds_of(arguments, "shutdown_timeout")
    assert pod["terminationGracePeriodSeconds"] > hook + ending > 300
    readiness = server["readinessProbe"]
    assert hook > readiness["periodSeconds"] * readiness["failureThreshold"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": "http"}
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    for kind in ("Service", "PodDisruptionBudget"):
        selector = objects[kind]["spec"]["selector"]
        assert (selector.get("matchLabels") or selector).items() <= labels.items() and selector
    secret = server["env"][0]["valueFrom"]["secretKeyRef"]
    assert secret["name"] == objects["Secret"]["metadata"]["name"]
    assert secret["key"] in objects["Secret"]["data"]
    (metric,) = objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert f"`{name}`" in (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert volumes == {mount["name"] for mount in server["volumeMounts"]}


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "tllm-serve.service").read_text(encoding="utf-8")
    command = re.search(r"ExecStart=(\S+) ((?:.*\\\n)*.*)", text)
    assert command is not None
    check_flags(command[2].split())
    ending = seconds_of(command[2], "drain_delay") + seconds_of(command[2], "shutdown_timeout")
    assert int(re.findall(r"TimeoutStopSec=(\d+)", text)[0]) > ending > 300
    unit = tmp_path / "tllm-serve.service"
    unit.write_text(text.replace(command[1], "/bin/true"))
    run(tool("systemd-analyze"), "verify", str(unit))


def test_haproxy_accepts_its_configuration() -> None:
    run(tool("haproxy"), "-c", "-f", str(DEPLOY / "haproxy.cfg"))


def test_haproxy_turns_away_from_a_server_before_its_drain_is_over() -> None:
    text = (DEPLOY / "haproxy.cfg").read_text(encoding="utf-8")
    interval, fall = map(int, re.findall(r"inter (\d+)s fall (\d+)", text)[0])
    assert seconds_of(text, "drain_delay") > interval * fall + 1
    assert text.count(f"{REQUEST_TIMEOUT}s") == 2
    assert re.findall(r"retry-on (.*)", text) == ["conn-failure"]


def test_nginx_accepts_its_configuration_and_does_not_collect_streams(tmp_path: Path) -> None:
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    assert "proxy_buffering off;" in text and "next_upstream error timeout;" in text
    run(tool("nginx"), "-t", *nginx_options(tmp_path, text))


def nginx_options(folder: Path, text: str) -> list[str]:
    """For an nginx that writes into `folder` only."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    own = "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    path = folder / "nginx.conf"
    own += f"    access_log {folder}/access;\n"
    path.write_text(f"pid {folder}/pid;\n" + text.replace("http {\n", f"http {{\n{own}", 1))
    return ["-c", str(path), "-p", str(folder), "-e", f"{folder}/errors"]


def test_examples_of_several_hosts_start_as_many_ranks_as_the_model_has_parts() -> None:
    run("bash", "-n", str(DEPLOY / "mpi/slurm.sh"))
    script = (DEPLOY / "mpi/slurm.sh").read_text(encoding="utf-8")
    check_flags(re.findall(r"tllm-serve \"\$model\"((?:.*\\?\n)*)", script)[0].split())
    (job,) = documents(DEPLOY / "mpi/mpijob.yaml")
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    check_flags(launcher["args"])
    ranks = replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    assert launcher["command"][2] == str(ranks) and f"--tp_size={ranks}" in launcher["args"]


def test_the_page_on_deploying_names_every_file() -> None:
    page = (ROOT / "docs/deploying.md").read_text(encoding="utf-8")
    for path in DEPLOY.rglob("*"):
        shown = path.relative_to(ROOT).as_posix()
        assert path.is_dir() or shown in page or path.parent.relative_to(ROOT).as_posix() in page


def test_the_configuration_of_kv_events_on_the_page_is_accepted() -> None:
    page = (ROOT / "docs/deploying.md").read_text(encoding="utf-8")
    for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        assert LlmArgs.from_kwargs("zoo:llama", **yaml.safe_load(block))
