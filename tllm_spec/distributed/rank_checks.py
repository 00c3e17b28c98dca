"""What all ranks of a model must have in common: versions of packages, and the checkpoints."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.version import __version__
from tllm_spec.zoo.registry import is_gguf, resolve_file, resolve_model

# Their versions decide about bits of tensors, or about what a grammar or a stop string matches.
PACKAGES = ("torch", "triton", "flashinfer-python", "tokenizers", "transformers", "llguidance")
ABSENT = "absent"
HEADER_BYTES = 1 << 16  # of a file of weights: names, shapes and places of its first tensors
NUM_SAMPLES, SAMPLE_BYTES = 64, 1 << 12  # of the rest of such a file


def versions() -> dict[str, str]:
    """Versions by the names of what has them."""
    found = {"tllm_spec": __version__, "Python": platform.python_version()}
    return found | {name: _version(name) for name in PACKAGES}


def checkpoints(args: LlmArgs) -> dict[str, str]:
    """A fingerprint of each folder or file that the model is loaded from."""
    of_draft = ("speculative_model", "speculative_token_map")
    spec = args.speculative_config
    drafts = [getattr(spec, name, None) for name in of_draft]
    search = spec.text_search(args.max_batch_size) if spec is not None else None
    if search is not None and search.corpus is not None:
        drafts.append(search.corpus[0])
    return {name: fingerprint(name) for name in (args.model, args.tokenizer, *drafts) if name}


def fingerprint(model: str) -> str:
    """Hashes the folder's text files, and its weights' sizes, headers and samples of their bytes,
    since all of them would take minutes. A GGUF file is hashed in the same way, another file as a
    whole. "absent" if there is none."""
    file = resolve_file(model)
    if is_gguf(file):
        return hashlib.sha256(f"{file.stat().st_size} ".encode() + _samples(file)).hexdigest()[:16]
    if file.is_file():
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    try:
        folder = resolve_model(model)
    except ValueError:
        return ABSENT
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".txt", ".jinja", ".model"):
            digest.update(f"{path.name} ".encode() + path.read_bytes())
        elif path.suffix in (".safetensors", ".bin"):
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + _samples(path))
    return digest.hexdigest()[:16]


def mismatch(facts: Sequence[Mapping[str, str]], what: str) -> str | None:
    """One sentence on all differences from rank 0's facts, or None if there are none."""
    first, *others = facts
    found = [
        f"{what} {name} is {other[name]} on rank {rank} and {value} on rank 0"
        for rank, other in enumerate(others, start=1)
        for name, value in first.items()
        if other[name] != value
    ]
    return f"{'; '.join(found)}; all ranks need the same" if found else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


def _samples(path: Path) -> bytes:
    """The beginning of a file, and blocks at equal distances, the last of them at its end."""
    room = max(path.stat().st_size - SAMPLE_BYTES, 0)
    with path.open("rb") as file:
        found = [file.read(HEADER_BYTES)]
        for number in range(NUM_SAMPLES):
            file.seek(room * number // (NUM_SAMPLES - 1))
            found.append(file.read(SAMPLE_BYTES))
    return b"".join(found)
