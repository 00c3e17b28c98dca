"""`benchmarks.soak` runs and passes, for a moment."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_soak_passes_with_few_clients() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.05", "--clients", "12"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all parts have passed" in done.stdout
