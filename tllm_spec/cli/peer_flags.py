"""Flags of `vllm serve` and of SGLang's server, as `tllm-serve` takes them.

A flag whose meaning is the same becomes an argument of `LLM`; any other is refused with the name
of what to use here. `--help` hides these flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from operator import not_
from typing import Any

import click

from tllm_spec.cli.trtllm_options import NO_LORA, PeerOption, either_spelling
from tllm_spec.config.config_base import ConfigError
from tllm_spec.config.not_served import NO_QUANTISING
from tllm_spec.config.option_checks import NotServed, shown
from tllm_spec.config.peer_options import ALGORITHMS, LLM_PEERS, with_our_names

DTYPES = {"half": "float16", "float": "float32"}
ATTENTION = {"TRITON_ATTN": "TRITON"}
# Flags whose value is the model, which is an argument without a name here.
MODEL_FLAGS = ("--model_path", "--model")


def _differs(name: str) -> NotServed:
    return NotServed((), f"use {LLM_PEERS[name]}")


def _renamed(names: Mapping[str, str]) -> Callable[[str], str]:
    """A value by its name here; an unknown one stays, and LLM's check names what is accepted."""
    return lambda value: names.get(value, value)


def _no_value(given: bool) -> None:
    """The argument is null."""


def _dtype(name: str) -> str:
    return DTYPES.get(name, name)


def _attention(name: str) -> str:
    return ATTENTION.get(name.upper(), name.upper())


def _weights(name: str) -> str:
    return "auto" if name == "safetensors" else name


def speculative_mapping(text: str) -> dict[str, Any]:
    """vLLM's `--speculative-config`, a JSON object, with the names of the YAML file. Names that are
    not vLLM's are taken as they are. Raises click.BadParameter for anything but an object."""
    return with_our_names(_json_object(text))


