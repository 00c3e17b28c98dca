"""Where a request's text stands in its grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tllm_spec.grammar.guided_decoding import GrammarSource
from tllm_spec.request_errors import NO_GUIDED_TOKEN, SLOW_GRAMMAR

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar for a tokenizer. `start`: an `LLMatcher` at the beginning of a text. `num_words`:
    of its masks, of 32 tokens each; the tokenizer may have more tokens than the model.
    `drafts_forced`: whether text that it forces is drafted. `refuse`: requests with this grammar
    are refused from now on, for the reason given. `spelt`: the tokenizer's tokens of a text."""

    source: GrammarSource
    start: Any = field(repr=False)
    end_ids: frozenset[int]
    num_words: int
    drafts_forced: bool = True
    refuse: Callable[[str], None] = lambda reason: None
    spelt: Callable[[bytes], list[int]] = lambda text: []


class GrammarState:
    """The mask of a row is a function of the text before it, whatever was drafted. After the
    grammar's end (a stop token that did not end the text) every token is allowed. Where a limit is
    reached no token is: `failure` says why."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.start.deep_copy()
        self._tokens: list[int] = []  # the output that has been read
        self._is_free = False
        self.failure: str | None = None

    @property
    def source(self) -> GrammarSource:
        return self._grammar.source

    def read(self, tokens: list[int], prompt_len: int) -> None:
        """tokens: the prompt's and all emitted ones."""
        new = tokens[prompt_len + len(self._tokens) :]
        self._tokens += new
        if not new or self._is_free or self.failure is not None:
            return
        before_end = self._num_before_end(new)
        num_read = self._matcher.try_consume_tokens(new[:before_end])
        if self._matcher.is_error():
            self._fail()
            return
        self._is_free = before_end < len(new)
        is_allowed = num_read == before_end and (not self._is_free or self._can_end())
        assert is_allowed, "a token was emitted that the grammar's mask excludes"

    def fill(
        self, tokens: Sequence[int], parents: Sequence[int], bitmask: Tensor
    ) -> Mapping[int, int]:
        """Writes the tokens that may follow each node of a window's tree. tokens: the root's is not
        read. parents: of each node, an earlier one; -1 for the root and for nodes without any.
        bitmask `[W, ceil(V / 32)]` int32, all ones: bit i of a row's words stands for token i.
        After a draft that ends the grammar the text is free. Rows after a draft that the grammar
        excludes have any mask: no text comes there. Returns the tokens that outrank everything
        else, by row: none."""
        if self._is_free:
            return {}
        rows = bitmask.numpy()
        if self.failure is None and not self._write(rows[0]):
            self._fail()
        if self.failure is not None:
            rows[:] = 0
            return {}
        children: dict[int, list[int]] = {}
        for node in range(1, len(tokens)):
            children.setdefault(parents[node], []).append(node)
        self._walk(0, [], tokens, children, rows)
        return {}

    def why_no_token(self, tokens: list[int], prompt_len: int) -> str | None:
        """Why no token can follow the text; None if it is whole and the vocabulary has no end token
        to say so. As `read`."""
        self.read(tokens, prompt_len)
        if not self._is_free and self.failure is None:
            if not self._grammar.end_ids and self._can_end():
                return None
            self._matcher.compute_bitmask()
            if self._matcher.is_error():
                self._fail()
        return self.failure or NO_GUIDED_TOKEN

    def better_drafts(self, drafts: list[int], max_drafts: int) -> list[int]:
        """The drafts up to the first one that the grammar excludes, or the tokens that the grammar
        forces next, if these are more (jump-forward)."""
        if self._is_free or self.failure is not None:
            return drafts
        drafts = self._allowed(drafts)
        if not self._grammar.drafts_forced:
            return drafts
        forced: list[int] = self._matcher.compute_ff_tokens()[:max_drafts]
        if not forced and (text := self._matcher.compute_ff_bytes()):
            forced = self._allowed(self._grammar.spelt(text)[:max_drafts])
        if self._matcher.is_error():  # the mask will say so, if the text comes there
            self._restart([])
        return forced if len(forced) > len(drafts) else drafts

    def _allowed(self, drafts: list[int]) -> list[int]:
        """Those before the first one that cannot come there."""
        before_end = self._num_before_end(drafts)
        number = self._matcher.try_consume_tokens(drafts[:before_end])
        can_end = number == before_end and self._can_end()
        if self._matcher.is_error():
            self._restart([])
        elif number:
            self._matcher.rollback(number)
        return drafts if can_end else drafts[:number]

    def _walk(
        self,
        node: int,
        path: list[int],
        tokens: Sequence[int],
        children: dict[int, list[int]],
        rows: Any,
    ) -> None:
        """Fills the rows below a node, where the matcher stands. path: the drafts up to there. A
        draft is read only if the row before allows it: a refusal would be the matcher's last."""
        for child in children.get(node, ()):
            token = tokens[child]
            if token in self._grammar.end_ids or not rows[node, token >> 5] >> (token & 31) & 1:
                continue
            if self._matcher.consume_token(token) and self._write(rows[child]):
                self._walk(child, [*path, token], tokens, children, rows)
                self._matcher.rollback(1)
            else:
                rows[child] = 0
                self._restart(path)

    def _write(self, row: Any) -> bool:
        """Writes the mask of the matcher's place. Returns False if a limit does not allow it."""
        num_words = self._grammar.num_words
        if num_words == len(row):
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        else:
            wide = row.__class__((num_words,), row.dtype)
            self._matcher.unsafe_compute_mask_ptr(wide.ctypes.data, wide.nbytes)
            row[:] = wide[: len(row)]
        return not self._matcher.is_error()

    def _num_before_end(self, tokens: list[int]) -> int:
        ends = self._grammar.end_ids
        return next((i for i, token in enumerate(tokens) if token in ends), len(tokens))

    def _can_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def _restart(self, path: list[int]) -> None:
        """A limit has ended the matcher in a draft: another one goes to where it stood."""
        self._matcher = self._grammar.start.deep_copy()
        self._matcher.consume_tokens([*self._tokens, *path])

    def _fail(self) -> None:
        if "NoExtension" in self._matcher.get_error():
            self.failure = NO_GUIDED_TOKEN
        else:
            self.failure = SLOW_GRAMMAR
            self._grammar.refuse(SLOW_GRAMMAR)
