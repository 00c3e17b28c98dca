"""The figures of `tllm-bench serve`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tllm_spec.bench.report import MS, percentiles
from tllm_spec.bench.serve_load import Sent, ServeRun
from tllm_spec.bench.table import format_table

# Counters of drafting rounds and of what they gave, by server: ours, then vLLM's.
ACCEPTANCE = (
    ("tllm_spec_request_rounds_total", "tllm_spec_emitted_tokens_total", 0),
    ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total", 1),
)
GOALS = ("ttft", "tpot", "e2el")  # milliseconds, by vLLM's names


def parse_goals(given: Sequence[str]) -> dict[str, float]:
    """Goals in milliseconds by name, from texts such as `ttft:200`. Raises ValueError for anything
    else."""
    goals = {}
    for each in given:
        name, _, limit = each.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            goals[name] = -1.0
        if name not in GOALS or goals[name] <= 0:
            names = ", ".join(GOALS)
            raise ValueError(f"goodput = {each!r}: NAME:MILLISECONDS is needed, NAME of {names}")
    return goals


def serve_report(
    run: ServeRun, goals: Mapping[str, float], metrics: tuple[str, str] | None
) -> dict[str, Any]:
    """metrics: the texts of /metrics before and after the run, if the server has them."""
    done = [sent for sent in run.sent if sent.error is None]
    errors = Counter(sent.error for sent in run.sent if sent.error is not None)
    tpots = [tpot for sent in done if (tpot := sent.tpot) is not None]
    num_tokens = sum(sent.num_tokens for sent in done)
    report: dict[str, Any] = {
        "load": run.load.name,
        "temperature": run.temperature,
        "requests": len(run.sent),
        "failed": len(run.sent) - len(done),
        "errors": dict(errors.most_common(3)),
        "elapsed_s": run.elapsed,
        "request_throughput_req_s": len(done) / run.elapsed,
        "output_throughput_tok_s": num_tokens / run.elapsed,
        "total_throughput_tok_s": (num_tokens + sum(s.num_prompt_tokens for s in done))
        / run.elapsed,
        "ttft_ms": percentiles([sent.ttft * MS for sent in done]),
        "tpot_ms": percentiles([tpot * MS for tpot in tpots]),
        "itl_ms": percentiles([gap * MS for sent in done for gap in sent.gaps]),
        "e2el_ms": percentiles([sent.latency * MS for sent in done]),
    }
    if goals:
        good = sum(_is_good(sent, goals) for sent in done)
        report["goodput_req_s"] = good / run.elapsed
    length = None if metrics is None else acceptance_length(*metrics)
    return report | ({} if length is None else {"acceptance_length": length})


def _is_good(sent: Sent, goals: Mapping[str, float]) -> bool:
    values = {"ttft": sent.ttft, "tpot": sent.tpot or 0.0, "e2el": sent.latency}
    return all(values[name] * MS <= limit for name, limit in goals.items())


def acceptance_length(before: str, after: str) -> float | None:
    """Tokens per round between two texts of /metrics; None without rounds."""
    for rounds_name, tokens_name, bonus in ACCEPTANCE:
        rounds = _total(after, rounds_name) - _total(before, rounds_name)
        if rounds:
            return bonus + (_total(after, tokens_name) - _total(before, tokens_name)) / rounds
    return None


def _total(text: str, name: str) -> float:
    found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)", text, re.MULTILINE)
    return sum(map(float, found))


def format_serve(reports: Sequence[Mapping[str, Any]]) -> str:
    """One row for each load."""
    header = ["load", "temperature", "requests/s", "tokens/s", "failed"]
    header += ["TTFT p50", "p99", "TPOT p50", "p99", "ITL p99", "E2E p50", "p99 (ms)"]
    optional = {"goodput_req_s": "goodput/s", "acceptance_length": "acceptance length"}
    shown = [name for name in optional if any(name in report for report in reports)]
    rows = []
    for report in reports:
        times = [
            report[name][rank]
            for name, rank in (
                *(("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("tpot_ms", "p99")),
                *(("itl_ms", "p99"), ("e2el_ms", "p50"), ("e2el_ms", "p99")),
            )
        ]
        rows.append(
            [
                report["load"],
                "server's" if report["temperature"] is None else str(report["temperature"]),
                f"{report['request_throughput_req_s']:.2f}",
                f"{report['output_throughput_tok_s']:.1f}",
                str(report["failed"]),
                *(f"{time:.1f}" for time in times),
                *(f"{report[name]:.2f}" if name in report else "-" for name in shown),
            ]
        )
    return format_table([*header, *(optional[name] for name in shown)], rows)
