"""`tllm-serve`'s options that concern the server: what it accepts, how long it waits, what it
logs."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import click

from tllm_spec.server.options import ANY, Keys, ServerOptions, hosts_of, read_keys
from tllm_spec.server.parsers.names import STARTS_INSIDE, TOOL_PARSERS

Command = Callable[..., Any]

KEY_VARIABLE = "TLLM_SPEC_API_KEY"
MIB = 1 << 20
DEFAULTS = ServerOptions()


def _names(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Names separated by commas, or vLLM's form: a JSON list."""
    if value is None:
        return ()
    try:
        given = json.loads(value) if value.strip().startswith("[") else value.split(",")
    except json.JSONDecodeError:
        given = []
    if not given or not all(isinstance(name, str) and name.strip() for name in given):
        raise click.BadParameter(f"{value!r} must be names separated by commas")
    return tuple(name.strip() for name in given)


SERVER_CLICK_OPTIONS = (
    click.option(
        "--frontends",
        type=click.IntRange(1, 64),
        default=1,
        help="Processes for HTTP and text, in front of the engine's process.",
    ),
    click.option(
        "--dp_size",
        "--data_parallel_size",
        "--dp",
        type=click.IntRange(1, 64),
        default=DEFAULTS.dp_size,
        help="Engines, each with the whole model on a GPU of its own. A request goes to the one "
        "that has most of its prompt in the prefix cache and is not busy.",
    ),
    click.option(
        "--max_queue_size",
        type=click.IntRange(0),
        default=DEFAULTS.max_queue_size,
        help="Choices that may wait for a place in the batch. More are answered with 429.",
    ),
    click.option(
        "--max_client_choices",
        type=click.IntRange(1),
        help="Choices that one client, by its named key or its address, may have at a time on one "
        "front process. More are answered with 429. [default: any number]",
    ),
    click.option(
        "--max_request_tokens",
        type=click.IntRange(1),
        help="Output tokens that one request may ask for, all choices together. More are answered "
        "with 400. [default: any number]",
    ),
    click.option(
        "--max_body_mib",
        type=click.IntRange(1, 512),
        default=DEFAULTS.max_body_bytes // MIB,
        help="Largest body of a request, in MiB. A larger one is answered with 413.",
    ),
    click.option(
        "--max_answer_mib",
        type=click.IntRange(1, 512),
        default=DEFAULTS.max_answer_bytes // MIB,
        help="Log probabilities and echoed prompts that an answer may have, in MiB, estimated "
        "before it is begun. More are answered with 400.",
    ),
    click.option(
        "--max_connections",
        type=click.IntRange(1),
        default=DEFAULTS.max_connections,
        help="Open connections of one front process, at most.",
    ),
    click.option(
        "--timeout_keep_alive",
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULTS.timeout_keep_alive,
        help="Seconds that a connection may be idle after an answer. Clients and proxies should "
        "close it before.",
    ),
    click.option(
        "--request_timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULTS.request_timeout,
        help="Seconds that a request may take, from its start to the last token.",
    ),
    click.option(
        "--engine_timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULTS.engine_timeout,
        help="Seconds without an answer of the engine between two rounds after which /health and "
        "new requests are answered with 503, until it answers again.",
    ),
    click.option(
        "--drain_delay",
        type=click.FloatRange(min=0),
        default=DEFAULTS.drain_delay,
        help="Seconds after SIGTERM or Ctrl-C in which the server goes on and /health says 503, "
        "so that load balancers send no more requests. Then new connections are refused.",
    ),
    click.option(
        "--shutdown_timeout",
        type=click.FloatRange(min=0),
        default=DEFAULTS.shutdown_timeout,
        help="Seconds that running requests have after SIGTERM or Ctrl-C.",
    ),
    click.option(
        "--api_key",
        envvar=KEY_VARIABLE,
        show_envvar=True,
        help="Key that clients must send as a bearer token, everywhere but at /health and for "
        "the page /dashboard. @FILE: several, in lines `name: key`. Then each client has a prefix "
        "cache of its own.",
    ),
    click.option(
        "--allowed_hosts",
        callback=_names,
        help="Host names that requests may have, besides localhost's, separated by commas; *: any. "
        "[default: on localhost its own names, elsewhere any]",
    ),
    click.option(
        "--allowed_origins",
        callback=_names,
        help="Origins of web pages that may call the server (CORS), separated by commas, such as "
        "https://chat.example; *: any. [default: none]",
    ),
    click.option(
        "--trusted_proxies",
        callback=_names,
        help="Addresses and networks of proxies whose X-Forwarded-For says who the client is, "
        "separated by commas; *: any. [default: none]",
    ),
    click.option(
        "--allow_control_tokens",
        is_flag=True,
        help="Names of control tokens in chat messages become control tokens, not text.",
    ),
    click.option(
        "--tool_call_parser",
        "--tool_parser",
        type=click.Choice(sorted(TOOL_PARSERS)),
        help="How the model writes tool calls, for requests with tools.",
    ),
    click.option(
        "--reasoning_parser",
        type=click.Choice(sorted(STARTS_INSIDE)),
        help="How the model marks its reasoning, which becomes reasoning_content.",
    ),
    click.option("--vllm_metrics", is_flag=True, help="/metrics has vLLM's names, too: vllm:*."),
    click.option(
        "--otlp_traces_endpoint",
        help="URL to send OpenTelemetry spans of requests to, such as "
        "http://localhost:4318/v1/traces. Needs tllm_spec[otel].",
    ),
    click.option(
        "--draft_model_root",
        type=click.Path(exists=True, file_okay=False),
        help="Folder of draft weights that POST /v1/draft_model may swap in; needs "
        "--draft_model_key. [default: none may be]",
    ),
    click.option(
        "--draft_model_key", help="Name of the key in --api_key @FILE that may swap draft weights."
    ),
    click.option("--ssl_certfile", help="Certificate in PEM format: the server speaks HTTPS."),
    click.option(
        "--ssl_keyfile", help="Private key of the certificate. [default: in --ssl_certfile]"
    ),
    click.option("--ssl_keyfile_password", help="Password of the private key."),
    click.option("--ssl_ca_certs", help="CA certificates in PEM format."),
    click.option(
        "--log_format",
        type=click.Choice(["text", "json"]),
        default="text",
        help="json: one JSON object for each line of the log.",
    ),
    click.option(
        "--print_config",
        is_flag=True,
        help="Print every option with its value and where it comes from, and end.",
    ),
)


