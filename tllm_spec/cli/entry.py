"""The commands `tllm-serve`, `tllm-bench` and `tllm-train`. Ctrl-C during the imports ends them
without a traceback."""

import signal
from functools import partial
from importlib import import_module


def _run(command: str) -> None:
    after_imports = signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = import_module(f"tllm_spec.cli.{command}").main  # takes a moment
    if command == "bench":
        signal.signal(signal.SIGINT, after_imports)
    main()


serve, bench, train = (partial(_run, command) for command in ("serve", "bench", "train"))


if __name__ == "__main__":
    serve()
