"""What the heads that read hidden states of the target have in common: which states they read, how
they form their inputs, and the modules that they borrow from the target."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.models.causal_lm import CausalLM
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.eagle_config import EagleConfig
from tllm_spec.models.head_checkpoint import EMBEDDING
from tllm_spec.models.layers import Embedding
from tllm_spec.models.linear import Linear, OutputLinear
from tllm_spec.models.module import Module, Placement
from tllm_spec.models.registry import LoadFormat
from tllm_spec.models.tied_output import OUTPUT
from tllm_spec.models.token_map import DraftTokens, reduced_output


@dataclass(frozen=True)
class HeadSource:
    """What a head is loaded from, and for which target."""

    path: Path
    """A folder in Hugging Face's format; `dummy` needs its config.json only."""
    target: CausalLM
    load_format: LoadFormat
    """`auto` reads safetensors or pytorch_model.bin, `dummy` fills random weights."""
    max_positions: int
    """Rows of the rotary table, which no request may exceed; the length that the head was trained
    on is not a limit."""
    communicator: Communicator = SINGLE
    """This rank's, with its place."""
    fp8_activations: bool = True
    """That of exported MTP modules, as in `load_model`."""

    @property
    def placement(self) -> Placement:
        """Weights in the target's dtype, on its device."""
        target, communicator = self.target, self.communicator
        return Placement(
            target.dtype, target.device, communicator.mapping, communicator=communicator
        )


@dataclass(frozen=True)
class Masks:
    """The inputs of rows that draft all tokens of a round at once. `state` `[1, H]` replaces the
    target's hidden state; None: the network reads tokens only."""

    token_id: int
    state: torch.Tensor | None = None


@dataclass(frozen=True)
class BorrowedModules:
    """The target's modules. They are not submodules of the head: its checkpoint does not fill them,
    and its parameters do not include them."""

    embed_tokens: Embedding
    lm_head: OutputLinear

    @classmethod
    def of(cls, target: CausalLM, *, tied: bool = False, placement: Placement) -> "BorrowedModules":
        """`tied`: the output layer has the embedding's weight, even if the target is not tied."""
        embed_tokens, lm_head = target_modules(target)
        if tied and lm_head.weight is not embed_tokens.weight:
            weight, rows = embed_tokens.weight, embed_tokens.num_embeddings
            lm_head = OutputLinear(weight.shape[1], rows, placement=placement, tied=weight)
        return cls(embed_tokens, lm_head)


def target_modules(target: CausalLM) -> tuple[Embedding, OutputLinear]:
    """Its embedding and its output layer."""
    embed_tokens, lm_head = (
        target.get_submodule("model.embed_tokens"),
        target.get_submodule("lm_head"),
    )
    assert isinstance(embed_tokens, Embedding) and isinstance(lm_head, OutputLinear)
    return embed_tokens, lm_head


class DraftHead(Module, ABC):
    """A draft network of few layers that reads hidden states of the target. Embedding and output
    layer are the target's, unless it has its own."""

    config: Eagle3Config | EagleConfig
    borrowed: BorrowedModules
    fc: Linear
    embed_tokens: Embedding | None
    """None: the target's."""
    lm_head: OutputLinear | None
    """None: the target's."""
    draft_to_target: torch.Tensor | None
    """`[V_draft]` int64: the target's id of each of the head's tokens; None: the ids are equal."""
    masks: "Masks | None" = None
    """How the head drafts all tokens at once; None: it drafts one after the other."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and activations: the target's."""
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def num_logits(self) -> int:
        """Logits of one row, on all ranks together."""
        ids = self.draft_to_target
        return self.config.vocab_size if ids is None else len(ids)

    @property
    def embedding(self) -> Embedding:
        """The head's own embedding, or the target's."""
        return self.borrowed.embed_tokens if self.embed_tokens is None else self.embed_tokens

    @property
    def output(self) -> OutputLinear:
        """The head's own output layer, or the target's."""
        return self.borrowed.lm_head if self.lm_head is None else self.lm_head

    def keep_tokens(self, tokens: DraftTokens, placement: Placement) -> None:
        """Limits drafts to `tokens`, which are ids of the target. Raises ValueError if the head's
        own tokens are not the target's, or do not divide over the ranks."""
        if self.draft_to_target is not None:
            raise ValueError(
                "speculative_token_map is refused: d2t of the head already says which tokens it "
                "drafts; accepted: null"
            )
        self.lm_head = reduced_output(self.output, tokens.rows, placement)
        self.draft_to_target = tokens.ids.to(self.device)

    @abstractmethod
    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """Captured states of the target, `[T, n * H_target]`, to `[T, H]`. The head's own states
        are not fused."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, H]`, as `forward` returns it, to `[R, V_draft]`, or this rank's columns."""

    def _add_own(
        self, owns: Collection[str], rows: int, placement: Placement, *, is_tied: bool
    ) -> None:
        """The embedding and an output layer of so many rows, if they are not the target's."""
        size = self.config.hidden_size
        self.embed_tokens, self.lm_head = None, None
        if EMBEDDING in owns:
            self.embed_tokens = Embedding(self.config.vocab_size, size, placement)
        if OUTPUT in owns:
            self.lm_head = OutputLinear(size, rows, placement=placement)
        elif self.embed_tokens is not None and is_tied:
            tied = self.embed_tokens.weight
            self.lm_head = OutputLinear(size, rows, placement=placement, tied=tied)


class SteppedHead(DraftHead):
    """A head whose forward reads tokens and hidden states."""

    @abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        """One step. `hidden` is not changed.

        Args:
            input_ids: `[T]`; the token after the one that the row's hidden state was computed from.
            positions: `[T]`.
            hidden: `[T, H]`, from `fuse` or from the previous step.
            context: of the head's own KV pool.

        Returns:
            `[T, H]`, or `[R, H]` of the rows that the context wants, for `compute_logits` and for
            the next step.
        """
