"""Separates a model's reasoning from its answer."""

from __future__ import annotations

import re

from tllm_spec.chat_formats.pieces import Parser, Reasoning, StepParser, Steps, num_held
from tllm_spec.text.reasoning import ReasoningFormat, Section


class ReasoningParser(StepParser):
    """section: how the text begins. An empty section may come before the real one. White space at
    the beginning of reasoning and answer is left out. The answer goes through `answer`."""

    def __init__(self, answer: Parser, form: ReasoningFormat, section: Section) -> None:
        super().__init__()
        self._answer, self._form, self._section = answer, form, section

    def steps(self) -> Steps[None]:
        is_inside, has_reasoned = self._section == "inside", self._section == "over"
        while not has_reasoned:
            has_opener = yield from self.marker(self._form.opener)
            if not has_opener and not is_inside:
                break
            has_reasoned, is_inside = (yield from self._reasoning()), False
        yield from self.skip()
        if not self.text:
            return
        while not self.has_ended:
            yield from self._answer.feed(self.taken())
            yield None
        yield from (*self._answer.feed(self.taken()), *self._answer.finish())

    def _reasoning(self) -> Steps[bool]:
        """Reads a section and its end. Returns whether it has any text."""
        ends, has_text = (self._form.closer, *self._form.ends_at), False
        any_end = re.compile("|".join(map(re.escape, ends)))
        yield from self.skip()
        while True:
            found = any_end.search(self.text)
            held = found.start() if found else len(self.text) - num_held(self.text, ends)
            is_last = found is None and self.has_ended
            new = self.taken(None if is_last else len(self.text[:held].rstrip()))
            has_text = has_text or bool(new)
            yield Reasoning(new)
            if found:
                yield from self.skip()
                self.text = self.text.removeprefix(self._form.closer)
            if found or self.has_ended:
                return has_text
            yield None