def _json_object(text: str) -> dict[str, Any]:
    """Raises click.BadParameter for anything else."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{shown(text)} is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise click.BadParameter(f"{shown(text)} is not a JSON object")
    return options


SPECULATIVE = "speculative_config"
PEER_FLAGS = (
    # vLLM
    PeerOption("--max_model_len", int, "max_seq_len"),
    PeerOption("--max_num_seqs", int, "max_batch_size"),
    PeerOption("--max_num_batched_tokens", int, "max_num_tokens"),
    PeerOption("--block_size --page_size", int, "kv_cache_config.tokens_per_block"),
    PeerOption(
        "--enable_prefix_caching/--no_enable_prefix_caching",
        bool,
        "kv_cache_config.enable_block_reuse",
    ),
    PeerOption("--enforce_eager --disable_cuda_graph", bool, "cuda_graph_config", _no_value),
    PeerOption("--dtype", str, "dtype", _dtype),
    PeerOption("--load_format", str, "load_format", _weights),
    PeerOption("--scheduling_policy", str, "scheduler_config.waiting_queue_policy"),
    PeerOption("--stream_interval", int, "stream_interval"),
    PeerOption("--language_model_only", bool, "language_model_only"),
    PeerOption("--async_scheduling/--no_async_scheduling", bool, "disable_overlap_scheduler", not_),
    PeerOption("--attention_backend", str, "attn_backend", _attention),
    PeerOption("--guided_decoding_backend --grammar_backend", str, "guided_decoding_backend"),
    PeerOption("--speculative_config", speculative_mapping, SPECULATIVE),
    PeerOption("--kv_events_config", _json_object, "kv_cache_config.kv_events_config"),
    PeerOption(
        "--enable_auto_tool_choice",
        bool,
        NotServed((True,), "tool calls are parsed as soon as --tool_call_parser is given"),
    ),
    PeerOption("--tokenizer_mode", str, "tokenizer_mode"),
    PeerOption("--gpu_memory_utilization", float, _differs("gpu_memory_utilization")),
    PeerOption("--quantization", str, NotServed((), NO_QUANTISING)),
    PeerOption("--enable_lora", bool, NotServed((), NO_LORA)),
    PeerOption("--lora_modules --lora_paths", str, NotServed((), NO_LORA)),
    PeerOption("--enable_expert_parallel", bool, NotServed((), "use --moe_expert_parallel_size N")),
    PeerOption(
        "--compilation_config", str, NotServed((), "use cuda_graph_config in the YAML file")
    ),
    PeerOption("--seed --random_seed", int, NotServed((), "a request has its own seed")),
    # SGLang
    PeerOption("--context_length", int, "max_seq_len"),
    PeerOption("--max_running_requests", int, "max_batch_size"),
    PeerOption("--max_total_tokens", int, "kv_cache_config.max_tokens"),
    PeerOption("--disable_radix_cache", bool, "kv_cache_config.enable_block_reuse", not_),
    PeerOption("--cuda_graph_max_bs", int, "cuda_graph_config.max_batch_size"),
    PeerOption("--enable_deterministic_inference", bool, "deterministic"),
    PeerOption("--disable_overlap_schedule", bool, "disable_overlap_scheduler"),
    PeerOption("--tokenizer_path", str, "tokenizer"),
    PeerOption(
        "--speculative_algorithm", str, f"{SPECULATIVE}.decoding_type", _renamed(ALGORITHMS)
    ),
    PeerOption(
        "--speculative_draft_model_path", str, f"{SPECULATIVE}.speculative_draft_model_path"
    ),
    PeerOption(
        "--speculative_draft_window_size", int, f"{SPECULATIVE}.speculative_draft_window_size"
    ),
    PeerOption("--speculative_draft_sink_size", int, f"{SPECULATIVE}.speculative_draft_sink_size"),
    PeerOption("--speculative_num_steps", int, f"{SPECULATIVE}.speculative_num_steps"),
    PeerOption("--speculative_eagle_topk", int, f"{SPECULATIVE}.speculative_eagle_topk"),
    PeerOption(
        "--speculative_num_draft_tokens", int, f"{SPECULATIVE}.speculative_num_draft_tokens"
    ),
    PeerOption("--speculative_token_map", str, f"{SPECULATIVE}.speculative_token_map"),
    PeerOption(
        "--speculative_adaptive",
        bool,
        NotServed((), "use speculative_config.adaptive in the YAML file of --config"),
    ),
    PeerOption("--mem_fraction_static", float, _differs("mem_fraction_static")),
    PeerOption("--chunked_prefill_size", int, _differs("chunked_prefill_size")),
    PeerOption("--max_prefill_tokens", int, _differs("max_prefill_tokens")),
)


class ServeCommand(click.Command):
    """A command that takes a model by its peers' flags, too, and names all unknown flags at
    once."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = [part for text in args for part in _without_model_flag(text)]
        known = {name for option in self.params for name in (*option.opts, *option.secondary_opts)}
        unknown = [name for name in map(_flag_of, _before_end(args)) if name and name not in known]
        if len(unknown) > 1:
            raise ConfigErrorUsage([_unknown(name, known) for name in unknown], ctx)
        return super().parse_args(ctx, args)


class ConfigErrorUsage(click.UsageError):
    """All unknown flags, a line each."""

    def __init__(self, lines: list[str], context: click.Context) -> None:
        super().__init__(str(ConfigError(lines)), context)


def _without_model_flag(text: str) -> list[str]:
    if _flag_of(text) not in MODEL_FLAGS:
        return [text]
    _, equals, value = text.partition("=")
    return [value] if equals else []


def _before_end(args: list[str]) -> Iterable[str]:
    """The words before `--`, which ends the flags."""
    return args[: args.index("--")] if "--" in args else args


def _flag_of(text: str) -> str:
    """The flag that a word names, or nothing."""
    return "--" + either_spelling(text[2:].partition("=")[0]) if text.startswith("--") else ""


def _unknown(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, n=3)
    return f"{name} is not a known flag" + (
        f"; did you mean {' or '.join(close)}?" if close else ""
    )
