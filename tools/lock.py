"""Writes `deploy/requirements-tested.txt`: the versions with which the tests have passed (`make
lock`).

Where a package is installed, its version is the installed one. Another Python gets the newest that
it can have, in a line with a marker; `uv` finds those without that Python. CUDA's packages follow
the build of torch that a machine has, so they have no line: setup.py has their bounds."""

import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "deploy/requirements-tested.txt"
HEADER = """\
# Versions with which the tests have passed, on a CPU. A line with a marker is for some Pythons or
# systems only. torch, triton and CUDA's packages follow the machine. Written by `make lock`.
#   pip install -c deploy/requirements-tested.txt '.[guided]'
"""
# setuptools, of which each torch has its own range, is in pyproject.toml.
FOLLOW_TORCH = re.compile(r"torch|triton|nvidia-|cuda-|setuptools")
COMMAND = ["uv", "pip", "compile", "setup.py", "--extra", "dev", "--universal"]
OPTIONS = ["--python-version", "3.10", "--no-annotate", "--no-header", "--quiet", "--output-file"]


def resolve(path: Path) -> list[str]:
    """The lines of all packages that tllm_spec and its tests need, by way of a file."""
    installed = [f"{each.name}=={each.version.partition('+')[0]}\n" for each in distributions()]
    path.write_text("".join(installed), encoding="utf-8")  # uv prefers what it finds there
    subprocess.run([sys.executable, "-m", *COMMAND, *OPTIONS, str(path)], cwd=ROOT, check=True)
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        lines = [each for each in resolve(Path(folder, "all")) if not FOLLOW_TORCH.match(each)]
    PATH.write_text(HEADER + "".join(lines), encoding="utf-8")
