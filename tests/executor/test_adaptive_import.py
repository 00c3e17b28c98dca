"""The policies are pure Python."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of torch raises ImportError
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
for config in ({}, "aggressive", {"strategy": "ema", 1: {"candidate_steps": [1, 3]}}):
    controls = AdaptiveController.from_config(config)
    steps = controls.tier_for(4)
    controls.observe(ObservedRound(4, [steps] * 4))
    print(steps, type(controls.state()).__name__)
"""


def test_the_controller_works_where_there_is_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "dict", "3", "dict", "3", "dict"]
