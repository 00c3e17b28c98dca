"""MLA over a pool of FP8 codes: every backend writes the codes of the reference, and every query
attends to latents and rotated keys as they are stored. Also under Triton's interpreter in a
subprocess, and on a CUDA device (`-m gpu`)."""

from itertools import accumulate

import pytest
import torch

from tests.attention.test_latent import ALL_KINDS, PhaseArguments, Problem, attend, ragged_attention
from tests.attention.test_triton import on_each_device
from tests.kernels.tree_problem import bits_of, random_paths
from tllm_spec.attention import batch_invariant
from tllm_spec.attention import latent as module
from tllm_spec.attention.latent import LatentBackend
from tllm_spec.kernels.attention.visible_keys import TreeMask

SCALE = 0.0061  # numbers above 2.7 saturate
KV_LENS, NEW = [6, 17, 4, 9, 14], [6, 5, 4, 1, 3]


def problem(num_contexts: int, device: str) -> Problem:
    own = Problem(KV_LENS, NEW, num_contexts, SCALE)
    if device == "cuda":
        own.on_device(torch.float32)
    return own


@on_each_device
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("bound", [5, pytest.param(1000, marks=pytest.mark.slow)])
def test_chunks_and_windows_attend_to_latents_as_stored(
    bound: int, kind: type[LatentBackend], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_EXPANDED_TOKENS", bound)
    monkeypatch.setattr(batch_invariant, "MAX_ABSORBED_TOKENS", bound)
    phases = PhaseArguments([0, *accumulate(NEW)], KV_LENS, causal=True)
    expected = ragged_attention(problem(3, "cpu"), phases)
    output = problem(3, device).run(kind)
    torch.testing.assert_close(output.cpu(), expected, rtol=1e-4, atol=1e-5)


@on_each_device
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_rows_of_trees_attend_to_their_paths_as_stored(
    kind: type[LatentBackend], device: str
) -> None:
    kv_lens, new, generator = [6, 14, 9], [6, 3, 3], torch.Generator().manual_seed(4)
    own = Problem(kv_lens, new, 1, SCALE)
    paths = [random_paths(7, generator)[4:] for _ in kv_lens[1:]]
    own.tree = TreeMask(torch.tensor([bits_of(each) for each in paths], device=device), 7)
    if device == "cuda":
        own.on_device(torch.float32)
    output = own.run(kind)
    for request, each in enumerate(paths, 1):
        first = kv_lens[request] - 7
        for row, path in enumerate(each):
            seen = [*range(first), *(first + key for key in path)]
            expected = attend(own, request, row, seen)
            found = output[6 + 3 * (request - 1) + row]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