SERVER_NAMES = (
    "frontends",
    "dp_size",
    "max_queue_size",
    "max_client_choices",
    "max_request_tokens",
    "max_body_mib",
    "max_answer_mib",
    "max_connections",
    "timeout_keep_alive",
    "request_timeout",
    "engine_timeout",
    "drain_delay",
    "shutdown_timeout",
    "api_key",
    "allowed_hosts",
    "allowed_origins",
    "trusted_proxies",
    "allow_control_tokens",
    "tool_call_parser",
    "reasoning_parser",
    "vllm_metrics",
    "otlp_traces_endpoint",
    "draft_model_root",
    "draft_model_key",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_keyfile_password",
    "ssl_ca_certs",
    "log_format",
    "print_config",
)


def server_options(command: Command) -> Command:
    """A decorator that adds the options."""
    return reduce(lambda wrapped, option: option(wrapped), reversed(SERVER_CLICK_OPTIONS), command)


def options_of(given: Mapping[str, Any], host: str) -> ServerOptions:
    """given: the values of the command line; host: the address to listen on. Raises ValueError for
    an endpoint that no spans can be sent to."""
    if endpoint := given["otlp_traces_endpoint"]:
        from tllm_spec.server.traces import otlp_exporter  # heavy, and an extra

        otlp_exporter(endpoint)
    keys = read_keys(_given_key(given["api_key"]))
    _check_draft_key(given, keys)
    return ServerOptions(
        dp_size=given["dp_size"],
        max_body_bytes=given["max_body_mib"] * MIB,
        max_answer_bytes=given["max_answer_mib"] * MIB,
        max_connections=given["max_connections"],
        max_queue_size=given["max_queue_size"],
        max_client_choices=given["max_client_choices"],
        max_request_tokens=given["max_request_tokens"],
        timeout_keep_alive=given["timeout_keep_alive"],
        request_timeout=given["request_timeout"],
        engine_timeout=given["engine_timeout"],
        drain_delay=given["drain_delay"],
        shutdown_timeout=given["shutdown_timeout"],
        api_key=keys,
        hosts=hosts_of(host, given["allowed_hosts"]),
        allowed_origins=_checked(given, "allowed_origins", _is_origin, "https://chat.example"),
        trusted_proxies=_checked(given, "trusted_proxies", _is_network, "10.0.0.0/8"),
        allow_control_tokens=given["allow_control_tokens"],
        tool_call_parser=given["tool_call_parser"],
        reasoning_parser=given["reasoning_parser"],
        vllm_metrics=given["vllm_metrics"],
        otlp_traces_endpoint=endpoint,
        draft_model_root=given["draft_model_root"],
        draft_model_key=given["draft_model_key"],
    )


def _check_draft_key(given: Mapping[str, Any], keys: Keys) -> None:
    """Draft weights are swapped by an operator, not by every client."""
    root, name = given["draft_model_root"], given["draft_model_key"]
    if (root is None) != (name is None):
        raise ValueError("--draft_model_root and --draft_model_key need each other")
    if name is not None and (not isinstance(keys, Mapping) or name not in keys):
        raise ValueError(
            f"--draft_model_key {name} is not the name of a key; --api_key @FILE with a line "
            f"`{name}: key` is needed"
        )


def _given_key(key: str | None) -> str | None:
    """The key as given. click ignores an empty variable, which must be refused as an empty key."""
    return "" if key is None and os.environ.get(KEY_VARIABLE) == "" else key


def _checked(
    given: Mapping[str, Any], name: str, accepts: Callable[[str], bool], example: str
) -> tuple[str, ...]:
    for value in given[name]:
        if value != ANY and not accepts(value):
            raise ValueError(f"--{name} {value}: {example} or {ANY} would be accepted")
    names: tuple[str, ...] = given[name]
    return names


def _is_origin(value: str) -> bool:
    return re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", value) is not None


def _is_network(value: str) -> bool:
    try:
        ipaddress.ip_network(value)
    except ValueError:
        return False
    return True


def tls_of(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """uvicorn's TLS files. Raises ValueError for a key without a certificate, and for files that
    do not exist."""
    names = ("certfile", "keyfile", "keyfile_password", "ca_certs")
    files = {name: given[f"ssl_{name}"] for name in names}
    set_names = [f"--ssl_{name}" for name, value in files.items() if value is not None]
    if set_names and files["certfile"] is None:
        raise ValueError(f"{' and '.join(set_names)} need --ssl_certfile")
    for name in ("certfile", "keyfile", "ca_certs"):
        if files[name] is not None and not os.path.isfile(files[name]):
            raise ValueError(f"--ssl_{name} {files[name]} is not a file")
    return files if set_names else None
