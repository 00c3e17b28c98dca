"""Tokens a round of draft trees at temperature 0.8, by how candidates are chosen and scored.

    python -m benchmarks.tree_scores [--quick] [--output result.json]

A simulation on a CPU: random logits of 500 tokens with a spread of 3, the target's are the draft's
plus normal errors. Trees of 4 beams, 4 steps and 12 drafts; a chain of 4. The bar: candidates that
are scored with their noise accept the most."""

import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.harness.report import Options, Row, Subject, main, number, table
from tllm_spec.kernels.accept_tree import accept_tree
from tllm_spec.kernels.beam_pool import BeamPool
from tllm_spec.kernels.choose_token import choose_token
from tllm_spec.kernels.draft_beams import add_last, first_beams, grow, select
from tllm_spec.kernels.top_tokens import top_tokens

TOPK, STEPS, DRAFTS, VOCAB, SPREAD, TEMPERATURE = 4, 4, 12, 500, 3.0, 0.8
Candidates = tuple[torch.Tensor, torch.Tensor]
# Logits `[R, V]`, K, temperature, seeds and positions `[R]` -> probabilities and tokens `[R, K]`.
Choose = Callable[..., Candidates]


def with_noise(logits: torch.Tensor, topk: int, *keys: torch.Tensor) -> Candidates:
    return top_tokens(logits, topk, None, *keys)


def without_noise(logits: torch.Tensor, topk: int, *keys: torch.Tensor) -> Candidates:
    tokens = with_noise(logits, topk, *keys)[1]
    return (logits / TEMPERATURE).softmax(-1).gather(1, tokens), tokens


def argmax(logits: torch.Tensor, topk: int, *keys: torch.Tensor) -> Candidates:
    return top_tokens(logits, topk)


def tokens_a_round(choose: Choose, topk: int, num_drafts: int, error: float, batch: int) -> float:
    """The mean over `batch` random rounds."""
    generator = torch.Generator().manual_seed(0)
    pool = BeamPool.allocate(batch, topk, STEPS, torch.device("cpu"))
    targets = torch.full((batch, 1 + pool.scores.shape[1]), -1)  # after the root and candidates

    def run(step: int, candidates: torch.Tensor) -> Candidates:
        """Draft and target after some candidates `[B, P]`, numbered from 1 on; 0 is the root."""
        shape = (*candidates.shape, VOCAB)
        logits = torch.randn(shape, generator=generator).flatten(0, 1) * SPREAD
        seeds = torch.arange(batch).repeat_interleave(shape[1])
        keys = torch.full((len(logits),), TEMPERATURE), seeds, torch.full_like(seeds, step)
        targets_logits = logits + torch.randn(logits.shape, generator=generator) * error
        targets.scatter_(1, candidates, choose_token(targets_logits, *keys).view(batch, -1))
        probs, tokens = choose(logits, topk, *keys)
        return probs.view(*shape[:2], topk), tokens.view(*shape[:2], topk)

    probs, tokens = run(0, torch.zeros(batch, 1, dtype=torch.int64))
    beams = first_beams(pool, probs[:, 0], tokens[:, 0])
    for step in range(1, STEPS):
        found = run(step, 1 + pool.beams[:, (step - 1) * topk : step * topk])
        if step + 1 == STEPS:
            add_last(pool, step, beams, *found)
        else:
            beams = grow(pool, step, beams, *found)
    tree = select(pool, num_drafts)
    pool.tokens.copy_(torch.arange(1, targets.shape[1]).expand_as(pool.tokens))
    numbers = torch.nn.functional.pad(select(pool, num_drafts).tokens, (1, 0))  # of the nodes
    tokens = torch.nn.functional.pad(tree.tokens, (1, 0))
    _, _, lens = accept_tree(targets.gather(1, numbers), tokens, tree.parents, STEPS)
    return float(lens.double().mean())


WAYS: dict[str, tuple[Choose, int, int]] = {
    "K best with noise, scored with it": (with_noise, TOPK, DRAFTS),
    "K best with noise, scored without": (without_noise, TOPK, DRAFTS),
    "K best without noise": (argmax, TOPK, DRAFTS),
    "coupled chain": (with_noise, 1, STEPS),
}
ERRORS = (0.5, 1.0, 2.0)


def scores(options: Options) -> Iterator[Row]:
    for name, way in WAYS.items():
        for error in ERRORS:
            tokens = tokens_a_round(*way, error, 20 if options.quick else 1000)
            yield {"candidates": name, "error": error, "tokens": tokens}


def scores_table(rows: Sequence[Row]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for row in rows:
        own = lines.setdefault(row["candidates"], [row["candidates"]])
        own.append(number(row["tokens"]))
    titles = ("tokens a round, by error", *map(str, dict.fromkeys(row["error"] for row in rows)))
    return table(titles, list(lines.values()))


SUBJECTS = (Subject("scores", "Trees at temperature 0.8, simulated", scores, scores_table),)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
