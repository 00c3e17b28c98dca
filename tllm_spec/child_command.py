"""The command that runs a module of ours in a process of its own."""

from __future__ import annotations

import sys


def module_command(module: str) -> list[str]:
    """Runs the module as `python -m` does; arguments may follow. It imports from where this process
    does: `python -m` would look in its working folder first, where a user's `queue.py` would hide
    Python's. The names are in hexadecimal digits on one line, since MPICH drops backslashes."""
    folders = "\0".join(each for each in sys.path if isinstance(each, str))
    digits = folders.encode("utf-8", "surrogatepass").hex()
    program = (
        "import sys; "
        f"sys.path[:] = bytes.fromhex('{digits}').decode('utf-8', 'surrogatepass').split(chr(0)); "
        "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", program, module]
