"""Rounds of requests whose draft trees share rows, without an engine. Trees grow by the kernels'
references from what the drafter says. The first child of a draft has a probability like one of a
chain, and each further child 0.4 of what is left."""

import torch
import torch.nn.functional as F

from benchmarks.harness.scripted_tokens import NOISE, QUANTILES
from benchmarks.harness.simulated_rows import Round, Simulation, Tokens
from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.kernels.drafts.draft_beams import (
    BeamPool,
    DraftTree,
    add_last,
    first_beams,
    grow,
    select,
)
from tllm_spec.kernels.slots.accept import SlotTables, TreeTables
from tllm_spec.kernels.slots.choose_nodes import (
    choose_nodes,
    features_of_tree,
    learn_nodes,
    node_values,
)
from tllm_spec.kernels.slots.choose_rows import DraftValues, best_drafts

FURTHER_SHARE = 0.4  # of the remainder, that the next child is right


class TreeSimulation(Simulation):
    """Where a round's tokens are drawn with the same seed, its trees do not depend on its rows."""

    def _draw(self, tree: DraftShape) -> tuple[DraftTree, torch.Tensor]:
        """Trees whose tokens are the numbers of the candidates, and the candidates' shares."""
        pool = BeamPool.allocate(len(self._slots), tree.topk, tree.depth, torch.device("cpu"))
        said, shares = self._children(1, tree.topk)
        found = [shares]
        tokens = torch.arange(pool.scores.shape[1]).expand(len(self._slots), -1)
        beams = first_beams.reference(pool, said[:, 0], tokens[:, : tree.topk])
        for step in range(1, tree.depth):
            said, shares = self._children(tree.topk, tree.topk)
            found.append(shares)
            own = tokens[:, pool.start(step) : pool.start(step + 1)].view_as(said)
            if step + 1 == tree.depth:
                add_last.reference(pool, step, beams, said, own)
            else:
                beams = grow.reference(pool, step, beams, said, own)
        return select.reference(pool, tree.num_nodes, True), torch.cat(found, 1)

    def _children(self, number: int, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the drafter says of the children of so many nodes of each request, `[B, n, K]`, best
        first, and their shares `[B, n * K, 2]`."""
        batch = len(self._slots)
        index = torch.randint(QUANTILES, (batch, number), generator=self._generator)
        first = self._table.gather(1, index)
        noise = NOISE * torch.randn(first.shape, generator=self._generator)
        true, said = (_with_siblings(p, topk) for p in (first, (first.logit() + noise).sigmoid()))
        said, order = said.sort(dim=2, descending=True, stable=True)
        ends = true.cumsum(2)
        shares = torch.stack((ends - true, ends), 3)
        return said, shares.gather(2, order.unsqueeze(3).expand_as(shares)).flatten(1, 2)

    def _round(self, values: DraftValues, shape: DraftShape) -> Round:
        """`shares` `[B, M, 2]`: where in the unit interval lies the target's choice, if it is the
        candidate."""
        if not shape.depth:
            return super()._round(values, shape)
        drawn, shares = self._draw(shape)
        # The target's choice after each node.
        coins = torch.rand(drawn.parents.shape, generator=self._generator)
        batch, window, number = len(self._slots), shape.window, shape.num_nodes
        num_rows = shape.num_rows(batch)
        values.features[:, :number] = features_of_tree(drawn)
        own = shares.gather(1, drawn.tokens.unsqueeze(2).expand(-1, -1, 2))
        chances = own[:, :, 1] - own[:, :, 0]
        worth = node_values(chances, drawn.parents, shape.depth)
        numbers = torch.full_like(self._slots, number)
        best = best_drafts(worth, numbers, number, num_rows - batch)
        coin = coins.gather(1, drawn.parents[:, 1:])
        is_right = (own[:, :, 0] <= coin) & (coin < own[:, :, 1])
        tables = SlotTables(numbers, F.pad(drawn.tokens, (1, 0)), numbers, numbers)
        room = (0, values.features.shape[1] - number)  # after smaller trees than the largest
        parts = (drawn.parents, drawn.depths, drawn.bits, drawn.parents)
        trees = TreeTables(*(F.pad(each, room, value=-1) for each in parts))
        places = values, tables, trees, self._slots, window, shape.depth, num_rows
        chosen = choose_nodes.reference(*places)
        order = trees.order[:, 1:window] - 1
        is_verified = torch.arange(number) < chosen.num_verified.unsqueeze(1)
        is_open = is_right.gather(1, order) & is_verified
        parents = trees.parents[:, :window]
        accepted = node_values(is_open.float(), parents, shape.depth) > 0
        path = F.pad(accepted * torch.arange(1, window), (1, 0))  # with the root
        learn_nodes.reference(values, trees.parents, chosen.num_verified, self._slots, path)
        reached = float((worth.gather(1, order) * is_verified).sum())
        tokens = Tokens(batch + reached, batch + float((worth * best).sum()))
        return self._played(tokens, accepted.sum(1), chosen, shape)


def _with_siblings(first: torch.Tensor, topk: int) -> torch.Tensor:
    """Probabilities of all children of nodes, `[..., K]`, from those of the first ones."""
    found = [first]
    for _ in range(topk - 1):
        found.append(FURTHER_SHARE * (1 - sum(found)))  # type: ignore[arg-type] # sum of tensors
    return torch.stack(found, -1)
