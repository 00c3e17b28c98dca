"""Formats reports: dicts in, text out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import Formatter
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
