"""Which embedding and output layer a draft head uses: the target's, or tensors of its own
checkpoint that differ from them."""

import logging

import torch

from tllm_spec.models.draft_head import HeadSource, target_modules
from tllm_spec.models.head_checkpoint import EMBEDDING
from tllm_spec.models.layers import Embedding
from tllm_spec.models.linear import OutputLinear
from tllm_spec.models.tied_output import OUTPUT, is_same

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
