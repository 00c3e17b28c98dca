"""aider: one edit of a file in a folder, whose text the model writes whole."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "hello.py")
    file.write_text("print('no')\n")
    aider = Path(sys.executable).with_name("aider")
    plain = "--no-git --yes-always --no-stream --no-check-update --no-show-model-warnings"
    quiet = "--no-analytics --no-show-release-notes --map-tokens 0 --edit-format whole"
    quiet = f"--model openai/{os.environ['MODEL']} {quiet}"
    for command in (f"{plain} {quiet}", f"{plain.replace('--no-stream', '--stream')} {quiet}"):
        file.write_text("print('no')\n")
        run = subprocess.run(
            [aider, *command.split(), "--message", "An edit, please.", "hello.py"],
            cwd=folder,
            env=os.environ | {"HOME": folder, "OPENAI_API_BASE": os.environ["OPENAI_BASE_URL"]},
            capture_output=True,
            text=True,
            check=False,
        )
        assert file.read_text() == "print('yes')\n", run.stdout + run.stderr
