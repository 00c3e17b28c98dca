"""A world whose rank 1 has another version or another checkpoint, for tests.

    python -m tests.distributed.unlike_world MODEL_FOLDER (version | OTHER_FOLDER)

It prints on each rank, in one line, why the model did not start."""

from __future__ import annotations

import sys
from pathlib import Path

from tllm_spec.distributed import rank_checks
from tllm_spec.distributed.mpirun import mpirun_rank
from tllm_spec.llm import LLM


def main() -> None:
    folder, other = sys.argv[1:]
    if mpirun_rank() == 1 and other == "version":
        rank_checks.__version__ = "0.0.1"
    elif mpirun_rank() == 1:
        rank_checks.resolve_model = lambda name: Path(other)
    try:
        LLM(folder, skip_tokenizer_init=True, device="cpu", tensor_parallel_size=2)
    except ValueError as error:
        print(f"rank 0 refused: {error}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
