"""`tllm-serve`'s options that concern the server: what it accepts, how long it waits, what it
logs."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import click

from tllm_spec.chat_formats.names import AUTO, REASONING, TOOLS, plain_name
from tllm_spec.cli import version as options
from tllm_spec.cli.version import Decorator, flag, together
from tllm_spec.config.option_checks import ADAPTER_NAME
from tllm_spec.server.options import ANY, Keys, ServerOptions, has_key, hosts_of, read_keys

KEY_VARIABLE = "TLLM_SPEC_API_KEY"
MIB = 1 << 20
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
DEFAULTS = ServerOptions()
PROCESSES, MIBS = click.IntRange(1, 64), click.IntRange(1, 512)
ABOVE_0 = click.FloatRange(0, min_open=True)


def option(names: str, kind: Any, text: str, **more: Any) -> Decorator:
    """The default is that of the field of `ServerOptions`, if the option has none of its own."""
    default = getattr(DEFAULTS, names.split()[0].removeprefix("--"), None)
    usual = {"default": default} if isinstance(default, (int, float)) else {}
    return options.option(names, kind, text, **usual | more)


class _Formats(click.Choice[str]):
    """Names of formats, with `-` or `_`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(plain_name(value), param, ctx)


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


server_options = together(
    option(
        "--frontends",
        PROCESSES,
        "Processes for HTTP and text, in front of the engine's process.",
        default=1,
    ),
    option(
        "--dp_size --data_parallel_size --dp",
        PROCESSES,
        "Engines, each with the whole model on a GPU of its own. A request goes to the one "
        "that has most of its prompt in the prefix cache and is not busy.",
    ),
    option(
        "--max_queue_size",
        click.IntRange(0),
        "Choices that may wait for a place in the batch. More are answered with 429.",
    ),
    option(
        "--max_client_choices",
        click.IntRange(1),
        "Choices that one client, by its named key or its address, may have at a time on one "
        "front process. More are answered with 429. [default: any number]",
    ),
    option(
        "--max_request_tokens",
        click.IntRange(1),
        "Output tokens that one request may ask for, all choices together. More are answered "
        "with 400. [default: any number]",
    ),
    option(
        "--max_body_mib",
        MIBS,
        "Largest body of a request, in MiB. A larger one is answered with 413.",
        default=DEFAULTS.max_body_bytes // MIB,
    ),
    option(
        "--max_answer_mib",
        MIBS,
        "Log probabilities and echoed prompts that an answer may have, in MiB, estimated "
        "before it is begun. More are answered with 400.",
        default=DEFAULTS.max_answer_bytes // MIB,
    ),
    option(
        "--max_connections", click.IntRange(1), "Open connections of one front process, at most."
    ),
    option(
        "--timeout_keep_alive",
        ABOVE_0,
        "Seconds that a connection may be idle after an answer. Clients and proxies should "
        "close it before.",
    ),
    option(
        "--request_timeout",
        ABOVE_0,
        "Seconds that a request may take, from its start to the last token.",
    ),
    option(
        "--engine_timeout",
        ABOVE_0,
        "Seconds without an answer of the engine between two rounds after which /health and "
        "new requests are answered with 503, until it answers again.",
    ),
    option(
        "--drain_delay",
        click.FloatRange(0),
        "Seconds after SIGTERM or Ctrl-C in which the server goes on and /health says 503, "
        "so that load balancers send no more requests. Then new connections are refused.",
    ),
    option(
        "--shutdown_timeout",
        click.FloatRange(0),
        "Seconds that running requests have after SIGTERM or Ctrl-C.",
    ),
    option(
        "--api_key",
        str,
        "Key that clients must send as a bearer token, everywhere but at /health and for "
        "the page /dashboard. @FILE: several, in lines `name: key`. Then each client has a prefix "
        "cache of its own.",
        envvar=KEY_VARIABLE,
        show_envvar=True,
    ),
    option(
        "--allowed_hosts",
        str,
        "Host names that requests may have, besides localhost's, separated by commas; *: any. "
        "[default: on localhost its own names, elsewhere any]",
        callback=_names,
    ),
    option(
        "--allowed_origins",
        str,
        "Origins of web pages that may call the server (CORS), separated by commas, such as "
        "https://chat.example; *: any. [default: none]",
        callback=_names,
    ),
    option(
        "--trusted_proxies",
        str,
        "Addresses and networks of proxies whose X-Forwarded-For says who the client is, "
        "separated by commas; *: any. [default: none]",
        callback=_names,
    ),
    flag(
        "--allow_control_tokens",
        "Names of control tokens in chat messages become control tokens, not text.",
    ),
    option(
        "--tool_call_parser --tool_parser",
        _Formats([AUTO, *sorted(TOOLS)]),
        "How the model writes tool calls, for requests with tools. auto: as its chat template "
        "does.",
    ),
    option(
        "--reasoning_parser",
        _Formats([AUTO, *sorted(REASONING)]),
        "How the model marks its reasoning, which becomes reasoning_content. auto: as its chat "
        "template does.",
    ),
    flag("--vllm_metrics", "/metrics has vLLM's names, too: vllm:*."),
    option(
        "--otlp_traces_endpoint",
        str,
        "URL to send OpenTelemetry spans of requests to, such as "
        "http://localhost:4318/v1/traces. Needs tllm_spec[otel].",
    ),
    option(
        "--draft_model_root",
        click.Path(exists=True, file_okay=False),
        "Folder of draft weights that POST /v1/draft_model may swap in; needs "
        "--draft_model_key. [default: none may be]",
    ),
    option(
        "--draft_model_key", str, "Name of the key in --api_key @FILE that may swap draft weights."
    ),
    flag(
        "--allow_weight_updates",
        "POST /pause, /resume, /sleep, /wake_up and the updates of weights are served; needs "
        "--weights_root and --weights_key.",
    ),
    option(
        "--weights_root",
        click.Path(exists=True, file_okay=False),
        "Folder of checkpoints that may replace the model's weights.",
    ),
    option("--weights_key", str, "Name of the key in --api_key @FILE that may do these."),
    option(
        "--lora_root",
        click.Path(exists=True, file_okay=False),
        "Folder of LoRA adapters that POST /v1/load_lora_adapter may load while requests run; "
        "needs --lora_key or --lora_auto_load. [default: none may be]",
    ),
    option("--lora_key", str, "Name of the key in --api_key @FILE that may load and unload them."),
    flag(
        "--lora_auto_load",
        "A request whose model is the name of a folder in --lora_root loads it, once.",
    ),
    option(
        "--lora_clients",
        str,
        "LoRA adapters that belong to one client, as ADAPTER=KEYNAME, separated by commas. "
        "[default: every client may use each]",
        callback=_names,
    ),
    option("--ssl_certfile", str, "Certificate in PEM format: the server speaks HTTPS."),
    option("--ssl_keyfile", str, "Private key of the certificate. [default: in --ssl_certfile]"),
    option("--ssl_keyfile_password", str, "Password of the private key."),
    option("--ssl_ca_certs", str, "CA certificates in PEM format."),
    option(
        "--log_format",
        click.Choice(["text", "json"]),
        "json: one JSON object for each line of the log.",
        default="text",
    ),
    flag("--print_config", "Print every option with its value and where it comes from, and end."),
)


