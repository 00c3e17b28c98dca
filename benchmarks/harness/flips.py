"""Where texts of a quantised model diverge though only the rows of their rounds differ: the rate of
flips. By default the order of sums depends on them, so texts diverge at near ties."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.report import Options, Row, number, table
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.corpus import heldout_files, read_source
from tllm_spec.zoo.quantise import Style, quantise
from tllm_spec.zoo.registry import resolve_model

PACKINGS = ("fp8", "awq", "nvfp4")
# A batch of all texts splits keys among fewer programs than a text alone.
NUM_TEXTS, TEXT_LEN, PROMPT_LEN, BATCH = 64, 64, 320, 8
EAGLE3 = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "zoo:llama-eagle3"}
# Batch sizes, and options of speculation. The first ones are compared with the others.
SIDES: dict[str, tuple[int, dict[str, Any] | None]] = {
    "alone": (1, None),
    f"plain, batch {BATCH}": (BATCH, None),
    f"plain, batch {NUM_TEXTS}": (NUM_TEXTS, None),
    f"EAGLE-3 K=3, batch {BATCH}": (BATCH, EAGLE3),
}


def flips(found: torch.Tensor, expected: torch.Tensor) -> tuple[int, int]:
    """The number of texts `[texts, tokens]` that part, and the tokens until then, of all texts."""
    differ = found != expected
    until = torch.where(differ.any(1), differ.int().argmax(1) + 1, differ.shape[1])
    return int(differ.any(1).sum()), int(until.sum())


def rates(options: Options) -> Iterator[Row]:
    count = NUM_TEXTS if options.device == "cuda" else 2
    text = "".join(read_source(path) for path in heldout_files())[: count * 2000]
    tokens = load_tokenizer("zoo:llama").encode(text, add_special_tokens=False)
    stride = len(tokens) // count
    prompts = [tokens[i * stride : i * stride + PROMPT_LEN] for i in range(count)]
    for packing in PACKINGS:
        with tempfile.TemporaryDirectory() as root:
            folder = Path(shutil.copytree(resolve_model("zoo:llama"), Path(root) / "llama"))
            quantise(folder, Style(packing))
            texts = {name: _texts(folder, prompts, *own, options) for name, own in SIDES.items()}
        alone = texts.pop("alone")
        for name, found in texts.items():
            parted, until = flips(found, alone)
            yield {"weights": packing, "rounds": name, "parted": parted, "tokens": until}


def _texts(
    folder: Path,
    prompts: list[list[int]],
    batch_size: int,
    speculation: dict[str, Any] | None,
    options: Options,
) -> torch.Tensor:
    """`[texts, tokens]`, half of them greedy, half sampled."""
    params = [
        SamplingParams(max_tokens=TEXT_LEN, ignore_eos=True, seed=i, temperature=0.8 * (i % 2))
        for i in range(len(prompts))
    ]
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    on = {"device": options.device, "dtype": dtype, "max_batch_size": batch_size}
    with LLM(folder, speculative_config=speculation, **on) as llm:
        found = llm.generate(prompts, params)
    return torch.tensor([output.outputs[0].token_ids for output in found])


def rates_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        [row["weights"], row["rounds"], number(row["parted"]),
         number(row["tokens"] / row["parted"]) if row["parted"] else "–"]
        for row in rows
    ]  # fmt: skip
    return table(("weights", "rounds", "texts that part", "tokens until one parts"), lines)
