"""What draft heads that read hidden states of the target have in common: their tensors, which
states they read, how they form their inputs, and the modules that they borrow from the target."""

import logging
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.models.checkpoint import OUTPUT, checkpoint_tensors, is_same
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.config_file import read_config
from tllm_spec.models.draft_kind import HeadKind, kind_by
from tllm_spec.models.layers import Embedding, Module, Placement
from tllm_spec.models.linear import OutputLinear
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.registry import LoadFormat
from tllm_spec.models.rotary import cos_sin_table
from tllm_spec.models.step_correction import Confidence, StepCorrection
from tllm_spec.models.token_map import DraftTokens, reduced_output

EMBEDDING = "embed_tokens.weight"  # of a head; its output layer has the target's name
BIN = "pytorch_model.bin"
# Names of the mask token of networks that draft all tokens at once; the first that is there holds.
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


def head_kind(path: Path) -> HeadKind | None:
    """What the draft weights in the folder `path` are: by config.json, or else by the names of the
    tensors. None: a language model, or neither says so.

    Raises:
        ValueError: a file is missing or not readable.
    """
    return kind_by(read_config(path), lambda: [name for name, _ in _stored(path, lambda _: True)])


def mask_token_in(config: Mapping[str, Any]) -> int | None:
    """The mask token that config.json names; None: it names none."""
    found = (config[name] for name in MASK_TOKENS if config.get(name) is not None)
    return next(map(int, found), None)


