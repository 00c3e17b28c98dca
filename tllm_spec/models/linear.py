"""Linear layers of one tensor-parallel rank, and the checkpoint tensors that are fused in them.

They know their place in the mapping; they do not talk to other ranks and read no files.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tllm_spec.models.module import Module, Placement, WeightSlot, sibling


class Linear(Module):
    """`y = x W^T + b`."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, placement: Placement) -> None:
        super().__init__()
        self.mapping = placement.mapping
        if placement.device.type == "cpu" and out_features >= in_features:
            weight = nn.Parameter(placement.parameter(in_features, out_features).t(), requires_grad=False)
        else:
            weight = placement.parameter(out_features, in_features)
        self.weight = weight
        self.bias = placement.parameter(out_features) if bias else None
        self.packed: torch.Tensor | None = None
        self.plain_rows = 1

    def pack(self) -> None:
        if self.weight.device.type=="cpu":
            w = self.weight.detach().contiguous()
            self.packed = torch.ops.mkldnn._reorder_linear_weight(w, 8)
            #if w is self.weight: self.plain_rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None and x.shape[0] > self.plain_rows:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class ColumnLinear(Linear):
    """Each rank has a run of the outputs. `parts` are the checkpoint tensors fused along them, with their full sizes."""

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool, placement: Placement) -> None:
        local = {name: placement.mapping.shard(size, f"the output of {name}") for name, size in parts.items()}
        super().__init__(in_features, sum(local.values()), bias=bias, placement=placement)
        self.parts = local

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        first = 0
        for name, size in self.parts.items():
            for kind, parameter in self.named_parameters():
                rows = parameter[first : first + size]
                shape = (size * self.mapping.tp_size, *rows.shape[1:])
                yield f"{sibling(path, name)}.{kind}", WeightSlot(rows, shape, 0, size * self.mapping.tp_rank)
            first += size


class RowLinear(Linear):
    """Each rank has a run of the inputs. The ranks' outputs are to be summed, so the first alone adds the bias."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, placement: Placement) -> None:
        local = placement.mapping.shard(in_features, "the input of a row-parallel layer")
        super().__init__(local, out_features, bias=bias, placement=placement)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        out_features, local = self.weight.shape
        shape = (out_features, local * self.mapping.tp_size)
        yield f"{path}.weight", WeightSlot(self.weight, shape, 1, local * self.mapping.tp_rank)
        if self.bias is not None:
            yield f"{path}.bias", WeightSlot(self.bias, (out_features,))
