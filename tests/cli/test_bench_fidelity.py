"""What `compare --with_model` says of two models: equal tokens, equal first choices,
perplexities."""

import math
from typing import Any

import pytest

from tests.cli.fake_llm import FakeHandle, FakeLLM, make_output
from tllm_spec.bench.compare import Contestant, fidelity
from tllm_spec.bench.dataset import BenchRequest
from tllm_spec.bench.runner import Run
from tllm_spec.bench.table import FIDELITY, format_rows
from tllm_spec.outputs import Logprob, RequestOutput

REQUESTS = [BenchRequest(0, [4, 5, 6], 4), BenchRequest(1, [4], 4)]


class Reader(FakeLLM):
    """Gives prompt tokens after the first the probability `own`, and each position's first choice
    is its token, except of those in `wrong`."""

    def __init__(self, own: float, wrong: tuple[int, ...] = (), shift: int = 0) -> None:
        super().__init__("zoo:llama")
        self.own, self.wrong, self.shift = own, wrong, shift

    def generate_async(self, prompt: Any, params: Any, streaming: bool = False) -> FakeHandle:
        assert params.prompt_logprobs == 1
        handle = super().generate_async(prompt, params, streaming)
        handle.output.prompt_token_ids = [token + self.shift for token in prompt]
        handle.output.outputs[0].prompt_logprobs = [
            None, *(self.entry(token + self.shift) for token in prompt[1:])
        ]  # fmt: skip
        return handle

    def entry(self, token: int) -> dict[int, Logprob]:
        if token in self.wrong:
            return {token: Logprob(math.log(self.own), 2), 99: Logprob(math.log(0.5), 1)}
        return {token: Logprob(math.log(self.own), 1)}


def text_of(*tokens: int) -> RequestOutput:
    output = make_output(1, 1)
    output.outputs[0].token_ids = list(tokens)
    return output


def contestant(name: str, llm: FakeLLM, *outputs: RequestOutput) -> Contestant:
    return Contestant(name, llm, runs=[Run(list(outputs), 1.0)])


def test_shares_are_of_all_positions_and_a_perplexity_is_of_predicted_tokens() -> None:
    original = contestant("plain", Reader(0.25), text_of(1, 2, 3, 4), text_of(1, 2, 3, 4))
    copy = contestant("int4", Reader(0.125, (6,)), text_of(1, 2, 3, 9), text_of(1, 2))
    rows = fidelity([original, copy], REQUESTS)
    assert rows == [
        {
            "configuration": "plain",
            "equal_tokens": 1.0,
            "equal_choices": 1.0,
            "perplexity": pytest.approx(4),
        },
        {
            "configuration": "int4",
            "equal_tokens": 5 / 8,
            "equal_choices": 0.5,
            "perplexity": pytest.approx(8),
        },
    ]
    assert format_rows(FIDELITY, rows).splitlines()[2].split() == [
        "int4",
        "62.5%",
        "50.0%",
        "8.0000",
    ]


def test_prompts_of_one_token_say_nothing() -> None:
    (row,) = fidelity([contestant("plain", Reader(0.25), text_of(1))], REQUESTS[1:])
    assert (row["equal_choices"], row["perplexity"]) == (None, None)
    assert format_rows(FIDELITY, [row]).splitlines()[1].split() == ["plain", "100.0%", "-", "-"]


def test_models_with_other_tokens_are_refused() -> None:
    models = [
        contestant("one", Reader(0.25), text_of(1), text_of(1)),
        contestant("other", Reader(0.25, shift=1), text_of(1), text_of(1)),
    ]
    with pytest.raises(ValueError, match="different tokens of the prompts"):
        fidelity(models, REQUESTS)