def head_tensors(
    path: Path, kind: HeadKind, unused: tuple[str, ...], renamed: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The memory-mapped tensors of the head in the folder `path`, without the prefix `model.`.

    Args:
        kind: named in errors.
        unused: endings of the names of tensors that are left out.
        renamed: beginnings of names to what they become.

    Raises:
        ValueError: no checkpoint, a file that is not readable, two tensors of one name, or a weight
            without a dimension.
    """
    tensors: dict[str, torch.Tensor] = {}
    for stored, tensor in _stored(path, lambda name: True, is_needed=True):
        name = _canonical(stored, renamed)
        if name in tensors:
            raise ValueError(f"The {kind} head in {path} has {name} twice, once as {stored}.")
        if not name.endswith(unused):
            if name.endswith(".weight") and tensor.dim() == 0:
                raise ValueError(f"{stored} of the {kind} head in {path} is a single number.")
            tensors[name] = tensor
    return tensors


def _canonical(name: str, renamed: Mapping[str, str]) -> str:
    name = name.removeprefix("model.")
    for old, new in renamed.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _stored(
    path: Path, wants: Callable[[str], bool], *, is_needed: bool = False
) -> Iterable[tuple[str, torch.Tensor]]:
    """The wanted tensors of the folder's checkpoint; none without one. Raises ValueError if one is
    needed."""
    if any(path.glob("model.safetensors*")):
        return checkpoint_tensors(path, wants)
    if (path / BIN).is_file():
        return [each for each in _bin_tensors(path / BIN) if wants(each[0])]
    if not is_needed:
        return []
    raise ValueError(
        f"{path} has neither model.safetensors nor {BIN}; other weight formats are not read."
    )


def _bin_tensors(file: Path) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a pickled state dict. `weights_only` refuses pickles that run code."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{file} is not a readable file of tensors: {error}") from error
    if not isinstance(state, dict) or not all(
        isinstance(value, torch.Tensor) for value in state.values()
    ):
        raise ValueError(f"{file} must hold a dictionary of names to tensors.")
    return list(state.items())


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
    staged_for: torch.device | None = None
    """The device of the weights, which lie in host memory as `Placement` says; None: the target's,
    where they lie."""

    @property
    def placement(self) -> Placement:
        """Weights in the target's dtype, on its device."""
        return Placement(
            self.target.dtype,
            self.staged_for or self.target.device,
            self.communicator.mapping,
            communicator=self.communicator,
            staged=self.staged_for is not None,
        )


@dataclass(frozen=True)
class Masks:
    """The inputs of rows that draft all tokens of a round at once. `state` `[1, H]` replaces the
    target's hidden state; None: the network reads tokens only."""

    token_id: int
    state: torch.Tensor | None = None


@dataclass(frozen=True)
class Block:
    """How the rows of a head that fills in masks are read: those of the newest token and of the
    masks after it, which see each other. `first`: the row of the first draft; 0, the newest token's
    row drafts the token after it, or 1, each mask's row drafts the token at its own position.
    `is_causal`: rows do not see those after them, in layers that see all tokens, and in layers with
    a window."""

    first: int = 1
    is_causal: tuple[bool, bool] = (False, False)


def target_modules(
    target: CausalLM, *, tied_on: Placement | None = None
) -> tuple[Embedding, OutputLinear]:
    """Its embedding and its output layer. tied_on: with an output layer there that has the
    embedding's weight, even if the target is not tied."""
    embed_tokens, lm_head = target.model.embed_tokens, target.lm_head
    if tied_on is not None and lm_head.weight is not embed_tokens.weight:
        weight, rows = embed_tokens.weight, embed_tokens.num_embeddings
        lm_head = OutputLinear(weight.shape[1], rows, placement=tied_on, tied=weight)
    return embed_tokens, lm_head


class HeadRows(NamedTuple):
    """The rows of one step."""

    input_ids: torch.Tensor
    """`[T]`; the token after the one that the row's hidden state was computed from."""
    positions: torch.Tensor
    """`[T]`."""
    hidden: torch.Tensor
    """`[T, H]`, from `fuse` or from the previous step; it is not changed."""


class DraftHead(Module, ABC):
    """A draft network of few layers that reads hidden states of the target. Embedding and output
    layer are the target's, unless it has its own."""

    config: ModelConfig
    borrowed: tuple[Embedding, OutputLinear]
    """The target's. They are not submodules: the head's checkpoint does not fill them, and its
    parameters do not include them."""
    embed_tokens: Embedding | None
    """None: the target's."""
    lm_head: OutputLinear | None
    """None: the target's."""
    draft_to_target: torch.Tensor | None = None
    """`[V_draft]` int64: the target's id of each of the head's tokens; None: the ids are equal."""
    masks: "Masks | None" = None
    """How the head drafts all tokens at once; None: it drafts one after the other."""
    has_keys: ClassVar[bool] = True
    """Whether it writes keys and values of its own; otherwise it reads the target's."""
    block: Block | None = None
    """How it fills in masks; None: mask rows follow what was emitted, or there are none."""
    correction: StepCorrection | None = None
    """What each draft adds to the logits of the next one; None: nothing."""
    confidence: Confidence | None = None
    """How likely each draft is to be accepted; None: as likely as its own logits say."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and activations: the target's."""
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def num_logits(self) -> int:
        """Logits of one row, on all ranks together."""
        ids = self.draft_to_target
        return self.config.vocab_size if ids is None else len(ids)

    @property
    def embedding(self) -> Embedding:
        """The head's own embedding, or the target's."""
        return self.borrowed[0] if self.embed_tokens is None else self.embed_tokens

    @property
    def output(self) -> OutputLinear:
        """The head's own output layer, or the target's."""
        return self.borrowed[1] if self.lm_head is None else self.lm_head

    def keep_tokens(self, tokens: DraftTokens, placement: Placement) -> None:
        """Limits drafts to `tokens`, which are ids of the target. Raises ValueError if the head's
        own tokens are not the target's, or do not divide over the ranks."""
        if self.draft_to_target is not None:
            raise ValueError(
                "speculative_token_map is refused: d2t of the head already says which tokens it "
                "drafts; accepted: null"
            )
        self.lm_head = reduced_output(self.output, tokens.rows, placement)
        if self.correction is not None:
            self.correction.keep_tokens(tokens.rows, placement)
        self.draft_to_target = tokens.ids.to(self.device)

    @abstractmethod
    def forward(self, rows: HeadRows, context: ForwardContext, step: int = 0) -> torch.Tensor:
        """One step.

        Args:
            context: of the head's own KV pool.
            step: 0 reads what the target has read, k what draft k - 1 is, or blocks of k rows.

        Returns:
            `[T, H]`, or `[R, H]` of the rows that the context wants, for `compute_logits` and for
            the next step.
        """

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """Captured states of the target, `[T, n * H_target]`, to `[T, H]`: by default they are read
        as they are. The head's own states are not fused."""
        return captured

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, H]`, as `forward` returns it, to `[R, V_draft]`, or this rank's columns."""
        return self.output.forward(hidden)

    def _add_ends(
        self,
        target: CausalLM,
        owns: Collection[str],
        max_positions: int,
        placement: Placement,
        *,
        rows: int,
        is_tied: bool,
    ) -> None:
        """The rotary table, and the embedding and an output layer of so many rows: the target's, if
        the head does not own them."""
        config, size = self.config, self.config.hidden_size
        self.cos_sin = cos_sin_table(config.rope, config.rope_dim, max_positions, placement)
        self.borrowed = target_modules(target, tied_on=placement if is_tied else None)
        self.embed_tokens, self.lm_head = None, None
        if EMBEDDING in owns:
            self.embed_tokens = Embedding(self.config.vocab_size, size, placement)
        if OUTPUT in owns:
            self.lm_head = OutputLinear(size, rows, placement=placement)
        elif self.embed_tokens is not None and is_tied:
            tied = self.embed_tokens.weight
            self.lm_head = OutputLinear(size, rows, placement=placement, tied=tied)


# Which embedding and output layer a draft head uses: the target's, or tensors of its own
# checkpoint that differ from them.


logger = logging.getLogger(__name__)

ROWS = 1 << 14  # compared at a time


def drop_copies(
    tensors: dict[str, torch.Tensor], source: HeadSource, *, is_tied: bool = False
) -> None:
    """Removes from the tensors of a head the embedding and the output layer of the whole vocabulary
    if they are equal to what the head has without them: the target's, or, for the output layer
    where `is_tied`, its embedding. Those that differ remain and are the head's own; a warning names
    them. All ranks call this together."""
    embedding, output = target_modules(source.target)
    stored = tensors.get(EMBEDDING)
    if OUTPUT in tensors:
        if is_tied and stored is not None:
            is_copy = is_same(tensors[OUTPUT], stored, source.target.dtype)
        else:
            is_copy = _holds(embedding if is_tied else output, tensors[OUTPUT], source)
        if is_copy:
            del tensors[OUTPUT]
    if stored is not None and _holds(embedding, stored, source):
        del tensors[EMBEDDING]
    if EMBEDDING in tensors:
        tensors[EMBEDDING] = tensors[EMBEDDING][: embedding.num_embeddings]  # without padding
    for name in (EMBEDDING, OUTPUT):
        if name in tensors and len(tensors[name]) == embedding.num_embeddings:
            logger.warning(
                "%s: %s differs from the target's; the head uses its own, which takes %.2f GiB",
                source.path,
                name,
                tensors[name].numel() * source.target.dtype.itemsize / 2**30,
            )


def _holds(module: Embedding | OutputLinear, tensor: torch.Tensor, source: HeadSource) -> bool:
    """Whether the ranks' slices of the module's weight are together a tensor of a checkpoint. Rows
    after the shorter of the two are padding or added tokens."""
    size, columns = module.weight.shape
    is_equal = tensor.dim() == 2 and tensor.shape[1] == columns
    if is_equal:
        first = size * source.communicator.mapping.tp_rank
        own = tensor[first : first + size]
        held = module.weight[: len(own)]
        pieces = zip(torch.split(own, ROWS), torch.split(held, ROWS), strict=True)
        is_equal = all(
            torch.equal(stored.to(here.device, here.dtype), here) for stored, here in pieces
        )
    return source.communicator.minimum(int(is_equal)) == 1
