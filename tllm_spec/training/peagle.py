"""A P-EAGLE head for training, in plain torch, with the tensor names of the speculators format. The
engine has its own implementation for inference.

The head reads what an EAGLE-3 head does (`eagle3.py`), and drafts all tokens in one forward: after
the last pair (hidden states at p, token p+1) come mask rows at positions p+1, p+2, ..., all with
the embedding of the mask token and with `mask_hidden` instead of the target's states. The row at
position i predicts token i+2.

In training such mask rows follow many positions of a text, the anchors. A mask row sees the pairs
up to its anchor, and the mask rows between the two."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.training.eagle3 import NUM_CAPTURED, FeatureHead
from tllm_spec.training.head_layers import Layer, rotary_rows


class Rows(NamedTuple):
    """The rows of one forward over S pairs and the mask rows of A anchors, R in total: first the
    pairs, then the first mask rows after all anchors, then the second ones, and so on."""

    positions: Tensor
    """`[R]`: of the rotary embedding, also of the row's hidden state in the text."""
    sees: Tensor
    """`[R, R]` bool: which rows each row attends to."""
    sizes: list[int]
    """S, then A for each of the mask rows after an anchor."""

    @classmethod
    def of(cls, num_pairs: int, anchors: Tensor, num_masks: int) -> "Rows":
        """anchors `[A]`: positions of pairs that `num_masks` mask rows follow."""
        pairs = torch.arange(num_pairs, device=anchors.device)
        steps = torch.arange(1, num_masks + 1, device=anchors.device)
        steps = steps.repeat_interleave(len(anchors))
        of_masks = anchors.repeat(num_masks)
        chains = torch.arange(len(anchors), device=anchors.device).repeat(num_masks)
        last_pair = torch.cat((pairs, of_masks))
        sees_pairs = pairs <= last_pair.unsqueeze(1)
        own = (chains == chains.unsqueeze(1)) & (steps <= steps.unsqueeze(1))
        sees_masks = torch.cat((own.new_zeros(num_pairs, len(steps)), own))
        return cls(
            torch.cat((pairs, of_masks + steps)),
            torch.cat((sees_pairs, sees_masks), 1),
            [num_pairs, *[len(anchors)] * num_masks],
        )


class MaskedLayer(Layer):
    def forward(self, hidden: Tensor, embeddings: Tensor, cos_sin: Tensor, sees: Tensor) -> Tensor:
        """`[B, R, H]` -> `[B, R, H]`."""
        inputs, residual = self.inputs(hidden, embeddings)
        query, key, value = self.self_attn.project(inputs, cos_sin)
        each = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(each, 1) for heads in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=sees)
        return self.outputs(residual, mixed)


class PEagleHead(FeatureHead):
    """A P-EAGLE head."""

    def __init__(self, shape: Eagle3Config, draft_ids: Tensor) -> None:
        super().__init__(shape, draft_ids)
        self.layers = nn.ModuleList(MaskedLayer(shape, index) for index in range(shape.num_layers))
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, NUM_CAPTURED * shape.hidden_size))

    def forward(
        self, features: Tensor, embeddings: Tensor, mask_embedding: Tensor, rows: Rows
    ) -> Tensor:
        """The rows' states `[B, R, H]`, for `logits`.

        Args:
            features: `[B, S, 3H]` of the target.
            embeddings: `[B, S, H]` of the token after each.
            mask_embedding: `[H]` of the mask token.
            rows: S pairs and their mask rows.
        """
        batch, num_pairs = embeddings.shape[:2]
        num_masks = len(rows.positions) - num_pairs
        masks = self.fuse(self.mask_hidden).expand(batch, num_masks, -1)
        hidden = torch.cat((self.fuse(features), masks), 1)
        embeddings = torch.cat((embeddings, mask_embedding.expand(batch, num_masks, -1)), 1)
        cos_sin = rotary_rows(self.config, rows.positions)
        for layer in self.layers:
            hidden = layer(hidden, embeddings, cos_sin, rows.sees)
        return self.recurrent(hidden)
