"""Growing draft trees in tests: a random draft model over paths, the functions under test driven by
it, and a slow reference in plain Python without index arithmetic."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tllm_spec.kernels.drafts.draft_beams import BeamPool, Beams, first_beams, grow, select
from tllm_spec.kernels.slots.accept import DraftTree

Path = tuple[int, ...]  # tokens from the root on, without it
Candidates = list[tuple[float, int]]  # probability and token, best first
Draft = Callable[[Path], Candidates]


def random_draft(seed: int, topk: int, *, tied: bool, nan_depth: int | None = None) -> Draft:
    """`tied`: probabilities are few powers of two, so that many scores are equal. After about
    half of the paths of `nan_depth` tokens there are only NaN."""

    def draft(path: Path) -> Candidates:
        generator = random.Random(f"{seed} {path}")
        if len(path) == nan_depth and (not path or path[-1] % 2):
            return [(float("nan"), token) for token in range(topk)]
        probs = [generator.choice((1.0, 0.5, 0.25, 0.0)) if tied else generator.random()
                 for _ in range(topk)]  # fmt: skip
        tokens = generator.sample(range(1000), topk)
        return list(zip(sorted(probs, reverse=True), tokens, strict=True))

    return draft


@dataclass(eq=False)
class Candidate:
    path: Path
    score: np.float32
    parent: "Candidate | None"


def slow_tree(draft: Draft, topk: int, num_steps: int, num_drafts: int) -> list[Candidate]:
    """The chosen candidates in node order. Python's sort keeps the order of equal candidates."""

    def worth(candidate: Candidate) -> float:
        return -1.0 if np.isnan(candidate.score) else float(candidate.score)

    pool: list[Candidate] = []
    parents: list[Candidate | None] = [None]
    for _ in range(num_steps):
        new = [
            Candidate(
                (*(parent.path if parent else ()), token),
                (parent.score if parent else np.float32(1)) * np.float32(prob),
                parent,
            )
            for parent in parents
            for prob, token in draft(parent.path if parent else ())
        ]
        pool += new
        parents = list(sorted(new, key=worth, reverse=True)[:topk])
    chosen = sorted(pool, key=worth, reverse=True)[:num_drafts]
    return [candidate for candidate in pool if candidate in chosen]


def candidates_after(
    drafts: list[Draft], paths: list[list[Path]], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and tokens `[B, P, K]` after the P paths of each request."""
    found = [[draft(path) for path in own] for draft, own in zip(drafts, paths, strict=True)]
    table = torch.tensor(found, dtype=torch.float64)
    return table[..., 0].float().to(device), table[..., 1].long().to(device)


def next_paths(paths: list[list[Path]], beams: Beams) -> list[list[Path]]:
    topk = beams.tokens.shape[1]
    return [
        [
            (*paths[request][int(row) - request * topk], int(token))
            for row, token in zip(rows, tokens, strict=True)
        ]
        for request, (rows, tokens) in enumerate(zip(beams.rows, beams.tokens, strict=True))
    ]


def grow_tree(
    drafts: list[Draft], topk: int, num_steps: int, num_drafts: int, device: str = "cpu"
) -> DraftTree:
    """Drives the functions under test, and checks the ancestors of every beam."""
    pool = BeamPool.allocate(len(drafts), topk, num_steps, torch.device(device))
    probs, tokens = candidates_after(drafts, [[()] for _ in drafts], device)
    beams = first_beams(pool, probs[:, 0].contiguous(), tokens[:, 0].contiguous())
    paths = next_paths([[()] * topk for _ in drafts], beams)
    all_paths = [list(own) for own in paths]
    for step in range(1, num_steps):
        probs, tokens = candidates_after(drafts, paths, device)
        beams = grow(pool, step, beams, probs, tokens)
        if step == num_steps - 1:
            break
        paths = next_paths(paths, beams)
        for own, new in zip(all_paths, paths, strict=True):
            own += new
        for own, new, bits in zip(all_paths, paths, beams.bits.tolist(), strict=True):
            for path, value in zip(new, bits, strict=True):
                seen = [own[index] for index in range(64) if value >> index & 1]
                assert seen == [path[: end + 1] for end in range(len(path))]
    return select(pool, num_drafts, with_scores=True)
