"""The tensors of `draft_beams`: candidates, beams and chosen trees."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BeamPool:
    """All candidates of a round of B requests with K beams and S steps, M = K + (S-1) K^2. Step 0
    adds K candidates, every later step K^2: the K children of each of the K beams, in order."""

    topk: int
    scores: torch.Tensor
    """`[B, M]` float32."""
    tokens: torch.Tensor
    """`[B, M]` int64."""
    beams: torch.Tensor
    """`[B, max(S-1, 1) * K]` int64: the index in the pool of beam k of step s, at s * K + k.
    Candidate e >= K is a child of the beam at e // K - 1."""

    @classmethod
    def allocate(cls, batch: int, topk: int, num_steps: int, device: torch.device) -> "BeamPool":
        size = topk + (num_steps - 1) * topk**2
        return cls(
            topk,
            torch.empty((batch, size), dtype=torch.float32, device=device),
            torch.empty((batch, size), dtype=torch.int64, device=device),
            torch.empty((batch, max(num_steps - 1, 1) * topk), dtype=torch.int64, device=device),
        )

    @property
    def device(self) -> torch.device:
        return self.scores.device

    def start(self, step: int) -> int:
        """The first candidate of a step."""
        return 0 if step == 0 else self.topk + (step - 1) * self.topk**2


@dataclass(frozen=True)
class Beams:
    """The K best candidates of a step, best first: the next inputs of the draft model."""

    tokens: torch.Tensor
    """`[B, K]` int64."""
    scores: torch.Tensor
    """`[B, K]` float32."""
    rows: torch.Tensor
    """`[B, K]` int64: the row `b * K + k` of the beam that each continues, for gathering hidden
    states `[B * K, H]`. In step 0 it is the row itself."""
    bits: torch.Tensor
    """`[B, K]` int64: which beams of this round each attends to; bit `s * K + k` is beam k of step
    s. Its own bit is set."""


@dataclass(frozen=True)
class DraftTree:
    """Chosen trees. Node 0 is the root, and nodes are in the order of the pool: by depth, siblings
    from the most probable on."""

    tokens: torch.Tensor
    """`[B, W-1]` int64: of nodes 1 to W-1."""
    parents: torch.Tensor
    """`[B, W]` int64; -1 for the root."""
    depths: torch.Tensor
    """`[B, W]` int64."""
    bits: torch.Tensor
    """`[B, W]` int64: bit j of node r: r is j or descends from j."""
    num_nodes: torch.Tensor | None = None
    """`[B]` int64: how many nodes after the root are proposed; None: all."""
    scores: torch.Tensor | None = None
    """`[B, W-1]` float32: products of probabilities up to each of the nodes 1 to W-1; None: they
    were not asked for."""
