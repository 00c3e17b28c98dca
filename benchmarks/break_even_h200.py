"""`tllm-bench break-even` on one GPU: an 8B Llama's shape with a one-model EAGLE-3 head.

    python benchmarks/break_even_h200.py [--batch_size 8] [--output result.json]

Random weights, prompts of 512 random tokens, 256 tokens of output. Three engines live at a time, so
the KV cache is bounded."""

import argparse
import tempfile
from pathlib import Path

import yaml
from model_shapes import write_configs

from tllm_spec.cli.bench import main as bench

INPUT_LEN, OUTPUT_LEN = 512, 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_configs(folder)
        options = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_batch_size": args.batch_size,
            "max_seq_len": 2 * (INPUT_LEN + OUTPUT_LEN),
            "kv_cache_config": {"enable_block_reuse": False},
            "cuda_graph_config": {"batch_sizes": [args.batch_size]},
            "speculative_config": {
                "decoding_type": "Eagle3",
                "speculative_model": str(folder / "eagle3"),
                "load_format": "dummy",
                "max_draft_len": 5,
            },
        }
        (folder / "options.yaml").write_text(yaml.safe_dump(options))
        command = [
            "-m",
            str(folder / "target"),
            "break-even",
            "--config",
            str(folder / "options.yaml"),
        ]
        command += ["--batch_size", str(args.batch_size), "--repeat", str(args.repeat)]
        command += ["--input_len", str(INPUT_LEN), "--output_len", str(OUTPUT_LEN)]
        command += ["--report_json", str(args.output)] if args.output else []
        bench(command, standalone_mode=False)


if __name__ == "__main__":
    main()
