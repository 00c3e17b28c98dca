"""One thread against all of them, by model size: where `SINGLE_THREAD_BYTES` of
executor/device_choice.py comes from.

    python benchmarks/cpu_threads.py [--output result.json] [--repeat 3]

Plain decoding of one request through `LLM` with random weights; the two settings take turns.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from tllm_spec import LLM, SamplingParams
from tllm_spec.executor import device_choice

# hidden size, layers, MLP size
SHAPES = ((192, 12, 448), (320, 12, 768), (448, 12, 1152), (640, 12, 1728))
NEW_TOKENS = 48


def write_config(folder: str, hidden: int, layers: int, inner: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": 2048,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    Path(folder, "config.json").write_text(json.dumps(config))


def seconds(folder: str, single_thread_bytes: int) -> float:
    device_choice.SINGLE_THREAD_BYTES = single_thread_bytes
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_batch_size": 1,
        "max_num_tokens": 512,
    }
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(folder, **options) as llm:
        llm.generate(list(range(64)), params)
        start = time.perf_counter()
        llm.generate(list(range(100, 164)), params)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for hidden, layers, inner in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            write_config(folder, hidden, layers, inner)
            ratios = [seconds(folder, 0) / seconds(folder, 1 << 40) for _ in range(args.repeat)]
        weights = 4 * (2048 * hidden + layers * (4 * hidden * hidden + 3 * hidden * inner))
        row = {
            "weight_mib": round(weights / 2**20),
            "one_thread_speed": round(statistics.median(ratios), 2),
        }
        threads = torch.get_num_threads()
        print(
            f"{row['weight_mib']:4d} MiB: one thread is {row['one_thread_speed']:.2f}x as fast as "
            f"{threads}"
        )
        rows.append(row)
    if args.output:
        args.output.write_text(
            json.dumps({"threads": torch.get_num_threads(), "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
