"""The tables of docs/performance*.md and README.md, from benchmarks/results/. Measures nothing.

    python -m benchmarks.tables [--write]     # prints them; or puts them into the documents

In a document a table stands right after a heading of its title, its command, and where it was
measured: the device, and the commit at which the result was recorded."""

import argparse
import re
from collections.abc import Sequence
from types import ModuleType

from benchmarks import (
    adaptive_trees_h200,
    cpu,
    deepseek,
    draft_sampling,
    fp8,
    gpu_kernels,
    guided,
    moe,
    ngram,
    rounds,
    serving_load,
    several_devices,
    tree_acceptance,
    tree_kernels,
    trees,
)
from benchmarks.h200_parts.figures import Figure, headline, summary
from benchmarks.harness.report import ROOT, Row, load, number, table

DOCUMENTS = (
    ROOT / "docs" / "performance.md",
    ROOT / "README.md",
    ROOT / "docs" / "performance-moe.md",
    ROOT / "docs" / "performance-trees.md",
    ROOT / "docs" / "performance-serving.md",
    ROOT / "docs" / "guided-decoding.md",
    ROOT / "docs" / "scaling.md",
    ROOT / "docs" / "quantization.md",
)
SCRIPTS: Sequence[ModuleType] = (
    rounds,
    gpu_kernels,
    cpu,
    ngram,
    draft_sampling,
    moe,
    deepseek,
    fp8,
    tree_kernels,
    tree_acceptance,
    trees,
    adaptive_trees_h200,
    guided,
)


def all_tables() -> dict[str, list[str]]:
    """Where it was measured, and the table, by title and command."""
    h200 = load("h200")
    figures = [Figure(**figure) for figure in h200["figures"]]
    quick = "`python -m benchmarks.h200 --quick`"
    found = {
        f"Next to vLLM and SGLang: {quick}": _block(h200["about"], headline(figures)),
        f"Bars and floors: {quick}": _block(h200["about"], summary(figures)),
    }
    adaptive = load("adaptive_h200")
    title = "Adaptive draft lengths: `python -m benchmarks.adaptive_h200 --time-limit 440`"
    found[title] = _block(adaptive.get("about", {}), adaptive_table(adaptive))
    load_result = load("serving_load")
    lines = serving_load.rows_table(load_result["rows"])
    title = "Streamed clients, 512 in / 256 out: `python -m benchmarks.serving_load`"
    found[title] = _block(load_result["about"], lines)
    for name, several in load("several_devices").items():
        title = f"{several_devices.TITLES[name]}: `python -m benchmarks.several_devices {name}`"
        found[title] = _block(several["about"], several_devices.tables(several["rows"]))
    for script in SCRIPTS:
        name = script.__name__.rpartition(".")[2]
        results = load(name)
        for subject in script.SUBJECTS:
            if subject.name in results:
                one = f" {subject.name}" if len(script.SUBJECTS) > 1 else ""
                title = f"{subject.title}: `python -m benchmarks.{name}{one}`"
                result = results[subject.name]
                found[title] = _block(result["about"], subject.table(result["rows"]))
    return found


def _block(about: Row, lines: list[str]) -> list[str]:
    device = str(about.get("device", "")).removeprefix("NVIDIA ")
    where = [each for each in (device, about.get("commit")) if each]
    return [f"({', '.join(where)})", *lines]


def adaptive_table(result: Row) -> list[str]:
    """Draft length 0 over plain decoding; tokens per second over the best static length."""
    acceptances = sorted({cell["acceptance"] for cell in result["cells"]})
    cells = {(cell["batch_size"], cell["acceptance"]): cell for cell in result["cells"]}
    lines = []
    for times in sorted(result["times"], key=lambda each: each["batch_size"]):
        batch_size = times["batch_size"]
        own = [cells[batch_size, each] for each in acceptances]
        shares = [f"{cell['adaptive'] / max(cell['static'].values()):.3f}" for cell in own]
        zero = times["zero"] / times["plain"]
        lines.append([str(batch_size), number(times["plain"]), f"{zero:.3f}", *shares])
    accepted = [f"accepted {each}" for each in acceptances]
    return table(("batch", "plain ms", "length 0 / plain", *accepted), lines)


def filled(document: str) -> str:
    """The document with every table replaced. Raises ValueError for an unknown table."""
    tables = all_tables()

    def replace(match: re.Match[str]) -> str:
        if match[1] not in tables:
            raise ValueError(f"no result for {match[1]!r}: there are {', '.join(tables)}")
        where, *lines = tables[match[1]]
        return "\n".join([f"### {match[1]} {where}", *lines, ""])

    pattern = r"^### (.*: `python -m benchmarks\..*`).*\n(?:\|.*\n)*"
    return re.sub(pattern, replace, document, flags=re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into the documents")
    if parser.parse_args().write:
        for file in DOCUMENTS:
            file.write_text(filled(file.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for title, (where, *lines) in all_tables().items():
        print("\n".join([f"### {title} {where}", *lines, ""]))


if __name__ == "__main__":
    main()
