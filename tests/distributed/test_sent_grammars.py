"""A compiled grammar is sent to the other ranks once."""

from typing import Any

import pytest

from tllm_spec.executor.ranks import SentGrammars
from tllm_spec.grammar.guided_decoding import GrammarSource
from tllm_spec.grammars import Grammars
from tllm_spec.text.tokenizer import load_tokenizer

END = (1,)


@pytest.fixture(scope="module")
def leader() -> Grammars:
    pytest.importorskip("xgrammar")
    return Grammars("xgrammar", load_tokenizer("zoo:llama"), 2048, END)


def compiled(grammars: Grammars, regex: str) -> Any:
    (state,) = grammars.states_of(GrammarSource("regex", regex), 1)
    assert state is not None
    return state.compiled


def test_the_other_ranks_have_the_grammar_although_it_is_sent_once(leader: Grammars) -> None:
    sent, follower = SentGrammars(), Grammars("xgrammar", load_tokenizer("zoo:llama"), 2048, END)
    first, second = compiled(leader, "a+"), compiled(leader, "b+")
    messages = [sent.message(each) for each in (first, second, first, compiled(leader, "a+"))]
    assert [message[1] is None for message in messages] == [False, False, True, True]
    states = [follower.load_states(message, 2) for message in messages]
    texts = [state.compiled.serialize_json() for (state, _) in states if state is not None]
    assert texts == [each.serialize_json() for each in (first, second, first, first)]


def test_what_the_limit_drops_is_dropped_everywhere_and_sent_again(leader: Grammars) -> None:
    first, second = compiled(leader, "a+"), compiled(leader, "b+")
    sent = SentGrammars(max_bytes=first.memory_size_bytes)
    follower = Grammars("xgrammar", load_tokenizer("zoo:llama"), 2048, END)
    messages = [sent.message(each) for each in (first, second, second, first)]
    assert [message[1] is None for message in messages] == [False, False, True, False]
    for message in messages:
        follower.load_states(message, 1)
        assert len(follower._loaded) == 1
