"""Rules of acceptance other than equality with the target's choice: rejection sampling of chains
and trees, relaxed acceptance, and scripted rates."""

from itertools import accumulate

import torch

from tllm_spec.config.speculative_base import RelaxedRule
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.row_group import RowGroup, SamplingState
from tllm_spec.kernels.sampling.choose_token import choose_best
from tllm_spec.kernels.sampling.gumbel import COIN_DOMAIN, RESIDUAL_DOMAIN, gumbel_noise, uniform
from tllm_spec.kernels.slots.accept import Accepted, SyntheticRates, descend

# Classical speculative sampling: accept a draft with probability min(1, p / q), otherwise draw
# from the normalised (p - q)+.
#
# Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm
# 1. It is lossless in distribution. Unlike with the default rule, the text for a seed depends on
# the drafter.


def reject_chain(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> Accepted:
    """What N requests emit, of chains.

    target_probs `[N, K+1, V]`. draft_probs `[N, K, V]`: the distributions that drafts `[N, K]` were
    drawn from; None: each draft was certain. num_drafts `[N]`: proposed drafts, the rest is
    padding; None: all. seeds `[N]`; positions `[N, K+1]`."""
    num, length = drafts.shape
    accepted = torch.zeros(num, dtype=torch.int64, device=drafts.device)
    if length:
        p = target_probs[:, :length].gather(2, drafts.unsqueeze(2)).squeeze(2)
        q = 1.0 if draft_probs is None else draft_probs.gather(2, drafts.unsqueeze(2)).squeeze(2)
        coins = uniform(
            seeds.repeat_interleave(length), positions[:, :length].flatten(), COIN_DOMAIN
        )
        wins = coins.view(num, length) * q < p
        if num_drafts is not None:
            wins &= torch.arange(length, device=drafts.device) < num_drafts.unsqueeze(1)
        accepted = wins.cumprod(dim=1).sum(dim=1)
    final = target_probs.gather(
        1, accepted.view(-1, 1, 1).expand(-1, 1, target_probs.shape[2])
    ).squeeze(1)
    if length:
        was_rejected = accepted < (length if num_drafts is None else num_drafts)
        proposal = _proposal_at(accepted, draft_probs, drafts, final)
        rest = (final - proposal).clamp_min(0)
        final = torch.where(was_rejected.unsqueeze(1), rest, final)
    position = positions.gather(1, accepted.unsqueeze(1)).squeeze(1)
    last = choose_best(final.log() + gumbel_noise(seeds, position, final.shape[1], RESIDUAL_DOMAIN))
    tokens = torch.cat((drafts, last.unsqueeze(1)), dim=1).scatter_(
        1, accepted.unsqueeze(1), last.unsqueeze(1)
    )
    return Accepted(tokens, accepted + 1)


def _proposal_at(
    accepted: torch.Tensor,
    draft_probs: torch.Tensor | None,
    drafts: torch.Tensor,
    like: torch.Tensor,
) -> torch.Tensor:
    """The draft distribution at the first rejected position, `[N, V]`; undefined where nothing was
    rejected."""
    index = accepted.clamp_max(drafts.shape[1] - 1).unsqueeze(1)
    if draft_probs is None:
        return torch.zeros_like(like).scatter_(1, drafts.gather(1, index), 1.0)
    return draft_probs.gather(1, index.unsqueeze(2).expand(-1, -1, draft_probs.shape[2])).squeeze(1)


# Rejection sampling on a tree of drafts by the target's probabilities alone, as SGLang's, which is
# another rule than that of chains: it asks for no distribution that drafts were drawn from. At each
# node the children are tried in order with one coin, each with its probability; if none is taken,
# the token is drawn from the rest of the distribution.
#
# The k-th child is taken with exactly its probability p, and what remains is p without the
# children, so the rule is lossless in distribution for any tree, if both thresholds are 1. Lower
# thresholds accept more and are lossy.


_MIN_THRESHOLD = 1e-9


def reject_tree(
    probs: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    depth: int,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> Accepted:
    """What B requests emit. `accept_path` describes tokens, parents, which are -1 for padding, too,
    and depth.

    probs `[B, W, V]`: the target's distribution after each node; depths `[B, W]`: drafts on the
    path to it. seeds `[B]`; positions `[B]`: of the token after the root. A position's coin and
    noise are keyed by (seed, position): a path has one node at each.

    A child is taken if the coin is below the probabilities of it and the children tried before,
    divided by `threshold_acc`, or if its own probability is at least `threshold_single` (both 0 to
    1). If a probability is NaN, no child is taken and -1 is emitted."""
    batch, width = tokens.shape
    nodes = torch.arange(width, device=tokens.device)
    own = _own_probs(probs, tokens, parents)
    # A sibling tried before, or the node itself: [B, W, W].
    tried = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (nodes <= nodes.unsqueeze(1))
    running = (tried * own.unsqueeze(1)).sum(dim=2)
    steps = torch.arange(depth + 1, device=tokens.device)
    coins = uniform(
        seeds.repeat_interleave(depth + 1), (positions.unsqueeze(1) + steps).flatten(), COIN_DOMAIN
    ).view(batch, depth + 1)
    coin = coins.gather(1, (depths - 1).clamp(0, depth))
    is_open = coin < running / max(threshold_acc, _MIN_THRESHOLD)
    is_open |= own >= threshold_single
    rows, lens = descend(is_open & (own > 0), parents, depth)
    last_row = rows[:, -1:]
    final = _without_children(probs, tokens, own, parents == last_row, last_row)
    noise = gumbel_noise(seeds, positions + lens - 1, final.shape[1], RESIDUAL_DOMAIN)
    last = choose_best(final.log() + noise).unsqueeze(1)
    drafts = torch.cat((tokens.gather(1, rows[:, 1:]), last), dim=1)
    tokens = torch.where(steps < lens.unsqueeze(1) - 1, drafts, last)
    return Accepted(tokens, lens, rows)


def _own_probs(probs: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """The probability of each node's token after its parent, `[B, W]` float64. 0 for the root,
    padding, and nodes whose token an earlier sibling has: that token was tried already."""
    batch, width, vocab_size = probs.shape
    nodes = torch.arange(width, device=tokens.device)
    flat = parents.clamp_min(0) * vocab_size + tokens
    own = probs.reshape(batch, width * vocab_size).gather(1, flat).double()
    equal = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (
        flat.unsqueeze(2) == flat.unsqueeze(1)
    )
    is_draft = (parents >= 0) & ~(equal & (nodes < nodes.unsqueeze(1))).any(dim=2)
    return torch.where(is_draft, own, 0.0)


def _without_children(
    probs: torch.Tensor,
    tokens: torch.Tensor,
    own: torch.Tensor,
    is_child: torch.Tensor,
    row: torch.Tensor,
) -> torch.Tensor:
    """What remains of a row's distribution `[B, V]` after its children were tried. Where rounding
    leaves nothing, the whole distribution."""
    final = probs.gather(1, row.unsqueeze(2).expand(-1, 1, probs.shape[2])).squeeze(1)
    was_tried = torch.zeros_like(final).scatter_add_(
        1, tokens, (is_child & (own > 0)).to(final.dtype)
    )
    rest = torch.where(was_tried > 0, 0.0, final)
    return torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, final)


# Relaxed acceptance (TensorRT-LLM): while a greedy request thinks, a draft is accepted if it is
# among the target's best tokens, and not much less likely than the best. It is lossy.
#
# Whether a request thinks is kept per slot on the device, so that a CUDA graph can hold it.


class RelaxedAcceptance:
    """`is_thinking` `[S]` bool: whether a slot's tokens, the bonus token included, end between the
    rule's two tokens."""

    def __init__(self, rule: RelaxedRule, slots: SlotState, state: SamplingState) -> None:
        """Raises ValueError if the vocabulary does not have the rule's tokens."""
        for name, token in (("begin", rule.begin_token), ("end", rule.end_token)):
            if not 0 <= token < state.vocab_size:
                raise ValueError(
                    f"{name}_thinking_phase_token = {token} is not in the vocabulary of the model, "
                    f"0 to {state.vocab_size - 1}"
                )
        self._rule, self._slots, self._state = rule, slots, state
        self.is_thinking = torch.zeros(len(slots.kv_lens), dtype=torch.bool, device=slots.device)

    def start(self, request: LlmRequest) -> None:
        """Called when the request gets a slot (again after a preemption)."""
        ends = self._rule.begin_token, self._rule.end_token
        last = next((token for token in reversed(request.tokens) if token in ends), None)
        self.is_thinking[request.slot].fill_(last == self._rule.begin_token)

    def relax(self, group: RowGroup, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The target's tokens `[N, W]` of a group's windows, with each draft that the rule accepts
        instead of the target's token. logits `[T, V]`: what the tokens were chosen from."""
        slots, width = group.slots, targets.shape[1]
        if width == 1:
            return targets
        window = self._slots.window.index_select(0, slots)[:, :width]
        num_drafts = self._slots.num_drafts.index_select(0, slots).unsqueeze(1)
        may_relax = phases(self.is_thinking.index_select(0, slots), window, self._rule)[:, :-1]
        may_relax &= torch.arange(width - 1, device=slots.device) < num_drafts
        if group.sampled is not None:
            may_relax &= self._state.gather(slots).column("temperature") == 0
        drafts = window[:, 1:]
        rows = group.rows.padded(logits)[:, :-1]
        accepted = may_relax & is_close(rows, drafts, self._rule)
        return torch.cat((torch.where(accepted, drafts, targets[:, :-1]), targets[:, -1:]), dim=1)

    def note(self, slots: torch.Tensor, tokens: torch.Tensor, lens: torch.Tensor) -> None:
        """Slots `[N]` have emitted the first `lens` `[N]` of tokens `[N, W]`."""
        after = phases(self.is_thinking.index_select(0, slots), tokens, self._rule)
        self.is_thinking[slots] = after.gather(1, lens.unsqueeze(1) - 1).squeeze(1)


def phases(before: torch.Tensor, tokens: torch.Tensor, rule: RelaxedRule) -> torch.Tensor:
    """Whether a request thinks after each of the tokens `[N, W]`: `[N, W]` bool. before `[N]`: the
    phase before them."""
    begins = tokens == rule.begin_token
    numbers = torch.arange(1, 1 + tokens.shape[1], device=tokens.device)
    last = (numbers * (begins | (tokens == rule.end_token))).cummax(dim=1).values
    return torch.where(last > 0, begins.gather(1, (last - 1).clamp_min(0)), before.unsqueeze(1))


def is_close(logits: torch.Tensor, tokens: torch.Tensor, rule: RelaxedRule) -> torch.Tensor:
    """Whether tokens `[N, K]` are among the `top_k` best of logits `[N, K, V]` (equal ones
    included), and their log probabilities at most `delta` below the best one's."""
    own = logits.gather(2, tokens.unsqueeze(2))
    rank = (logits > own).sum(dim=2)
    # Differences of logits are those of log probabilities.
    gap = logits.amax(dim=2).float() - own.squeeze(2).float()
    return (rank < rule.top_k) & (gap <= rule.delta)


# Synthetic acceptance for benchmarks: drafts are accepted by chance, whatever the tokens.


# Rates of chains are by draft, rates of trees by depth for every rank of a child.
Rates = tuple[float, ...] | tuple[tuple[float, ...], ...]


def synthetic_acceptance(rates: Rates | None, seeds: torch.Tensor) -> SyntheticRates | None:
    """The rates on the device. seeds `[S]`: of the slots."""
    if rates is None:
        return None
    by_depth, before = list[tuple[float, ...]](), 1.0
    for row in rates:
        if isinstance(row, tuple):
            by_depth.append(row)
        else:  # of a chain: given the drafts before, of which there is one child each
            by_depth.append((row / before if before else 0.0,))
            before = row
    width = max(map(len, by_depth))
    bounds = [list(accumulate((*row, *[0.0] * (width - len(row))))) for row in by_depth]
    return SyntheticRates(torch.tensor(bounds, dtype=torch.float64, device=seeds.device), seeds)
