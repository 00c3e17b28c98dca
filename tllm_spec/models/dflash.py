"""The DFlash draft head: a few decoder layers that fill in a block of mask tokens at once.

Every layer's keys and values of the text are made of the target's hidden states, once for each
token (`write_context`). The block is the newest token, which the target has not read yet, and mask
tokens; its rows see the text and the whole block. The row at a position drafts the token at that
position. Requests, pages and the drafting loop are not known here."""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.models.causal_lm import CausalLM
from tllm_spec.models.dflash_config import DFlashConfig
from tllm_spec.models.draft_head import BorrowedModules, DraftHead, HeadSource, Masks
from tllm_spec.models.feature_head import fill_head
from tllm_spec.models.head_checkpoint import head_tensors
from tllm_spec.models.layers import RMSNorm
from tllm_spec.models.linear import Linear
from tllm_spec.models.llama import DecoderLayer
from tllm_spec.models.module import Placement
from tllm_spec.models.rotary import cos_sin_table

_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_UNUSED = ("rotary_emb.inv_freq",)


class DFlashHead(DraftHead):
    """Module paths are the checkpoint's names, with q/k/v and gate/up fused."""

    config: DFlashConfig

    def __init__(
        self,
        config: DFlashConfig,
        target: CausalLM,
        num_captured: int,
        max_positions: int,
        placement: Placement,
        owns: Collection[str],
    ) -> None:
        """owns: `EMBEDDING` and `OUTPUT`, if they are not the target's."""
        super().__init__()
        self.config = config
        size, eps, is_tied = config.hidden_size, config.rms_norm_eps, config.tie_word_embeddings
        self.fc = Linear(
            num_captured * config.target_hidden_size, size, bias=False, placement=placement
        )
        self.hidden_norm = RMSNorm(size, eps, placement)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, placement) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(size, eps, placement)
        self.borrowed = BorrowedModules.of(target, tied=is_tied, placement=placement)
        self._add_own(owns, config.output_size, placement, is_tied=is_tied)
        self.cos_sin = cos_sin_table(config.rope, config.head_dim, max_positions, placement)
        self.draft_to_target = None
        assert config.mask_token is not None
        self.masks = Masks(config.mask_token)

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        return self.hidden_norm.forward(self.fc.forward(captured, None))

    def write_context(
        self, positions: torch.Tensor, fused: torch.Tensor, context: ForwardContext
    ) -> None:
        """Writes the keys and values of all layers for tokens at positions `[T]`. fused `[T,
        H]`."""
        rotary = Rotary(self.cos_sin, positions)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.self_attn.write(fused, None, rotary, context)

    def fill_in(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """The states of the block's rows that the context wants, `[R, H]`, for `compute_logits`.
        ids and positions `[T]`: the newest token and mask tokens."""
        rotary = Rotary(self.cos_sin, positions)
        total = self.embedding.forward(input_ids)
        *earlier, last = self.layers
        for layer in earlier:
            total = layer.forward(total, rotary, context)
        wanted: torch.Tensor = last.forward(total, rotary, context, context.wanted)
        return wanted

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.output.forward(hidden, self.norm)


def load_dflash_head(source: HeadSource, config: DFlashConfig, num_captured: int) -> DFlashHead:
    """config: of the head in the folder. num_captured: how many layers of the target are captured
    for `fuse`. Raises ValueError if the checkpoint does not fit the config or the target."""
    config = config.for_target(source.target.config, num_captured)
    return fill_head(DFlashHead, config, source, num_captured, dflash_tensors)


def dflash_tensors(path: Path) -> dict[str, torch.Tensor]:
    return head_tensors(path, "DFlash", _UNUSED, _RENAMED)
