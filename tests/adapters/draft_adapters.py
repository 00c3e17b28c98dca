"""An adapter of the zoo's model with a LoRA of the draft head, which lacks just that; and requests
with it, with the same adapter without one, and with none."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.adapters.folders import linear_shapes, merged, random_pairs, write_adapter
from tests.adapters.tiny_adapters import ATTENTION, MLP
from tests.executor.harness import Harness
from tests.lossless.engines import HEAD, MODES
from tllm_spec.executor.request import LlmRequest
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.registry import resolve_model

TARGET, RANK = "zoo:llama", 8
TEXTS = ("def add(self, other):\n", "import os\n\n\nclass Reader:\n", "for line in lines:\n")
# The one with a draft head of its own, one without, and none.
NAMES = ("own", "shared", None)


def write_draft_adapters(root: Path) -> Path:
    """The adapters `own` and `shared`, which are the same for the target, the head `whole`, and
    `head`, which lacks what `own/draft` has."""
    target, head = resolve_model(TARGET), resolve_model(HEAD)
    tensors = load_file(target / "model.safetensors")
    pairs = random_pairs(linear_shapes(tensors, "q_proj", "v_proj"), RANK)
    shapes = linear_shapes(load_file(head / "model.safetensors"), *ATTENTION, *MLP)
    of_head = random_pairs(shapes, RANK)
    for name in ("own", "shared"):
        write_adapter(root / name, pairs, r=RANK, lora_alpha=1)
    merged(head, root / "head", of_head, -1)
    merged(head, root / "whole", of_head, 0)
    named = {name.replace("midlayer.", "layers.0."): pair for name, pair in of_head.items()}
    write_adapter(root / "own/draft", named, r=RANK, lora_alpha=RANK)
    return root


def harness_of(
    root: Path,
    mode: str,
    head: str = "head",
    max_draft_lora_rank: int | None = None,
    max_loras: int = 2,
    **options: Any,
) -> Harness:
    """options: of the speculation."""
    config = MODES[mode]
    if config is not None:
        own = {"max_draft_len": 4, "speculative_model": str(root / head)}
        config = config | own | options
    dirs = {name: str(root / name) for name in NAMES if name is not None}
    lora = {"lora_dir": dirs, "max_loras": max_loras, "max_lora_rank": RANK}
    lora["max_draft_lora_rank"] = max_draft_lora_rank
    return Harness(TARGET, speculative_config=config, lora_config=lora)


def run(harness: Harness) -> list[LlmRequest]:
    """Requests of several lengths, each with every adapter."""
    encode = load_tokenizer(TARGET).encode
    requests = [
        harness.submit(encode(text), 8 + 6 * i, seed=i, adapter=name, temperature=0.5 * (i == 1))
        for i, text in enumerate(TEXTS)
        for name in NAMES
    ]
    harness.run()
    assert not [request.error for request in requests if request.error]
    return requests


def accepted(requests: list[LlmRequest]) -> dict[str, int]:
    """Drafts that were accepted, by name of the requests' adapter."""
    found = dict.fromkeys(map(str, NAMES), 0)
    for name, request in zip(NAMES * len(TEXTS), requests, strict=True):
        found[str(name)] += request.counters.stats().num_accepted_tokens
    return found
