"""Reads the tensors of a published EAGLE-3 head, renames them to one set of names and checks them
against its config. The module that they fill is not known here."""

from pathlib import Path

import torch

from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.head_checkpoint import head_tensors
from tllm_spec.models.token_map import as_ids, check_ids

# `midlayer` is the name in the paper's code; `aux_norm_*` came before the numbered norms.
_RENAMED = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
# The embedding is the target's, `t2d` is the inverse of `d2t`, the rotary table is computed, and
# the verifier's modules are for training.
_UNUSED = (
    "embed_tokens.weight",
    "t2d",
    "rotary_emb.inv_freq",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)


def eagle3_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The memory-mapped tensors of the head in the folder `path`, as `input_norm.weight`,
    `fc_norm.{i}.weight`, `fc.*`, `layers.{i}.*`, `norm.weight`, `lm_head.weight` and `d2t`.

    Raises:
        ValueError: no checkpoint, a file that is not readable, or two tensors of one name.
    """
    return head_tensors(path, "EAGLE-3", _UNUSED, _RENAMED)


def check_sizes(tensors: dict[str, torch.Tensor], config: Eagle3Config, num_captured: int) -> None:
    """Raises ValueError where the checkpoint contradicts the number of captured layers or the draft
    vocabulary."""
    if "fc.weight" not in tensors:
        raise ValueError(
            "The checkpoint has no fc.weight; EAGLE-3 heads that do not fuse captured states of "
            "the target with it are not served."
        )
    in_features, size = tensors["fc.weight"].shape[-1], config.target_hidden_size
    if in_features != num_captured * size:
        raise ValueError(
            f"fc.weight of the EAGLE-3 head takes {in_features} inputs; {num_captured} captured "
            f"layers of {size} each give {num_captured * size}. Set eagle3_layers_to_capture to as "
            "many layers as the head was trained on."
        )
    rows = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else None
    if rows is not None and config.draft_vocab_size is None:
        raise ValueError(
            f"The EAGLE-3 head has an lm_head.weight of {rows} rows and draft_vocab_size is null, "
            f"which means the target's output layer; set draft_vocab_size to {rows} in the head's "
            "config.json."
        )
    if rows not in (None, config.draft_vocab_size):
        raise ValueError(
            f"lm_head.weight of the EAGLE-3 head has {rows} rows; draft_vocab_size is "
            f"{config.draft_vocab_size}."
        )


def target_ids(offsets: torch.Tensor | None, config: Eagle3Config) -> torch.Tensor | None:
    """`[V_draft]` ids of the target from `d2t`, which holds target id - draft id; None: the ids are
    equal.

    Raises:
        ValueError: `d2t` is missing where it is needed, misshapen, leads out of the target's
        vocabulary, or leads to one token twice.
    """
    size, vocab_size = config.output_size, config.vocab_size
    if offsets is None:
        if size < vocab_size:
            raise ValueError(
                f"The checkpoint has no d2t; draft_vocab_size {size} of vocab_size {vocab_size} "
                "needs one."
            )
        return None
    integers = as_ids(offsets)
    if integers is None or len(integers) != size:
        raise ValueError(
            f"d2t has the shape {list(offsets.shape)} and the type {offsets.dtype}; it must be "
            f"{size} integers."
        )
    own_ids = torch.arange(size)
    ids = own_ids + integers
    check_ids(ids, vocab_size, "d2t of the EAGLE-3 head leads to")
    return None if size == vocab_size and ids.equal(own_ids) else ids
