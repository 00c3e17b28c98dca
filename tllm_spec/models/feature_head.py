"""Fills a head on several captured states of the target (EAGLE-3, DFlash) with the tensors of its
checkpoint, or with random numbers."""

from collections.abc import Callable, Collection, Set
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from tllm_spec.models.causal_lm import CausalLM
from tllm_spec.models.draft_head import DraftHead, HeadSource
from tllm_spec.models.eagle3_checkpoint import check_sizes, target_ids
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.head_copies import drop_copies
from tllm_spec.models.module import Placement, specialize_for_cpu
from tllm_spec.models.tied_output import OUTPUT
from tllm_spec.models.weights import fill, fill_random

Config = TypeVar("Config", bound=Eagle3Config, contravariant=True)
Head = TypeVar("Head", bound=DraftHead, covariant=True)


class HeadType(Protocol[Config, Head]):
    """A class of heads. owns: `EMBEDDING` and `OUTPUT`, if they are not the target's."""

    def __call__(
        self,
        config: Config,
        target: CausalLM,
        num_captured: int,
        max_positions: int,
        placement: Placement,
        owns: Collection[str],
    ) -> Head: ...


def fill_head(
    kind: HeadType[Config, Head],
    config: Config,
    source: HeadSource,
    num_captured: int,
    tensors_of: Callable[[Path], dict[str, torch.Tensor]],
) -> Head:
    """A head with this config, which fits the target. Raises ValueError if the checkpoint does
    not fit it."""
    placement = source.placement
    arguments = config, source.target, num_captured, source.max_positions, placement
    if source.load_format == "dummy":
        head = kind(*arguments, config.own_modules)
        _fill_dummy(head, config)
    else:
        tensors = tensors_of(source.path)
        check_sizes(tensors, config, num_captured)
        ids = target_ids(tensors.pop("d2t", None), tensors.pop("t2d", None), config)
        head = kind(*arguments, _own_modules(tensors, ids, config, source))
        head.draft_to_target = None if ids is None else ids.to(head.device)
        fill(
            head,
            tensors.items(),
            f"The checkpoint in {source.path} does not fit its config.json (layers.0 is the layer "
            "that some spell midlayer)",
        )
    specialize_for_cpu(head, placement)
    return head


def _own_modules(
    tensors: dict[str, torch.Tensor],
    ids: torch.Tensor | None,
    config: Eagle3Config,
    source: HeadSource,
) -> Set[str]:
    """The embedding and the output layer if they are not the target's, whose copies are removed
    from `tensors`. With `ids` of its own a head must have an output layer."""
    if ids is not None:
        output = {OUTPUT: tensors.pop(OUTPUT)} if OUTPUT in tensors else {}
        drop_copies(tensors, source)
        tensors |= output
        return tensors.keys() | {OUTPUT}
    drop_copies(tensors, source, is_tied=config.tie_word_embeddings)
    return tensors.keys()


def _fill_dummy(head: DraftHead, config: Eagle3Config) -> None:
    """The ids of a reduced vocabulary are spread evenly over the target's."""
    fill_random(head)
    size, vocab_size = config.output_size, config.vocab_size
    if size < vocab_size:
        head.draft_to_target = torch.arange(size, device=head.device) * vocab_size // size
