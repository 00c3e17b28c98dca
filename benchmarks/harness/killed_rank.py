"""How long it takes until all processes of a model end after one of its ranks is killed under load.

python -m benchmarks.harness.killed_rank RANKS DEVICE MODEL_FOLDER   # is the model"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness.models import LLAMA_8B, TINY
from benchmarks.harness.report import Row
from tllm_spec import LLM, SamplingParams

CLIENTS, WARM_S, END_LIMIT_S = 16, 3.0, 60.0


def killed(ranks: int, device: str) -> Row:
    """Kills the last rank. `error_s`: until the first client had its error; `end_s`: until no
    process was left. `exit`: of the process that holds the LLM."""
    with tempfile.TemporaryDirectory() as folder:
        config = LLAMA_8B if device == "cuda" else {**LLAMA_8B, **TINY, "num_hidden_layers": 2}
        Path(folder, "config.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "benchmarks.harness.killed_rank", str(ranks), device]
        process = subprocess.Popen([*command, folder], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        processes = [int(word) for word in line.split()]
        row: Row = {"job": "killed", "ranks": ranks}
        if len(processes) != ranks:
            return row | {"status": process.wait()}
        time.sleep(WARM_S)
        start = time.perf_counter()
        os.kill(processes[-1], signal.SIGKILL)
        said, _, _ = select.select([process.stdout], [], [], END_LIMIT_S)
        row["error_s"] = time.perf_counter() - start if said else None
        while any(map(_runs, processes)) and time.perf_counter() - start < END_LIMIT_S:
            time.sleep(0.01)
        row["end_s"] = time.perf_counter() - start
        for each in filter(_runs, processes):
            os.kill(each, signal.SIGKILL)
        return row | {"exit": process.wait(), "error": process.stdout.read().strip()}


def _runs(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def main() -> None:
    ranks, device, folder = sys.argv[1:]
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        device=device,
        tensor_parallel_size=int(ranks),
        max_batch_size=CLIENTS,
        max_seq_len=16384,
        kv_cache_config={"max_tokens": 2 * CLIENTS * 16384},
    )
    facts = llm.server_info()["internal_states"][0]["ranks"]
    print(*(rank["process"] for rank in facts), flush=True)
    lasting = SamplingParams(max_tokens=10**6, ignore_eos=True)
    running = [llm.generate_async([7, 8, number], lasting) for number in range(CLIENTS)]
    print(running[0].result().error, flush=True)


if __name__ == "__main__":
    main()
