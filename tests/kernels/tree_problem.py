"""Random draft trees for the tests of attention: bits of rows, and the paths they stand for."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.kernels.row_counts import ragged_rows
from tests.kernels.window_problem import Case, Problem
from tllm_spec.kernels.attention.visible_keys import KeySpans, TreeMask


def random_paths(num_keys: int, generator: torch.Generator) -> list[list[int]]:
    """Each key of a tree's region with its ancestors, in order. A key's parent is a
    random earlier key, or the token before the region."""
    paths: list[list[int]] = []
    for key in range(num_keys):
        parent = int(torch.randint(-1, key, (1,), generator=generator)) if key else -1
        paths.append([*(paths[parent] if parent >= 0 else []), key])
    return paths


def bits_of(paths: list[list[int]]) -> list[int]:
    """One int64 for each path."""
    values = [sum(1 << key for key in path) for path in paths]
    return [value - (1 << 64) if value >> 63 else value for value in values]


class TreeProblem(Problem):
    """The window's rows are the last nodes of a random tree of `offset` more keys, another one for
    each request."""

    def __init__(self, case: Case, offset: int, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(case, device, seed)
        length, window = offset + case.window, case.window
        number = len(case.kv_lens) + len(case.padding)
        self.paths = [random_paths(length, self.generator)[-window:] for _ in range(number)]
        bits = torch.tensor([bits_of(paths) for paths in self.paths], device=device)
        tree, spans = TreeMask(bits, length), self.tables.spans
        if spans is not None:
            lens = torch.tensor([[len(path) for path in paths] for paths in self.paths])
            first = self.tables.kv_lens[:, None].to(torch.int64) - length
            spans = KeySpans(spans.span, (first + lens.to(device) - 1).clamp_min(0).flatten())
            tree = spans.cut(tree)
        self.tables = replace(self.tables, tree=tree, spans=spans)

    def keep_first(self, counts: Sequence[int]) -> None:
        """The trees have only so many nodes, the first ones. `qkv` is `[1, T, ...]` from now on."""
        window, (tree, spans) = self.case.window, (self.tables.tree, self.tables.spans)
        device, rows = self.qkv.device, ragged_rows(counts, window, str(self.qkv.device))
        assert tree is not None
        index = rows.flat(torch.arange(len(counts) * window, device=device).view(-1, window))
        self.qkv, self.cos_sin = self.qkv.flatten(0, 1)[index][None], self.cos_sin[index]
        if spans is not None:
            spans = KeySpans(spans.span, spans.positions[index])
        self.tables = replace(
            self.tables,
            rows=rows,
            kv_lens=self.tables.kv_lens - window + rows.counts,
            kv_slots=self.tables.kv_slots[index],
            tree=tree.of(rows),
            spans=spans,
        )

    def inputs(self) -> tuple[torch.Tensor, ...]:
        assert self.tables.tree is not None
        return *super().inputs(), self.tables.tree.bits

    def expected(self) -> torch.Tensor:
        """Plain attention of each row over the tokens before the region and the row's path,
        `[B, W, Hq * D]` float64."""
        assert self.tables.tree is not None
        results = []
        for request, (keys, values) in enumerate(self.kv):
            first = len(keys) - self.tables.tree.length
            for row, path in enumerate(self.paths[request]):
                low = self.case.first_key(first + len(path) - 1)
                path = path[max(0, low - first) :]
                seen = [*range(low, first), *(first + key for key in path)]
                for head, query in enumerate(self.qkv[request, row, : self.num_heads].cpu()):
                    kv_head = head // self.case.group
                    scores = self.scale * keys[seen, kv_head] @ query.double()
                    results.append(self.weights(scores, head) @ values[seen, kv_head])
        return torch.stack(results).view(len(self.kv), self.case.window, -1)
