"""Where a request's text stands in its grammar."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tllm_spec.request_errors import SLOW_GRAMMAR, GrammarTooSlow

if TYPE_CHECKING:
    from torch import Tensor

# For a window's masks. `GrammarWork` gives up much earlier, and this ends what it has given up.
MAX_TREE_SECONDS = 10.0


class GrammarState:
    """Advances with emitted tokens only, so nothing is ever taken back. `matcher`: xgrammar's, of
    the grammar `compiled`. `encode`: the tokenizer's; None: there are no drafts of forced text.
    `refuse`: other requests with this grammar are refused from now on, for the reason given.
    After the grammar's end (a stop token that did not end the text) every token is allowed."""

    def __init__(
        self,
        matcher: Any,
        compiled: Any = None,
        encode: Callable[[str], list[int]] | None = None,
        refuse: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._matcher = matcher
        self._encode = encode
        self._end_ids = frozenset(matcher.stop_token_ids)
        self.compiled = compiled
        self.refuse = refuse
        self._num_read = 0  # output tokens

    def read(self, tokens: list[int], prompt_len: int) -> None:
        """tokens: the prompt's and all emitted ones."""
        new = tokens[prompt_len + self._num_read :]
        self._num_read += len(new)
        for token in new:
            if self._matcher.is_terminated():
                return
            is_allowed = self._matcher.accept_token(token)
            assert is_allowed, "a token was emitted that the grammar's mask excludes"

    def fill(self, nodes: DraftNodes, bitmask: Tensor) -> None:
        """Writes the tokens that may follow each node. bitmask `[W, ceil(V / 32)]` int32, all ones:
        bit i of a row's words stands for token i. After a draft that ends the grammar the text is
        free. Rows after a draft that the grammar excludes have any mask: no text comes there."""
        if self._matcher.is_terminated():
            return
        if len(nodes.tokens) == 1:
            self._matcher.fill_next_token_bitmask(bitmask)
            return
        is_done = self._matcher.traverse_draft_tree(
            nodes.first_child,
            nodes.next_sibling,
            nodes.tokens,
            bitmask[: len(nodes.tokens)],
            MAX_TREE_SECONDS,
        )
        if not is_done:
            raise GrammarTooSlow(SLOW_GRAMMAR)
        # xgrammar allows no token after the grammar's end.
        for node, token in enumerate(nodes.tokens.tolist()):
            if node and token in self._end_ids:
                bitmask[node] = -1

    def has_ended(self, tokens: list[int], prompt_len: int) -> bool:
        """Whether the text, which no token can follow, is whole and the vocabulary has no end token
        to say so. As `read`."""
        self.read(tokens, prompt_len)
        return not self._end_ids and bool(self._matcher.is_completed())

    def better_drafts(self, drafts: list[int], max_drafts: int) -> list[int]:
        """The drafts up to the first one that the grammar excludes, or as tokens the text that the
        grammar forces next, if these are more (jump-forward). The target chooses among all tokens
        that spell the text, so they may be rejected, too."""
        if self._matcher.is_terminated():
            return drafts
        drafts = self._allowed(drafts)
        text = self._forced_text() if self._encode is not None else ""
        if not text:
            return drafts
        assert self._encode is not None
        forced = self._allowed(self._encode(text)[:max_drafts])
        return forced if len(forced) > len(drafts) else drafts

    def _forced_text(self) -> str:
        """What the grammar forces next, as far as it is whole characters."""
        try:
            text: str = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError as error:  # the forced bytes end or begin inside a character
            return error.object[: error.start].decode()
        return text

    def _allowed(self, tokens: list[int]) -> list[int]:
        """Those before the first one that cannot come there."""
        ahead = self._matcher.fork()
        for number, token in enumerate(tokens):
            if ahead.is_terminated():
                break  # the text after it is free
            if not ahead.accept_token(token):
                return tokens[:number]
        return tokens


class DraftNodes:
    """A window's tokens as a tree, on the host: tokens `[W]` (the root's is not read), and the
    first child and next sibling of each node, -1 for none; all int64."""

    def __init__(self, tokens: Tensor, first_child: Tensor, next_sibling: Tensor) -> None:
        self.tokens = tokens
        self.first_child = first_child
        self.next_sibling = next_sibling

    @classmethod
    def tree(cls, tokens: Tensor, parents: list[int]) -> DraftNodes:
        """parents: of each node, an earlier one; -1 for the root and for nodes without any."""
        import torch

        first_child, next_sibling = [-1] * len(parents), [-1] * len(parents)
        for node in range(len(parents) - 1, 0, -1):
            if parents[node] >= 0:
                next_sibling[node] = first_child[parents[node]]
                first_child[parents[node]] = node
        return cls(tokens, torch.tensor(first_child), torch.tensor(next_sibling))

    @classmethod
    def chain(cls, tokens: Tensor) -> DraftNodes:
        return cls(tokens, *_chain(len(tokens)))


@lru_cache(maxsize=64)
def _chain(length: int) -> tuple[Tensor, Tensor]:
    """First child and next sibling of a chain's nodes."""
    import torch

    first_child = torch.arange(1, length + 1)
    first_child[-1] = -1
    return first_child, torch.full_like(first_child, -1)
