"""The HTTP server as a deployment of Ray Serve, which starts replicas, sends requests to them and
scales by the requests that wait. It needs the extra `ray`.

    serve run tllm_spec.ray_serve:build_app command="/models/llama --config eagle3.yaml"
"""

from __future__ import annotations

import asyncio
import math
import shlex
from typing import TYPE_CHECKING, Any

import torch
from ray import serve
from ray.serve import Application

from tllm_spec.cli.serve import ServeCommandLine, read_command_line
from tllm_spec.llm import LLM
from tllm_spec.server.app import OpenAIServer

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve.config import AutoscalingContext

NAME = "tllm-serve"  # of the deployment
WAITING = "num_requests_waiting"
WAITING_PER_REPLICA = 4.0  # that the number of replicas aims at, as deploy/kubernetes does
# What Ray Serve does itself, or the machine it runs on.
NOT_SERVED = (
    *("host", "port", "frontends", "dp_size", "drain_delay", "shutdown_timeout", "log_format"),
    *("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "print_config"),
    # A swap would reach one replica only.
    *("draft_model_root", "draft_model_key", "lora_root", "lora_key", "lora_auto_load"),
)


def build_app(args: dict[str, Any]) -> Application:
    """Ray Serve's builder. `command`: what would follow `tllm-serve` on a command line.
    `num_replicas`: 1 by default. Raises ValueError for a command that cannot be served, before a
    replica is started.

    A replica has `tensor_parallel_size` GPUs of one host. Files of `serve deploy` may set Ray's
    other options of the deployment, as `autoscaling_config`."""
    if not {"command"} <= set(args) <= {"command", "num_replicas"}:
        raise ValueError(f"arguments {sorted(args)}: command, num_replicas are accepted")
    line = read_command_line(shlex.split(args["command"]), NOT_SERVED)
    if line.args.lora_config is not None:
        raise ValueError("lora_config: adapters are not served here; tllm-serve serves them")
    num_gpus = line.args.tensor_parallel_size if torch.cuda.is_available() else 0
    deployment = serve.deployment(
        name=NAME,
        num_replicas=int(args.get("num_replicas", 1)),
        ray_actor_options={"num_gpus": num_gpus},
        # The engine's queue is what clients wait in, and what answers 429.
        max_ongoing_requests=line.server.max_connections,
        graceful_shutdown_timeout_s=line.server.request_timeout,
    )(serve.ingress()(Replica))
    app: Application = deployment.bind(args["command"])
    return app


class Replica:
    """An engine in the replica's process, and the routes of `tllm-serve`."""

    def __init__(self, command: str) -> None:
        line: ServeCommandLine = read_command_line(shlex.split(command), NOT_SERVED)
        self._llm = LLM(**line.args.as_options())
        # Ray sends each scrape to any replica.
        replica = serve.get_replica_context().replica_id.unique_id
        self._server = OpenAIServer(self._llm, line.served_model_name, line.server, replica=replica)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._server.app()

    def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises."""
        if not self._llm.is_healthy:
            raise RuntimeError("the engine has ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `by_waiting_requests` reads. The engine answers between two rounds."""
        info = await asyncio.to_thread(self._llm.server_info)
        return {WAITING: info["internal_states"][0][WAITING]}


def by_waiting_requests(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """A policy for `autoscaling_config`: as many replicas as keep the waiting requests of each at
    `WAITING_PER_REPLICA`, and one fewer where none wait."""
    waiting = sum(context.aggregated_metrics.get(WAITING, {}).values())
    current = max(1, context.current_num_replicas)
    if waiting > 0:
        return max(current, math.ceil(waiting / WAITING_PER_REPLICA)), {}
    return current - 1, {}
