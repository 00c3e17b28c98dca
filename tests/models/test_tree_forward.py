"""A model's forward over the nodes of a draft tree: each node's logits equal those of a plain
forward over the prompt and the node's path, for a whole tree and for one draft step after
another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.tree_problem import bits_of, random_paths
from tests.models.gpt_oss import save_gpt_oss
from tests.models.helpers import (
    PagedRunner,
    load,
    random_tokens,
    reference_logits,
    save_checkpoint,
    use,
)
from tests.models.test_gemma3 import save_gemma3
from tests.models.test_llama4 import save_llama4
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.interface import AttentionMetadata, HeadsBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.kernels.attention.visible_keys import TreeMask

PROMPT, NUM_NODES = random_tokens(9), 12
# The tree starts in the first chunk, and its path of 7 nodes ends in the third one.
LLAMA4: dict[str, Any] = {
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "attn_scale": 0.7,
    "no_rope_layer_interval": 2,
}
SAVERS: dict[str, Callable[[Path], Any]] = {
    "Olmo2": lambda folder: save_checkpoint(folder, "Olmo2"),
    "Llama": lambda folder: save_checkpoint(folder, "Llama"),
    "Llama4": lambda folder: save_llama4(folder, **LLAMA4),
    "gpt-oss": lambda folder: save_gpt_oss(folder, sliding_window=5),
    "Gemma3": lambda folder: save_gemma3(folder, sliding_window=5),
}


class TreeRunner(PagedRunner):
    """The windows of the next step are nodes of the tree with `paths`, after `offset` others."""

    paths: list[list[int]] | None = None
    offset = 0

    def metadata(self, *args: Any) -> AttentionMetadata:
        metadata = super().metadata(*args)
        if self.paths is not None:
            bits = torch.tensor([bits_of(self.paths)])
            metadata.tree = TreeMask(bits, self.offset + len(self.paths))
            depths = [len(path) - 1 for path in self.paths]
            metadata.positions = torch.tensor(depths) + len(PROMPT)
        return metadata


@pytest.mark.parametrize("family", SAVERS)
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("kind", [VanillaAttention, TritonAttention, BatchInvariantAttention])
def test_a_nodes_logits_are_those_of_the_prompt_and_its_path(
    kind: type[HeadsBackend], num_steps: int, family: str, tmp_path: Path
) -> None:
    reference = SAVERS[family](tmp_path)
    runner = TreeRunner(load(tmp_path))
    use(runner, kind)
    runner.step(contexts={0: PROMPT})
    tokens = random_tokens(NUM_NODES, seed=1)
    paths = random_paths(NUM_NODES, torch.Generator().manual_seed(3))
    size = NUM_NODES // num_steps
    for first in range(0, NUM_NODES, size):
        runner.paths, runner.offset = paths[first : first + size], first
        logits = runner.step(windows={0: tokens[first : first + size]})[0]
        for row, path in zip(logits, runner.paths, strict=True):
            sequence = PROMPT + [tokens[node] for node in path]
            torch.testing.assert_close(
                row, reference_logits(reference, sequence)[-1], rtol=1e-4, atol=1e-4
            )
