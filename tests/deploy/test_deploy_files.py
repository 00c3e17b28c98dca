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
    flags = {each.partition("=")[0] for each in arguments if each.startswith("--")}
    of_model = {flag for flag in flags if flag[2:] in {*LlmArgs.model_fields, *LlmArgs.renamed}}
    assert flags and flags - of_model <= known, flags - of_model - known


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
    assert job["authorization"] == {"credentials_file": "/run/secrets/api_key"}


def test_compose_asks_for_each_secret_and_uses_none_twice() -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    services = compose["services"]
    key = services["server"]["environment"]["TLLM_SPEC_API_KEY"]
    password = services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    names = [re.match(r"\$\{(\w+):\?", value) for value in (key, password)]
    assert all(names) and names[0][1] != names[1][1]  # type: ignore[index]
    assert all("size=" in mount for mount in services["server"]["tmpfs"])
    assert any("retention.size" in option for option in services["prometheus"]["command"])


def test_what_listens_to_other_machines_has_a_key_of_its_owners() -> None:
    """No file has a key, and none starts a server of everybody's."""
    for path in sorted(DEPLOY.rglob("*.*")):
        text = path.read_text(encoding="utf-8")
        assert "change-me" not in text and "literals" not in text, path
        if "0.0.0.0" in text and "tllm-serve" in text:
            assert re.search(r"TLLM_SPEC_API_KEY|--api_key @", text), path


def test_prometheus_accepts_its_configuration() -> None:
    run(tool("promtool"), "check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml"))


def built(tmp_path: Path, folder: str) -> dict[str, Any]:
    """The objects of a kustomize folder by kind, with a key of one's own."""
    shutil.copytree(DEPLOY / "kubernetes", tmp_path, dirs_exist_ok=True)
    (tmp_path / "base/api_key.env").write_text("api_key=abc\n")
    text = run(tool("kubectl"), "kustomize", str(tmp_path / folder))
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_nothing_is_applied_to_kubernetes_without_a_key() -> None:
    assert not (BASE / "api_key.env").exists()
    command = [tool("kubectl"), "kustomize", str(BASE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "api_key.env" in done.stderr and not done.stdout.strip()
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "api_key.env" in ignored
    not_in_images = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert "deploy/kubernetes" in not_in_images


def test_prometheus_sends_the_key_of_the_servers(tmp_path: Path) -> None:
    objects = built(tmp_path, "prometheus")
    (endpoint,) = objects["PodMonitor"]["spec"]["podMetricsEndpoints"]
    secret = objects["Secret"]["metadata"]["name"]
    credentials = {"name": secret, "key": "api_key"}
    assert endpoint["authorization"] == {"credentials": credentials}
    template = objects["Deployment"]["spec"]["template"]
    labels = objects["PodMonitor"]["spec"]["selector"]["matchLabels"]
    assert labels.items() <= template["metadata"]["labels"].items()
    assert "annotations" not in template["metadata"], "an annotation scrape has no key"
    (container,) = template["spec"]["containers"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]


def test_kubernetes_pods_draft_and_have_no_more_than_they_need(tmp_path: Path) -> None:
    objects = built(tmp_path, "base")
    deployment = objects["Deployment"]["spec"]
    pod = deployment["template"]["spec"]
    (server,) = pod["containers"]
    (flag,) = [each for each in server["args"] if each.startswith("--config=")]
    folder, name = Path(flag.removeprefix("--config=")).parts[1:]
    assert {"name": folder, "mountPath": f"/{folder}", "readOnly": True} in server["volumeMounts"]
    options = yaml.safe_load(objects["ConfigMap"]["data"][name])
    head = options["speculative_config"].pop("speculative_model")
    options["speculative_config"]["speculative_model"] = "zoo:llama-eagle3"
    assert LlmArgs.from_kwargs("zoo:llama", **options).speculative_config
    (fill,) = documents(BASE / "fill-models.yaml")
    filled = (BASE / "fill-models.yaml").read_text()
    assert f":{head}\n" in filled and f":{server['args'][0]}\n" in filled
    (volume,) = fill["spec"]["volumes"]
    claim = objects["PersistentVolumeClaim"]
    assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for each in (pod, fill["spec"]):
        assert each["automountServiceAccountToken"] is False
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == deployment["selector"] and policy["egress"] == []
    assert policy["ingress"][0]["ports"] == [{"port": server["ports"][0]["name"]}]


@pytest.mark.parametrize("path", ["kubernetes/base/deployment.yaml", "mpi/mpijob.yaml"])
def test_every_volume_that_a_pod_writes_has_a_limit(path: str) -> None:
    text = (DEPLOY / path).read_text(encoding="utf-8")
    assert text.count("emptyDir:") == text.count("sizeLimit:") > 0


def test_kubernetes_files_fit_together(tmp_path: Path) -> None:
    objects = built(tmp_path, "base")
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
    for line in ("LimitCORE=0", "DevicePolicy=closed", "NoNewPrivileges=yes"):
        assert f"\n{line}\n" in text
    assert "--host" not in command[2], "it has no TLS"
    unit = tmp_path / "tllm-serve.service"
    unit.write_text(text.replace(command[1], "/bin/true"))
    run(tool("systemd-analyze"), "verify", str(unit))


def test_haproxy_accepts_its_configuration() -> None:
    command = tool("haproxy"), "-c", "-f", str(DEPLOY / "haproxy.cfg")
    assert subprocess.run(command, capture_output=True).returncode == 0


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
