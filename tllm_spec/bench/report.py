"""The figures of a run as a dict with trtllm-bench's keys, and reports as text: dicts in, text out.

Two definitions differ from trtllm-bench's on purpose: drafted tokens are the proposed ones (not
draft length times iterations), and prefill is not a decode round."""

import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any

import numpy

from tllm_spec.bench.runner import Run, num_output_tokens
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import DecodingBaseConfig
from tllm_spec.outputs import RequestOutput, SpeculativeStats
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.version import __version__

# The draft lengths that a run used, from the engine's state before and after it.


def draft_lens_section(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The rounds between two answers of `LLM.server_info`.

    `num_switches` counts decisions of the controller; `num_changes` counts rounds whose draft
    length differs from the previous round's, also because of probes and limits. Times exclude
    rounds that contain prompts."""
    rows = difference(before, after)
    rounds = sum(row["rounds"] for row in rows.values())
    seconds = sum(row["seconds"] for row in rows.values())
    old, new = (each["internal_states"][0] for each in (before, after))
    switches = [each["controller"]["decisions"]["num_switches"] for each in (old, new)]
    section: dict[str, Any] = {
        "num_switches": switches[1] - switches[0],
        "num_changes": new["totals"]["draft_len_changes"] - old["totals"]["draft_len_changes"],
    }
    for draft_len, row in rows.items():
        section[f"draft_len_{draft_len}"] = {
            "rounds": row["rounds"],
            "share_of_rounds": row["rounds"] / rounds,
            "share_of_time": row["seconds"] / seconds if seconds else None,
            "round_ms": 1e3 * row["seconds"] / row["timed_rounds"] if row["timed_rounds"] else None,
            "acceptance_length": row["emitted_tokens"] / row["request_rounds"],
        }
    return section


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The totals of the rounds between two answers of `LLM.server_info`, by draft length. Draft
    lengths without rounds are left out."""
    old, new = (each["internal_states"][0]["totals"]["by_draft_len"] for each in (before, after))
    rows = {
        int(draft_len): {
            key: value - old.get(draft_len, {}).get(key, 0) for key, value in row.items()
        }
        for draft_len, row in new.items()
    }
    return {draft_len: rows[draft_len] for draft_len in sorted(rows) if rows[draft_len]["rounds"]}


MS = 1000.0


def build_report(
    model_name: str,
    args: LlmArgs,
    run: Run,
    streaming: bool,
    infos: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The whole report; `streaming_metrics`, `speculation`, `decoding_stats` and `draft_lens` only
    where they apply. `infos`: answers of `LLM.server_info` before and after the run."""
    report: dict[str, Any] = {
        "engine": engine_section(model_name, args, infos),
        "machine": machine_section(args.device),
        "world_info": world_section(args),
        "request_info": request_section(run),
        "performance": performance_section(run),
    }
    if streaming:
        report["streaming_metrics"] = streaming_section(run.outputs)
    if (spec := args.speculative_config) is not None:
        report["speculation"] = speculation_section(spec)
        report["decoding_stats"] = decoding_section(spec.decoding_type, run.outputs)
        if infos is not None and spec.length_varies:
            report["draft_lens"] = draft_lens_section(*infos)
    return report | {"dataset": dataset_section(run.outputs)}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Minimum, maximum, average and percentiles, interpolated linearly; all 0 without values."""
    data = numpy.asarray(values or [0.0], dtype=numpy.float64)
    ranks = {f"p{rank}": float(numpy.percentile(data, rank)) for rank in (50, 90, 95, 99)}
    return {
        "minimum": float(data.min()),
        "maximum": float(data.max()),
        "average": float(data.mean()),
        **ranks,
    }


def latency_s(output: RequestOutput) -> float:
    assert output.metrics.latency is not None, "only finished requests are reported"
    return output.metrics.latency


def time_to_first_token_s(output: RequestOutput) -> float:
    assert output.metrics.time_to_first_token is not None, "only finished requests are reported"
    return output.metrics.time_to_first_token


def time_per_output_token_s(output: RequestOutput) -> float:
    """Decode time divided by the tokens after the first. The output has two tokens or more."""
    return (latency_s(output) - time_to_first_token_s(output)) / (num_output_tokens(output) - 1)


def performance_section(run: Run) -> dict[str, Any]:
    latencies = [latency_s(output) for output in run.outputs]
    num_input = sum(len(output.prompt_token_ids) for output in run.outputs)
    per_user = [num_output_tokens(output) / latency_s(output) for output in run.outputs]
    return {
        "total_latency_ms": run.elapsed_s * MS,
        "avg_request_latency_ms": percentiles(latencies)["average"] * MS,
        "request_throughput_req_s": len(run.outputs) / run.elapsed_s,
        "system_output_throughput_tok_s": run.output_tokens_per_s,
        "system_total_throughput_tok_s": (num_input + run.num_output_tokens) / run.elapsed_s,
        "output_throughput_per_user_tok_s": percentiles(per_user)["average"],
        "output_throughput_per_gpu_tok_s": run.output_tokens_per_s,
        "request_latency_percentiles_ms": percentiles([latency * MS for latency in latencies]),
    }


def times_section(
    outputs: Sequence[RequestOutput], *, streaming: bool
) -> dict[str, dict[str, float]]:
    """Percentiles under the names of `tllm-bench serve`. Only streamed requests know when their
    first token came."""
    times = {"e2el_ms": percentiles([latency_s(output) * MS for output in outputs])}
    if streaming:
        decoded = [output for output in outputs if num_output_tokens(output) > 1]
        times["ttft_ms"] = percentiles([time_to_first_token_s(output) * MS for output in outputs])
        times["tpot_ms"] = percentiles([time_per_output_token_s(output) * MS for output in decoded])
    return times


def streaming_section(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    times = times_section(outputs, streaming=True)
    decoded = [output for output in outputs if num_output_tokens(output) > 1]
    gen_tps = percentiles([1 / time_per_output_token_s(output) for output in decoded])
    ttft, tpot = times["ttft_ms"], times["tpot_ms"]
    return {
        "token_output_speed_tok_s": gen_tps["average"],
        "avg_ttft_ms": ttft["average"],
        "avg_tpot_ms": tpot["average"],
        "tpot_percentiles": tpot,
        "ttft_percentiles": ttft,
        "gen_tps_percentiles": gen_tps,
    }


def total_stats(outputs: Sequence[RequestOutput]) -> SpeculativeStats:
    return sum(
        (output.speculative_decoding or SpeculativeStats() for output in outputs),
        SpeculativeStats(),
    )


def speculation_section(config: DecodingBaseConfig) -> dict[str, Any]:
    """Every option that has a value and an effect. The decoding type alone would not show the path
    or synthetic acceptance."""
    options = {name: getattr(config, name) for name in type(config).model_fields}
    if not config.may_pause:
        del options["max_rejected_rounds"]  # refused there, so its default has no effect
    return {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in options.items()
        if value is not None
    }


def decoding_section(mode: str, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Percentiles are over requests; the last four entries are over all rounds and drafts."""
    each = [output.speculative_decoding for output in outputs]
    stats = [one for one in each if one is not None and one.rounds]
    total = total_stats(outputs)
    return {
        "mode": mode,
        "num_draft_tokens_percentiles": percentiles([one.num_drafted_tokens for one in stats]),
        "num_accepted_draft_tokens_percentiles": percentiles(
            [one.num_accepted_tokens for one in stats]
        ),
        "draft_acceptance_rate_percentiles": percentiles(
            [one.draft_acceptance_rate for one in stats]
        ),
        "acceptance_length_percentiles": percentiles([one.acceptance_length for one in stats]),
        "rounds": total.rounds,
        "acceptance_length": total.acceptance_length,
        "draft_acceptance_rate": total.draft_acceptance_rate,
        "per_position_acceptance": list(total.per_position_acceptance),
    }


def request_section(run: Run) -> dict[str, Any]:
    number = len(run.outputs)
    return {
        "num_requests": number,
        "avg_num_concurrent_requests": sum(map(latency_s, run.outputs)) / run.elapsed_s,
        "avg_input_length": sum(len(output.prompt_token_ids) for output in run.outputs) / number,
        "avg_output_length": run.num_output_tokens / number,
        "avg_cached_input_tokens": sum(output.cached_tokens for output in run.outputs) / number,
    }


def dataset_section(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    inputs = [len(output.prompt_token_ids) for output in outputs]
    generated = [num_output_tokens(output) for output in outputs]
    return {
        "num_sequences": len(outputs),
        "isl_stats": percentiles(inputs),
        "osl_stats": percentiles(generated),
        "seq_len_stats": percentiles([sum(pair) for pair in zip(inputs, generated, strict=True)]),
    }


def engine_section(
    model_name: str, args: LlmArgs, infos: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """With `infos` it has the type and the attention kernels that `auto` stands for."""
    (first, *_) = infos[0]["internal_states"][0].get("ranks") or [{}] if infos else [{}]
    names = {
        "model": model_name,
        "model_path": args.model,
        "backend": "pytorch",
        "version": __version__,
    }
    return names | {
        "dtype": first.get("dtype", args.dtype),
        "attn_backend": first.get("attn_backend", args.attn_backend),
        "load_format": args.load_format,
    }


def world_section(args: LlmArgs) -> dict[str, Any]:
    return {
        "tp_size": args.tensor_parallel_size,
        "world_size": args.tensor_parallel_size,
        "max_batch_size": args.max_batch_size,
        "max_num_tokens": args.max_num_tokens,
        "max_seq_len": args.max_seq_len,
        "scheduling_policy": args.scheduler_config.capacity_scheduler_policy,
        "rounds_overlap": args.why_no_overlap is None,
        # A share of a GPU's memory; a CPU has no such limit.
        "kv_cache_percentage": None if is_cpu(args.device) else args.kv_cache_config.share * 100,
    }


def is_cpu(device: str) -> bool:
    import torch

    return device == "cpu" or not torch.cuda.is_available()


def machine_section(device: str) -> dict[str, Any]:
    import torch

    if is_cpu(device):
        return {
            "name": platform.machine(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
        }
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"name": properties.name, "memory_gib": properties.total_memory / 2**30}


def request_records(outputs: Sequence[RequestOutput], streaming: bool) -> list[dict[str, Any]]:
    """The content of `--request_json`: lengths, times and speculation of every request. Only
    streamed requests have a time to the first token."""
    return [
        {
            "request_id": output.request_id,
            "num_input_tokens": len(output.prompt_token_ids),
            "num_output_tokens": num_output_tokens(output),
            "cached_tokens": output.cached_tokens,
            "latency_ms": latency_s(output) * MS,
            "ttft_ms": time_to_first_token_s(output) * MS if streaming else None,
            "decoding_stats": output.speculative_decoding and output.speculative_decoding.to_dict(),
        }
        for output in outputs
    ]


def output_records(outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
    """The content of `--output_json`: the generated texts and tokens."""
    return [
        {
            "request_id": output.request_id,
            "outputs": [
                {"text": sample.text, "token_ids": sample.token_ids} for sample in output.outputs
            ],
        }
        for output in outputs
    ]


# Formats reports: dicts in, text out.


PROMPT_LINES = 6
RANKS = {"minimum": "min", "maximum": "max", "average": "avg"}
TITLES = {  # of sections that are not named by their key
    "world_info": "WORLD AND RUNTIME",
    "request_info": "REQUESTS",
    "streaming_metrics": "STREAMING",
    "decoding_stats": "DECODING STATISTICS",
    "draft_lens": "DRAFT LENGTHS",
    "dataset": "DATA SET",
}


def format_report(report: dict[str, dict[str, Any]]) -> str:
    """A block for each section: first the single figures, then a table of those with several
    values."""
    titles = {name: TITLES.get(name, name.upper()) for name in report}
    return "\n\n".join(_format_section(titles[name], report[name]) for name in report)


def _format_section(title: str, section: dict[str, Any]) -> str:
    width = max(map(len, section)) + 2
    plain = [
        f"{key:<{width}}{_text(value)}"
        for key, value in section.items()
        if not isinstance(value, dict)
    ]
    spread = {key: value for key, value in section.items() if isinstance(value, dict)}
    rows = [[key, *map(_text, value.values())] for key, value in spread.items()]
    columns = [RANKS.get(name, str(name)) for name in next(iter(spread.values()), {})]
    table = [format_table(["", *columns], rows)] if rows else []
    return "\n".join([f"== {title} ==", *plain, *table])


class _Cells(Formatter):
    """A value that is missing or None is written as -, and a list with spaces between its items."""

    def get_value(self, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(key)

    def format_field(self, value: Any, format_spec: str) -> str:
        return format(value, format_spec) if format_spec and value is not None else _text(value)


def format_rows(columns: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, Any]]) -> str:
    """columns: the title, and the cell as a format of a row's values."""
    cells = _Cells()
    lines = [[cells.vformat(form, (), row) for _, form in columns] for row in rows]
    return format_table([title for title, _ in columns], lines)


def load_of(concurrency: int) -> str:
    return str(concurrency) if concurrency > 0 else "no limit"


def format_comparison(rows: Sequence[dict[str, Any]]) -> str:
    times = {"ttft_ms": "TTFT p50", "tpot_ms": "TPOT p50", "e2el_ms": "E2E p50 (ms)"}
    columns = [
        ("configuration", "{configuration}"),
        ("concurrency", "{load}"),
        ("tokens/s", "{output_tokens_per_s:.1f}"),
        ("(range)", "{output_tokens_per_s_range[0]:.1f}-{output_tokens_per_s_range[1]:.1f}"),
        ("speedup", "{speedup:.2f}x"),
        *((times[name], f"{{{name}[p50]:.1f}}") for name in times if name in rows[0]),
        ("acceptance length", "{acceptance_length}"),
        ("acceptance rate", "{draft_acceptance_rate}"),
        ("per position", "{per_position_acceptance}"),
    ]
    return format_rows(columns, [row | {"load": load_of(row["concurrency"])} for row in rows])


FIDELITY = (
    ("configuration", "{configuration}"),
    ("equal tokens", "{equal_tokens:.1%}"),
    ("equal first choices", "{equal_choices:.1%}"),
    ("perplexity", "{perplexity:.4f}"),
)
SPEEDUPS = (
    ("a", "{acceptance}"),
    ("K", "{draft_len}"),
    ("tokens a round", "{tokens_per_round}"),
    ("(measured)", "{measured_tokens_per_round}"),
    ("speedup", "{predicted:.2f}x"),
    ("(measured)", "{measured:.2f}x"),
    ("difference", "{difference:+.0%}"),
    ("rounds", "{rounds}"),
    ("drafted", "{drafted_share:.0%}"),
    ("break-even at a", "{least_acceptance}"),
)


SHAPES = (
    ("drafts", "{shape}"),
    ("rows", "{rows}"),
    ("round, ms", "{round_ms}"),
    ("tokens a round", "{tokens}"),
    ("break-even at", "{needed}"),
    ("speedup", "{speedup:.2f}x"),
)


def format_texts(outputs: Iterable[RequestOutput], tokenizer: Tokenizer | None) -> Iterator[str]:
    """The last lines of each prompt and the generated text; token ids without a tokenizer."""
    for number, output in enumerate(outputs):
        prompt, generated = (
            tokenizer.decode(token_ids) if tokenizer else str(token_ids)
            for token_ids in (output.prompt_token_ids, output.outputs[0].token_ids)
        )
        shown = "\n".join(prompt.split("\n")[-PROMPT_LINES:])
        yield f"--- request {number}, the end of its prompt ---\n{shown}"
        yield f"--- request {number}, generated ---\n{generated}\n"


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first left-aligned, the others right-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = (
        [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        for line in lines
    )
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(_text, value)) or "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
