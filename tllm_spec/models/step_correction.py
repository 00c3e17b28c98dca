"""What a head that fills in a block adds from one draft to the next.

All rows of a block are computed at once, so a row's logits do not know which token was drafted
before it. A small network corrects them draft by draft, by a product of low rank of the token
before (DSpark, arXiv 2607.05147; DFlash2). Another one says how likely each draft is to be
accepted."""

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal

import torch

from tllm_spec.models.layers import Embedding, Module, Placement, in_float32
from tllm_spec.models.linear import ColumnLinear, Linear
from tllm_spec.models.token_map import reduced_output

MarkovKind = Literal["vanilla", "gated", "rnn"]


class StepCorrection(Module, ABC):
    """Corrects the logits of one draft after another."""

    @abstractmethod
    def forward(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        previous: torch.Tensor,
        memory: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The corrected logits `[T, V_draft]`, or this rank's columns, and the memory of the next
        step. `logits` may be changed.

        Args:
            hidden: `[T, H]`, which the logits were computed from.
            previous: `[T]`; the target's ids of the tokens before.
            memory: `[T, r]` of the step before; None: it is the first one, or there is none.
        """

    @abstractmethod
    def keep_tokens(self, rows: torch.Tensor, placement: Placement) -> None:
        """Limits the logits to these columns, `[V_draft]`."""


class MarkovHead(StepCorrection):
    """Adds `W2 f(W1[previous])`, of rank r. `kind`: f is the identity, has a gate of the hidden
    state, or is a recurrent cell."""

    def __init__(
        self, kind: MarkovKind, sizes: tuple[int, int, int], num_logits: int, placement: Placement
    ) -> None:
        """sizes: of the target's vocabulary, of the hidden state, and r."""
        super().__init__()
        vocab_size, size, rank = sizes
        self.kind = kind
        self.markov_w1 = Embedding(vocab_size, rank, placement)
        parts = {"markov_w2": num_logits}
        self.markov_w2 = ColumnLinear(rank, parts, bias=False, placement=placement)
        if kind == "gated":
            self.gate_proj = Linear(size + rank, rank, bias=True, placement=placement)
        if kind == "rnn":
            self.joint_proj = Linear(size + 2 * rank, 3 * rank, bias=True, placement=placement)

    def forward(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        previous: torch.Tensor,
        memory: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        added = self.markov_w1.forward(previous)
        if self.kind == "gated":
            gate = self.gate_proj.forward(torch.cat((hidden, added), -1))
            added = gate.sigmoid() * added
        elif self.kind == "rnn":
            memory = torch.zeros_like(added) if memory is None else memory
            joint = self.joint_proj.forward(torch.cat((memory, added, hidden), -1))
            kept, new, out = joint.chunk(3, -1)
            memory = torch.lerp(new.tanh(), memory, kept.sigmoid())
            added = out.tanh()
        self.markov_w2.add_to(logits, added)
        return logits, memory

    def keep_tokens(self, rows: torch.Tensor, placement: Placement) -> None:
        self.markov_w2 = reduced_output(self.markov_w2, rows, placement)


class CandidateSelector(StepCorrection):
    """DFlash2's: of the `topk` best tokens, and those that equal the last of them, it adds how well
    each follows the token before, by a product of both tokens' codes and of the hidden state."""

    def __init__(
        self, topk: int, sizes: tuple[int, int, int], num_logits: int, placement: Placement
    ) -> None:
        """sizes: as of `MarkovHead`."""
        super().__init__()
        vocab_size, size, rank = sizes
        self.topk = topk
        self.predecessor_codebook = Embedding(vocab_size, rank, placement)
        parts = {"successor_codebook": num_logits}
        self.successor_codebook = ColumnLinear(rank, parts, bias=False, placement=placement)
        self.hidden_projection = Linear(size, rank, bias=False, placement=placement)

    def forward(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        previous: torch.Tensor,
        memory: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        best, layer = logits.topk(min(self.topk, logits.shape[1])).values, self.successor_codebook
        if layer.mapping.tp_size > 1:
            best = layer.communicator.all_gather(best).topk(best.shape[1]).values
        logits.masked_fill_(logits < best[:, -1:], -torch.inf)
        codes = self.predecessor_codebook.forward(previous) * self.hidden_projection.forward(hidden)
        layer.add_to(logits, codes)
        return logits, None

    def keep_tokens(self, rows: torch.Tensor, placement: Placement) -> None:
        self.successor_codebook = reduced_output(self.successor_codebook, rows, placement)


class Confidence(Module):
    """How likely a draft is to be accepted if all before it are, by the hidden state and, with
    `tokens`, the token before. It does not know the draft itself."""

    def __init__(self, size: int, tokens: Embedding | None, placement: Placement) -> None:
        super().__init__()
        self.__dict__["_tokens"] = tokens  # not a submodule: the Markov head has its name
        size += 0 if tokens is None else tokens.weight.shape[1]
        self.proj = Linear(size, 1, bias=True, placement=in_float32(placement))
        self.temperatures: tuple[float, ...] = ()

    def calibrate(self, file: Path, num_drafts: int) -> None:
        """Divides the logits of each of so many drafts by a temperature of the file's. Raises
        ValueError."""
        try:
            found = json.loads(file.read_text(encoding="utf-8"))["temperatures"]
        except (OSError, ValueError, LookupError, TypeError):
            found = None
        is_list = isinstance(found, list) and len(found) >= num_drafts
        if not is_list or not all(isinstance(each, (int, float)) and each > 0 for each in found):
            raise ValueError(
                f"{file} must be a JSON file with temperatures, a list of {num_drafts} or more "
                "numbers above 0"
            )
        self.temperatures = tuple(map(float, found))

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor, step: int) -> torch.Tensor:
        """`[T]` probabilities of draft `step`, of the hidden states `[T, H]` and the target's ids
        of the tokens before `[T]`."""
        tokens: Embedding | None = self.__dict__["_tokens"]
        if tokens is not None:
            hidden = torch.cat((hidden, tokens.forward(previous)), -1)
        logits = self.proj.forward(hidden.to(torch.float32)).squeeze(1)
        return (logits / self.temperatures[step] if self.temperatures else logits).sigmoid()
