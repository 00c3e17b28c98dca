"""Plain decoding itself, against transformers' logits and a second reading of the sampling rules."""

import warnings
from collections.abc import Callable

import pytest

from tests.lossless.cases import OUTPUT_LEN, TOLERANCE, Case, NearTie, assert_same
from tests.lossless.oracle import Oracle, perturbed_logits
from tllm_spec.outputs import CompletionOutput, RequestMetrics, RequestOutput


def test_plain_decoding_chooses_at_every_position_what_the_rules_say(
    cases: list[Case], plain: list[RequestOutput], oracle: Callable[[], Oracle]
) -> None:
    for case, request in zip(cases, plain, strict=True):
        output = request.outputs[0].token_ids
        logits = oracle().logits(case.prompt + output)[len(case.prompt) - 1 : -1]
        for place, (row, token) in enumerate(zip(logits, output, strict=True)):
            perturbed = perturbed_logits(row, case.params, case.prompt, output[:place])
            gap = float(perturbed.max() - perturbed[token])
            assert gap < TOLERANCE, f"{case.name}: token {place}, {token}, is {gap:.1e} below the best"
            if gap:
                warnings.warn(
                    f"{case.name}: token {place} is {gap:.1e} below the best", NearTie, stacklevel=1
                )


def test_the_stops_end_the_texts_where_they_first_occur(
    cases: list[Case], plain: list[RequestOutput], unstopped: list[list[int]]
) -> None:
    by_string, by_token = cases[8], cases[9]
    text = plain[8].outputs[0]
    assert by_string.params.stop is not None and text.stop_reason == by_string.params.stop[0]
    assert text.token_ids == unstopped[0][: text.length] and text.stop_reason not in text.text
    stopped = plain[9].outputs[0]
    assert [stopped.stop_reason] == by_token.params.stop_token_ids
    assert stopped.token_ids == unstopped[1][: unstopped[1].index(stopped.token_ids[-1]) + 1]
    assert all(OUTPUT_LEN // 3 < len(one.outputs[0].token_ids) < OUTPUT_LEN for one in plain[8:])


def test_the_comparison_tolerates_a_difference_between_near_ties_only(
    cases: list[Case],
    plain: list[RequestOutput],
    oracle: Callable[[], Oracle],
) -> None:
    def with_tokens(token_ids: list[int]) -> RequestOutput:
        sample = CompletionOutput(0, plain[1].outputs[0].text, token_ids, finish_reason="length")
        return RequestOutput(0, None, cases[1].prompt, [sample], RequestMetrics(0.0), finished=True)

    tokens = plain[1].outputs[0].token_ids
    assert_same(cases[1], with_tokens(tokens), plain[1], oracle)
    with pytest.raises(AssertionError, match="99 tokens instead of 100"):
        assert_same(cases[1], with_tokens(tokens[:-1]), plain[1], oracle)
    other = [*tokens[:30], (tokens[30] + 1) % 2048, *tokens[31:]]
    with pytest.raises(AssertionError, match=r"temperature: token 30 is \d+ instead of \d+, \S+ apart"):
        assert_same(cases[1], with_tokens(other), plain[1], oracle)
    with pytest.warns(NearTie, match="temperature: token 30"):
        assert_same(cases[1], with_tokens(other), plain[1], oracle, tolerance=1e9)
