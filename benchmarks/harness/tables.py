"""The tables of docs/ and README.md, from benchmarks/results/ and the cost model. Measures nothing.

    python -m benchmarks.harness.tables [--write]     # prints them; or puts them into the documents

In a document a table stands right after a heading of its title, its command, and where it was
measured: the device, and the commit at which the result was recorded. The cost model's are
"computed"."""

import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module

from benchmarks import scaling_model
from benchmarks.h200_parts.figures import Figure, headline, summary
from benchmarks.harness.report import ROOT, Options, Row, load

NAMES = (
    "performance.md", "../README.md", "guided-decoding.md", "scaling.md", "quantization.md",
    "adaptive.md", "drafting.md", "auto.md", "lora.md",
)  # fmt: skip
DOCUMENTS = tuple((ROOT / "docs" / name).resolve() for name in NAMES)
# A run with options has a result file of its own, such as several_devices_ranks_4.json.
RUNS = (
    "adapters", "adaptive", "auto", "cpu", "experts", "fp8", "gpu_kernels", "guided", "rounds",
    "serving_load", "several_devices", "several_devices --ranks 4", "several_devices --ranks 8",
    "verify_budget",
)  # fmt: skip


def all_tables() -> dict[str, list[str]]:
    """Where it was measured, and the table, by title and command."""
    h200 = load("h200")
    figures = [Figure(**figure) for figure in h200["figures"]]
    quick = "`python -m benchmarks.h200 --quick`"
    found = {
        f"Next to vLLM and SGLang: {quick}": _block(h200["about"], headline(figures)),
        f"Goals and floors: {quick}": _block(h200["about"], summary(figures)),
    }
    for run in RUNS:
        name, *options = run.split(maxsplit=1)
        results = load(re.sub(r"\W+", "_", run))
        subjects = import_module(f"benchmarks.{name}").SUBJECTS
        for subject in subjects:
            if subject.name in results:
                one = [subject.name] if len(subjects) > 1 else []
                command = " ".join(["python -m", f"benchmarks.{name}", *one, *options])
                result = results[subject.name]
                lines = subject.table(result["rows"])
                found[f"{subject.title}: `{command}`"] = _block(result["about"], lines)
    return found | _model_tables()


@cache
def _model_tables() -> dict[str, list[str]]:
    found, options = {}, Options(quick=False, device="cpu", shape="zoo")
    for subject in scaling_model.SUBJECTS:
        command = f"`python -m benchmarks.scaling_model {subject.name}`"
        lines = subject.table(list(subject.run(options)))
        found[f"{subject.title}: {command}"] = _block({"device": "computed"}, lines)
    return found


def _block(about: Row, lines: list[str]) -> list[str]:
    device = str(about.get("device", "")).removeprefix("NVIDIA ")
    where = [each for each in (device, about.get("commit")) if each]
    return [f"({', '.join(where)})", *lines]


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


def main(arguments: Sequence[str]) -> None:
    if "--write" in arguments:
        for file in DOCUMENTS:
            file.write_text(filled(file.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for title, (where, *lines) in all_tables().items():
        print("\n".join([f"### {title} {where}", *lines, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
