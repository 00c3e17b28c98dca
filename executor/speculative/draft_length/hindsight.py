"""How many copied drafts texts would have had accepted, without drafting any.

A draft is accepted when it is the token that the target chooses, whoever drafted it. So the tokens
that came out say what copies of earlier text would have brought: the text as it was some tokens ago
is searched as the device does it (`match_suffixes`), and what followed the match is compared with
what followed in the text. The host has the texts, so the device has nothing to do, and no round
has to try copied drafts only to learn what they are worth."""

from array import array
from collections.abc import Sequence
from math import ceil

import numpy as np
import numpy.typing as npt

from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.config.speculative_base import DecodingBaseConfig
from tllm_spec.config.text_search import TextSearch
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.speculative.draft_length.decisions import LookBack

TOKENS_A_ROUND = 1024  # of texts, that are read on average, in about 30 us


class Hindsight:
    """Looks back at one request's text at a time. depth: drafts of a round, at most. min_match: a
    shorter match is not copied from."""

    def __init__(
        self, search: TextSearch, depth: int, tier: int | None = None, min_match: int = 1
    ) -> None:
        self._search, self._depth, self._tier, self._min_match = search, depth, tier, min_match
        self._unread = self._next = 0

    def look(self, requests: Sequence[LlmRequest]) -> LookBack | None:
        """Called once a round, after its tokens were read. None: nothing to see, or it would be
        too much to read in this round."""
        self._next += 1
        request = requests[self._next % len(requests)]
        is_running = request.state is RequestState.GENERATION and request.draft_limit > 0
        if not is_running or request.num_output_tokens <= self._depth:
            return None
        self._unread = min(self._unread + TOKENS_A_ROUND, max(request.num_tokens, TOKENS_A_ROUND))
        if self._unread < request.num_tokens:
            return None
        self._unread -= request.num_tokens
        text = np.frombuffer(array("i", request.tokens), dtype=np.intc)
        return LookBack(1 / self._tokens_a_round(*self._run(text)), self._tier)

    def _run(self, text: npt.NDArray[np.intc]) -> tuple[int, int]:
        """Tokens of the match of the text without its last `depth` tokens, and how many of these
        are what followed the match; 0, 0: it is not copied from."""
        end, back = len(text) - 1 - self._depth, np.arange(self._search.max_match)
        places = np.flatnonzero(text[:end] == text[end])
        if not len(places):
            return 0, 0
        before = places[:, None] - back
        differs = (before < 0) | (text[before.clip(0)] != text[(end - back).clip(0)])
        lengths = np.where(differs.any(axis=1), differs.argmax(axis=1), len(back))
        length = int(lengths.max())
        if length < self._min_match:
            return 0, 0
        places = places[lengths == length]
        first = int(places[0 if self._search.oldest else -1]) + 1
        # A match that overlaps the end is continued by the drafts themselves.
        drafts = text[first + np.arange(self._depth) % (end + 1 - first)]
        wrong = np.flatnonzero(drafts != text[end + 1 :])
        return length, int(wrong[0]) if len(wrong) else self._depth

    def _tokens_a_round(self, length: int, num_right: int) -> float:
        """The token may be anywhere in a run of tokens that are copied: `length` before, of which
        the first was not drafted, and `num_right` after. Of the run and the token that ends it, as
        many rounds begin as it takes windows."""
        run = max(length, 1) + num_right
        return run / ceil(run / (1 + self._depth))


def hindsight_of(
    spec: DecodingBaseConfig | None, shapes: DraftShapes, max_batch_size: int
) -> Hindsight | None:
    """None where nothing compares copied drafts with others, texts of other requests are searched,
    too, or drafts are accepted by chance."""
    search = None if spec is None else spec.text_search(max_batch_size)
    if spec is None or search is None or search.num_shared or search.corpus is not None:
        return None
    if spec.adaptive is None or not spec.adaptive.is_cost_model:
        return None
    if spec.synthetic_acceptance_rates is not None:
        return None
    sa_config, tier = getattr(spec, "sa_config", None), shapes.copied_tier
    if sa_config is not None and tier is None:
        return None
    min_match = sa_config.threshold or 1 if sa_config is not None else 1
    depth = shapes.longest.depth if tier is None else shapes.of(tier).depth
    return Hindsight(search, depth, tier, min_match)