# The options that most people set, which are all that `--help` shows.
COMMON = frozenset(
    (
        *("host", "port", "served_model_name", "api_key", "speculate", "speculative_model"),
        *("extra_llm_api_options", "tensor_parallel_size", "dp_size", "tokenizer"),
        *("max_batch_size", "max_num_tokens", "max_seq_len", "enable_chunked_prefill"),
        *("kv_cache_free_gpu_memory_fraction", "tool_call_parser", "reasoning_parser"),
        *("record_traffic", "log_level", "print_config"),
    )
)
SERVER_NAMES = {each.name for each in click.command()(server_options(lambda: None)).params}


def options_of(given: Mapping[str, Any], host: str) -> ServerOptions:
    """given: the values of the command line; host: the address to listen on. Raises ValueError for
    an endpoint that no spans can be sent to."""
    if given["otlp_traces_endpoint"]:
        from tllm_spec.server.traces import otlp_exporter  # heavy, and an extra

        otlp_exporter(given["otlp_traces_endpoint"])
    # click ignores an empty variable, which must be refused as an empty key.
    is_empty = given["api_key"] is None and os.environ.get(KEY_VARIABLE) == ""
    keys = read_keys("" if is_empty else given["api_key"])
    _check_operator(given, keys, "draft_model_root", "draft_model_key")
    _check_operator(given, keys, "weights_root", "weights_key")
    if given["allow_weight_updates"] != (given["weights_key"] is not None):
        raise ValueError("--allow_weight_updates, --weights_root and --weights_key need each other")
    _check_lora(given, keys)
    names = {each.name for each in fields(ServerOptions)}
    own = {name: value for name, value in given.items() if name in names}
    own |= {
        "max_body_bytes": given["max_body_mib"] * MIB,
        "max_answer_bytes": given["max_answer_mib"] * MIB,
        "api_key": keys,
        "hosts": hosts_of(host, given["allowed_hosts"]),
        "allowed_origins": _checked(
            given, "allowed_origins", ORIGIN.fullmatch, "https://chat.example"
        ),
        "lora_clients": dict(each.split("=", 1) for each in given["lora_clients"]),
        "trusted_proxies": _checked(given, "trusted_proxies", _is_network, "10.0.0.0/8"),
    }
    return ServerOptions(**own)


def _check_lora(given: Mapping[str, Any], keys: Keys) -> None:
    """Raises ValueError for folders that no client may load, and for clients without a key."""
    auto, root = given["lora_auto_load"], given["lora_root"]
    if auto and root is None:
        raise ValueError("--lora_auto_load needs --lora_root")
    if not auto or given["lora_key"] is not None:
        _check_operator(given, keys, "lora_root", "lora_key")
    for each in given["lora_clients"]:
        adapter, _, client = each.partition("=")
        if not ADAPTER_NAME.fullmatch(adapter) or not has_key(keys, client):
            raise ValueError(
                f"--lora_clients {each}: ADAPTER=KEYNAME is needed, with the name of a key in "
                "--api_key @FILE"
            )


def _check_operator(given: Mapping[str, Any], keys: Keys, root: str, key: str) -> None:
    """Weights are replaced by an operator, not by every client."""
    name = given[key]
    if (given[root] is None) != (name is None):
        raise ValueError(f"--{root} and --{key} need each other")
    if name is not None and not has_key(keys, name):
        raise ValueError(
            f"--{key} {name} is not the name of a key; --api_key @FILE with a line "
            f"`{name}: key` is needed"
        )


def _checked(
    given: Mapping[str, Any], name: str, accepts: Callable[[str], object], example: str
) -> tuple[str, ...]:
    for value in given[name]:
        if value != ANY and not accepts(value):
            raise ValueError(f"--{name} {value}: {example} or {ANY} would be accepted")
    names: tuple[str, ...] = given[name]
    return names


def _is_network(value: str) -> bool:
    try:
        return bool(ipaddress.ip_network(value))
    except ValueError:
        return False


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
