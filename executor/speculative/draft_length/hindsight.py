"""How many copied drafts texts would have had accepted, without drafting any.

A draft is accepted when it is the token that the target chooses, whoever drafted it. So the tokens
that came out say what copies of earlier text would have brought: the text as it was some tokens ago
is searched as the device does it (`match_suffixes`), and what followed the match is compared with
what followed in the text. The host has the texts, so the device has nothing to do, and no round
has to try copied drafts only to learn what they are worth."""

from array import array
from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np
import numpy.typing as npt

from tllm_spec.config.speculative_base import DecodingBaseConfig
from tllm_spec.config.text_search import TextSearch
from tllm_spec.executor.request import LlmRequest, RequestState

TOKENS_A_ROUND = 1024  # of texts that are read, on average, in about 30 us
MAX_PLACES = 256  # where the last token was before, that are compared; a text may have one token


class Hindsight:
    """Measures one request's text at a time. depths: drafts of a round at most, by tier. min_match:
    drafts are copied from matches of so many tokens or more."""

    def __init__(self, search: TextSearch, depths: Mapping[int, int], min_match: int = 1) -> None:
        self._search, self._depths, self._min_match = search, depths, min_match
        self._deepest = max(depths.values())
        self._unread = self._next = 0

    def measure(self, requests: Sequence[LlmRequest]) -> dict[int, float]:
        """Called once a round, after its tokens were read. Returns `ObservedRound.hindsight`; empty
        where the request shows nothing, or has too many tokens to read in this round."""
        self._next += 1
        request = requests[self._next % len(requests)]
        is_running = request.state is RequestState.GENERATION and request.draft_limit > 0
        if not is_running or request.num_output_tokens <= self._deepest:
            return {}
        self._unread = min(self._unread + TOKENS_A_ROUND, max(request.num_tokens, TOKENS_A_ROUND))
        if self._unread < request.num_tokens:
            self._next -= 1  # it stays this request's turn: long texts count as much as short ones
            return {}
        self._unread -= request.num_tokens
        # The token may be anywhere in its run. Of the run and the token that ends it, as many
        # rounds begin as it takes windows.
        run = self._run(np.frombuffer(array("i", request.tokens), dtype=np.intc))
        return {tier: ceil(run / (1 + depth)) / run for tier, depth in self._depths.items()}

    def _run(self, text: npt.NDArray[np.intc]) -> int:
        """Tokens of the run of copied ones around the last token but `_deepest`: those of its
        match, of which the first was not drafted, and those after it that a copy would have had
        right; 1: it is not copied from."""
        end, back = len(text) - 1 - self._deepest, np.arange(self._search.max_match)
        places = np.flatnonzero(text[:end] == text[end])
        places = places[:MAX_PLACES] if self._search.oldest else places[-MAX_PLACES:]
        if not len(places):
            return 1
        before = places[:, None] - back
        differs = (before < 0) | (text[before.clip(0)] != text[(end - back).clip(0)])
        lengths = np.where(differs.any(axis=1), differs.argmax(axis=1), len(back))
        length = int(lengths.max())
        if length < self._min_match:
            return 1
        places = places[lengths == length]
        first = int(places[0 if self._search.oldest else -1]) + 1
        # A match that overlaps the end is continued by the drafts themselves.
        drafts = text[first + np.arange(self._deepest) % (end + 1 - first)]
        wrong = np.flatnonzero(drafts != text[end + 1 :])
        return length + (int(wrong[0]) if len(wrong) else self._deepest)


def hindsight_of(spec: DecodingBaseConfig | None, tiers: Sequence[int]) -> Hindsight | None:
    """Returns None where nothing compares copied drafts with others, texts of other requests are
    searched, too, or drafts are accepted by chance. tiers: of all rounds."""
    search = None if spec is None else spec.text_search(1)
    if spec is None or search is None or search.num_shared or search.corpus is not None:
        return None
    if spec.adaptive is None or not spec.adaptive.is_cost_model:
        return None
    shapes, sa_config = spec.shapes, getattr(spec, "sa_config", None)
    copies = [shapes.copied_tier] if sa_config is not None else [*tiers]
    depths = {
        tier: shapes.of(tier).depth
        for tier in copies
        if tier in tiers and tier and not shapes.of(tier).is_tree
    }
    if not depths or spec.synthetic_acceptance_rates is not None:
        return None
    return Hindsight(search, depths, (sa_config and sa_config.threshold) or 1)
