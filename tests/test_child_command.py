"""Processes of ours import from where their parent does, whatever their working folder holds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tllm_spec.child_command import module_command

CHILD = """
import json, sys

if __name__ == "__main__":
    print(json.dumps([sys.path, sys.argv, __spec__.name]))
"""


def test_a_module_runs_with_its_parents_path_and_not_with_its_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules, folder = tmp_path / 'it\'s a "module" \\n é\udc80', tmp_path / "working folder"
    for each in (modules, folder):
        each.mkdir()
    (modules / "some_child.py").write_text(CHILD)
    (folder / "json.py").write_text("raise RuntimeError('a user has this file')")
    monkeypatch.setattr(sys, "path", [*sys.path, "one\nline", str(modules), Path("ignored")])
    command = [*module_command("some_child"), "-m", "an 'argument'"]
    assert not set('\n\\"$`') & set(command[2]), "sh and MPI pass it as it is"
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    path, arguments, name = json.loads(found.stdout)
    assert path == sys.path[:-1] and name == "some_child"
    assert arguments == [str(modules / "some_child.py"), "-m", "an 'argument'"]
