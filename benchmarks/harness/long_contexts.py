"""Acceptance of the zoo's EAGLE-3 head at contexts longer than those it was trained on; a part of
cpu.py.

The zoo's target has 2,048 positions. A copy with YaRN in its config.json reads longer texts, worse
than short ones; all windows are measured on the same ones."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.report import Options, Row, table
from tllm_spec import LLM, SamplingParams
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.corpus import heldout_files, read_source
from tllm_spec.zoo.registry import resolve_model

CONTEXT, NEW_TOKENS, NUM_TEXTS = 6144, 80, 5
ROOM = NEW_TOKENS + 64
HEAD = {"decoding_type": "Eagle3", "speculative_model": "zoo:llama-eagle3", "max_draft_len": 4}
WINDOWS: dict[str, dict[str, Any]] = {
    "none": {"draft_window_size": 1_000_000},
    "the head's own": {},
    "1024": {"draft_window_size": 1024},
    "256": {"draft_window_size": 256},
}


def windows(options: Options) -> Iterator[Row]:
    context, number = (2200, 1) if options.quick else (CONTEXT, NUM_TEXTS)
    with tempfile.TemporaryDirectory() as folder:
        target = _longer_target(Path(folder), context + ROOM)
        for name, own in WINDOWS.items():
            stats = _stats(target, HEAD | own, _prompts(context, number))
            yield {"window": name, "acceptance_length": stats.acceptance_length}


def _longer_target(folder: Path, num_positions: int) -> Path:
    source = resolve_model("zoo:llama")
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    short = config["max_position_embeddings"]
    config["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": num_positions / short,
        "original_max_position_embeddings": short,
    }
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": num_positions})
    )
    return folder


def _prompts(length: int, number: int) -> list[list[int]]:
    """Pieces of all held-out files one after the other."""
    tokenizer = load_tokenizer("zoo:llama")
    text = [token for path in heldout_files() for token in tokenizer.encode(read_source(path))]
    step = (len(text) - length) // number
    return [text[start : start + length] for start in range(0, number * step, step)]


def _stats(target: Path, config: dict[str, Any], prompts: list[list[int]]) -> SpeculativeStats:
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    room: dict[str, Any] = {"max_batch_size": 1, "max_num_tokens": 2048, "device": "cpu"}
    room |= {"enable_chunked_prefill": True, "kv_cache_config": {"enable_block_reuse": False}}
    total = SpeculativeStats()
    with LLM(str(target), speculative_config=config, **room) as llm:
        for output in llm.generate(prompts, params, use_tqdm=False):
            total += output.speculative_decoding or SpeculativeStats()
    return total


def windows_table(rows: Sequence[Row]) -> list[str]:
    lines = [[row["window"], f"{row['acceptance_length']:.2f}"] for row in rows]
    return table(("window", "acceptance length"), lines)
