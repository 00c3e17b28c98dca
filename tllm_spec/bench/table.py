"""Formats reports: dicts in, text out."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tllm_spec.outputs import RequestOutput
from tllm_spec.text.tokenizer import Tokenizer

PROMPT_LINES = 6
RANKS = {
    "minimum": "min",
    "maximum": "max",
    "average": "avg",
    "p50": "p50",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
}
TITLES = {
    "engine": "ENGINE",
    "machine": "MACHINE",
    "world_info": "WORLD AND RUNTIME",
    "request_info": "REQUESTS",
    "performance": "PERFORMANCE",
    "streaming_metrics": "STREAMING",
    "speculation": "SPECULATION",
    "decoding_stats": "DECODING STATISTICS",
    "draft_lens": "DRAFT LENGTHS",
    "dataset": "DATA SET",
}


def format_report(report: dict[str, dict[str, Any]]) -> str:
    """A block for each section: first the single figures, then a table of those with several
    values."""
    return "\n\n".join(_format_section(TITLES[name], section) for name, section in report.items())


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


def format_comparison(rows: Sequence[dict[str, Any]]) -> str:
    times = {"ttft_ms": "TTFT p50", "tpot_ms": "TPOT p50", "e2el_ms": "E2E p50 (ms)"}
    shown = [name for name in times if name in rows[0]]
    header = [
        "configuration",
        "concurrency",
        "tokens/s",
        "(range)",
        "speedup",
        *(times[name] for name in shown),
        "acceptance length",
        "acceptance rate",
    ]
    lines = (_comparison_row(row, shown) for row in rows)
    return format_table([*header, "per position"], lines)


def _comparison_row(row: dict[str, Any], times: Sequence[str]) -> list[str]:
    low, high = row["output_tokens_per_s_range"]
    return [
        row["configuration"],
        str(row["concurrency"]) if row["concurrency"] > 0 else "no limit",
        f"{row['output_tokens_per_s']:.1f}",
        f"{low:.1f}-{high:.1f}",
        f"{row['speedup']:.2f}x",
        *(f"{row[name]['p50']:.1f}" for name in times),
        _text(row["acceptance_length"]),
        _text(row["draft_acceptance_rate"]),
        _text(row["per_position_acceptance"] or None),
    ]


def format_fidelity(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Nothing without rows."""
    header = ["configuration", "equal tokens", "equal first choices", "perplexity"]
    shares = "equal_tokens", "equal_choices"
    lines = (
        [
            row["configuration"],
            *("-" if row[key] is None else f"{row[key]:.1%}" for key in shares),
            "-" if row["perplexity"] is None else f"{row['perplexity']:.4f}",
        ]
        for row in rows
    )
    if rows:
        yield format_table(header, lines)


def format_speedups(times: dict[str, float], rows: Sequence[dict[str, Any]]) -> str:
    """`times`: seconds of a plain round, of one that verifies `draft_len` drafts made at no cost,
    and of one with the drafter's."""
    plain, free, drafted = (f"{1e3 * times[name]:.2f} ms" for name in ("plain", "free", "drafted"))
    draft_len = times["draft_len"]
    first = (
        f"round time: plain {plain}, verifying {draft_len} drafts {free}, "
        f"drafting and verifying {draft_len} {drafted}"
    )
    header = [
        "a",
        "K",
        "tokens a round",
        "(measured)",
        "speedup",
        "(measured)",
        "difference",
        "rounds",
        "drafted",
        "break-even at a",
    ]
    return f"{first}\n{format_table(header, map(_speedup_row, rows))}"


def _speedup_row(row: dict[str, Any]) -> list[str]:
    return [
        _text(row["acceptance"]),
        str(row["draft_len"]),
        _text(row["tokens_per_round"]),
        _text(row["measured_tokens_per_round"]),
        f"{row['predicted']:.2f}x",
        f"{row['measured']:.2f}x",
        f"{row['difference']:+.0%}",
        str(row["rounds"]),
        f"{row['drafted_share']:.0%}",
        _text(row["least_acceptance"]),
    ]


def format_shapes(rows: Sequence[dict[str, Any]]) -> str:
    """`ShapeRow`s as dictionaries."""
    header = ["drafts", "rows", "round, ms", "tokens a round", "break-even at", "speedup"]
    lines = [
        [
            row["shape"],
            str(1 + row["drafts"]),
            *(_text(row[key]) for key in ("round_ms", "tokens", "needed")),
            f"{row['speedup']:.2f}x",
        ]
        for row in rows
    ]
    return format_table(header, lines)


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
        return " ".join(map(_text, value))
    return f"{value:.2f}" if isinstance(value, float) else str(value)
