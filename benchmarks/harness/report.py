"""What every script shares: subjects, options, the result file and the Markdown table.

A result file holds one object per subject: `about` (device, versions, commit) and `rows`."""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tllm_spec.bench.report import machine_section

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """`shape`: `llama-8b` (random weights) or `zoo`. `more`: the script's own options."""

    quick: bool
    device: str
    shape: str
    more: argparse.Namespace = field(default_factory=argparse.Namespace)

    def text(self, name: str, default: str) -> str:
        return str(getattr(self.more, name, default))

    def numbers(self, name: str) -> list[int]:
        """The numbers in an option such as 1,8,64."""
        return [int(each) for each in getattr(self.more, name).split(",")]


@dataclass(frozen=True)
class Subject:
    """One table: `run` yields its rows, `table` makes Markdown lines of them."""

    name: str
    title: str
    run: Callable[[Options], Iterator[Row]]
    table: Callable[[Sequence[Row]], list[str]]
    needs_cuda: bool = False


def about(device: str) -> Row:
    """Where, with which versions and at which commit a run took place."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return {
        "device": machine_section(device)["name"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or None,
    }


def main(
    subjects: Sequence[Subject], description: str | None, argv: list[str] | None = None, **more: Any
) -> int:
    """more: a script's own options and their defaults, `--batch-size` is `batch_size`. Returns
    1 if a row has a `status`: it is of a job that has failed."""
    names = [subject.name for subject in subjects]
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subjects", nargs="*", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--shape", choices=("llama-8b", "zoo"))
    parser.add_argument("--output", type=Path, help="result file; other subjects in it are kept")
    for name, default in more.items():
        kind = str if default is None else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    args = parser.parse_args(argv)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shape = args.shape or {"cuda": "llama-8b", "cpu": "zoo"}[device]
    options = Options(args.quick, device, shape, args)
    if unknown := set(args.subjects) - set(names):
        parser.error(f"unknown subjects {sorted(unknown)}: there are {', '.join(names)}")
    has_failed = False
    for subject in subjects:
        if args.subjects and subject.name not in args.subjects:
            continue
        if subject.needs_cuda and device != "cuda":
            parser.error(f"{subject.name} needs a CUDA device")
        rows = []
        for row in subject.run(options):
            print(f"{subject.name}: {json.dumps(row)[:2000]}", file=sys.stderr, flush=True)
            rows.append(row)
        has_failed |= any("status" in row for row in rows)
        print("\n".join([subject.title, "", *subject.table(rows), ""]), flush=True)
        if args.output:
            save(args.output, {subject.name: {"about": about(device), "rows": rows}})
    return int(has_failed)


def save(file: Path, results: Row) -> None:
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    text = json.dumps(known | results, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def load(script: str) -> Row:
    found: Row = json.loads((RESULTS / f"{script}.json").read_text(encoding="utf-8"))
    return found


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def crossed(corner: str, cells: Iterable[tuple[str, str, str]]) -> list[str]:
    """cells: line, column and text. Both appear in the order in which they come."""
    lines: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for line, column, text in cells:
        lines.setdefault(line, {})[column] = text
        columns[column] = None
    found = ([line, *(own.get(each, "–") for each in columns)] for line, own in lines.items())
    return table((corner, *columns), found)


def number(value: float | None) -> str:
    """At least three digits of a float; empty for None."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def numbers(values: Iterable[float | None]) -> str:
    return " / ".join(number(value) or "–" for value in values)
