"""The command `tllm-serve`. Ctrl-C during the imports ends it without a traceback."""

import signal


def serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tllm_spec.cli.serve import main  # takes a moment

    main()


if __name__ == "__main__":
    serve()
