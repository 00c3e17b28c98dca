"""The commands `tllm-serve`, `tllm-bench` and `tllm-train`. Ctrl-C during the imports ends them
without a traceback."""

import signal


def serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tllm_spec.cli.serve import main  # takes a moment

    main()


def bench() -> None:
    after_imports = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tllm_spec.cli.bench import main  # takes a moment

    signal.signal(signal.SIGINT, after_imports)
    main()


def train() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tllm_spec.cli.train import main  # takes a moment

    main()


if __name__ == "__main__":
    serve()
