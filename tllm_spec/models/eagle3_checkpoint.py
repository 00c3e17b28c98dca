"""Reads the tensors of a published EAGLE-3 head, renames them to one set of names and checks them
against its config. The module that they fill is not known here."""

from pathlib import Path

import torch

from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.head_checkpoint import EMBEDDING, head_tensors
from tllm_spec.models.tied_output import OUTPUT
from tllm_spec.models.token_map import as_ids, check_ids

# `midlayer` is the name in the paper's code; `aux_norm_*` came before the numbered norms.
_RENAMED = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
# The rotary table is computed, and the verifier's modules are for training.
_UNUSED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


def eagle3_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The memory-mapped tensors of the head in the folder `path`, as `input_norm.weight`,
    `fc_norm.{i}.weight`, `fc.*`, `layers.{i}.*`, `norm.weight`, `embed_tokens.weight`,
    `lm_head.weight`, `d2t` and `t2d`.

    Raises:
        ValueError: no checkpoint, a file that is not readable, or two tensors of one name.
    """
    return head_tensors(path, "EAGLE-3", _UNUSED, _RENAMED)


def check_sizes(tensors: dict[str, torch.Tensor], config: Eagle3Config, num_captured: int) -> None:
    """Raises ValueError where the checkpoint contradicts the number of captured layers or the draft
    vocabulary, or lacks an embedding or an output layer that cannot be the target's."""
    if "fc.weight" not in tensors:
        raise ValueError(
            f"The checkpoint has no fc.weight; {config.kind} heads that do not fuse captured "
            "states of the target with it are not served."
        )
    in_features, size = tensors["fc.weight"].shape[-1], config.target_hidden_size
    if in_features != num_captured * size:
        raise ValueError(
            f"fc.weight of the {config.kind} head takes {in_features} inputs; {num_captured} "
            f"captured layers of {size} each give {num_captured * size}. Set "
            "eagle3_layers_to_capture (of DFlash: target_layer_ids) to as many layers as the head "
            "was trained on."
        )
    _check_own_modules(tensors, config)
    rows = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else None
    if rows not in (None, config.vocab_size) and config.draft_vocab_size is None:
        raise ValueError(
            f"The {config.kind} head has an lm_head.weight of {rows} rows and draft_vocab_size is "
            "null, which means the target's output layer; set draft_vocab_size to "
            f"{rows} in the head's config.json."
        )
    if rows not in (None, config.output_size):
        raise ValueError(
            f"lm_head.weight of the {config.kind} head has {rows} rows; draft_vocab_size is "
            f"{config.draft_vocab_size}."
        )


def _check_own_modules(tensors: dict[str, torch.Tensor], config: Eagle3Config) -> None:
    """See `check_sizes`."""
    is_tied = config.tie_word_embeddings
    needed = [EMBEDDING, *([] if is_tied else [OUTPUT])] if config.has_own_width else []
    if lacking := [name for name in needed if name not in tensors]:
        raise ValueError(
            f"hidden_size of the {config.kind} head is {config.hidden_size}, the target's is "
            f"{config.target_hidden_size}; such a head needs its own {' and '.join(lacking)}, "
            "which its checkpoint lacks."
        )
    if is_tied and config.output_size < config.vocab_size and OUTPUT not in tensors:
        raise ValueError(
            f"tie_word_embeddings is true and draft_vocab_size is {config.draft_vocab_size}; the "
            f"embeddings of all {config.vocab_size} tokens cannot be the output layer of fewer, "
            f"and the checkpoint has no {OUTPUT}."
        )


def target_ids(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, config: Eagle3Config
) -> torch.Tensor | None:
    """`[V_draft]` ids of the target; None: they are the draft's.

    `d2t` holds target id - draft id. Some heads have the target ids themselves there: so it is read
    where `t2d` `[V]`, which marks the ids, says so. A `t2d` that does not mark V_draft ids says
    nothing.

    Raises:
        ValueError: `d2t` is missing where it is needed, misshapen, leads out of the target's
        vocabulary, to one token twice, or to other tokens than `t2d`.
    """
    size, vocab_size = config.output_size, config.vocab_size
    if d2t is None:
        if size < vocab_size:
            raise ValueError(
                f"The checkpoint has no d2t; draft_vocab_size {size} of vocab_size {vocab_size} "
                "needs one."
            )
        return None
    integers = as_ids(d2t)
    if integers is None or len(integers) != size:
        raise ValueError(
            f"d2t has the shape {list(d2t.shape)} and the type {d2t.dtype}; it must be "
            f"{size} integers."
        )
    own_ids = torch.arange(size)
    ids = own_ids + integers
    marked = torch.empty(0) if t2d is None else t2d.flatten().nonzero().flatten()
    is_marked = len(marked) == size
    if is_marked and not _are(ids, marked) and _are(integers, marked):
        ids = integers
    check_ids(ids, vocab_size, f"d2t of the {config.kind} head leads to")
    if is_marked and not _are(ids, marked):
        raise ValueError(
            f"d2t of the {config.kind} head leads to other tokens than its t2d marks, read as "
            "offsets and as ids of the target."
        )
    return None if size == vocab_size and ids.equal(own_ids) else ids


def _are(ids: torch.Tensor, marked: torch.Tensor) -> bool:
    return ids.sort().values.equal(marked)
