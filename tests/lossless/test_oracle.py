"""Plain decoding itself, against transformers' logits and a second reading of the sampling
rules."""

import math
import warnings
from typing import Any

import pytest
import torch

from tests.lossless.cases import OUTPUT_LEN, TOLERANCE, Case, NearTie, assert_same
from tests.lossless.oracle import GetOracle, distance, filter_margins, perturbed_logits
from tllm_spec.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tllm_spec.sampling_params import SamplingParams


def test_plain_decoding_follows_the_sampling_rules_at_every_position(
    cases: list[Case], plain: list[RequestOutput], oracle: GetOracle
) -> None:
    for case, request in zip(cases, plain, strict=True):
        output = request.outputs[0].token_ids
        logits = oracle().logits(case.prompt + output)[len(case.prompt) - 1 : -1]
        for place, (row, token) in enumerate(zip(logits, output, strict=True)):
            perturbed = perturbed_logits(row, case.params, case.prompt, output[:place])
            gap = float(perturbed.max() - perturbed[token])
            assert gap < TOLERANCE, (
                f"{case.name}: token {place}, {token}, is {gap:.1e} below the best"
            )
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
    cases: list[Case], plain: list[RequestOutput], oracle: GetOracle
) -> None:
    def with_tokens(token_ids: list[int]) -> RequestOutput:
        sample = CompletionOutput(0, plain[1].outputs[0].text, token_ids, finish_reason="length")
        return RequestOutput(0, None, cases[1].prompt, [sample], RequestMetrics(0.0), finished=True)

    tokens = plain[1].outputs[0].token_ids
    assert_same(cases[1], with_tokens(tokens), plain[1], oracle)
    with pytest.raises(AssertionError, match=f"{OUTPUT_LEN - 1} tokens instead of {OUTPUT_LEN}"):
        assert_same(cases[1], with_tokens(tokens[:-1]), plain[1], oracle)
    other = [*tokens[:30], (tokens[30] + 1) % 2048, *tokens[31:]]
    with pytest.raises(
        AssertionError, match=r"temperature: token 30 is \d+ instead of \d+, \S+ apart"
    ):
        assert_same(cases[1], with_tokens(other), plain[1], oracle)
    with pytest.warns(NearTie, match="temperature: token 30"):
        assert_same(cases[1], with_tokens(other), plain[1], oracle, tolerance=1e9)


def test_a_candidate_at_a_filter_s_edge_is_as_near_as_the_edge() -> None:
    """The noise likes the last of tokens 0 to 3 best. What a filter decides about it by a hair
    decides the text."""
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    perturbed = logits + torch.tensor([0.0, 0.5, 0.0, 9.0])

    def distances(**filters: Any) -> list[float]:
        margins = filter_margins(logits, SamplingParams(temperature=1.0, **filters))
        return [distance(token, perturbed, margins) for token in range(4)]

    assert distances() == (perturbed.max() - perturbed).tolist() == [6.0, 6.5, 8.0, 0.0]
    just_excluded, just_kept = math.exp(-2.9), math.exp(-3.1)
    assert distances(min_p=just_excluded) == pytest.approx([0.0, 0.5, 2.0, 0.1])
    assert distances(min_p=just_kept) == pytest.approx([0.1, 0.5, 2.0, 0.0])
    assert distances(min_p=math.exp(-1.0)) == pytest.approx([0.0, 0.5, 2.0, 2.0])
    assert distances(top_k=3) == pytest.approx([0.0, 0.5, 2.0, 1.0])
    before = 1 / (
        1 + math.exp(1.0 - math.log(sum(map(math.exp, (4, 3, 2)))))
    )  # the mass of the other three
    odds = math.log(before / (1 - before))
    for shift in (0.2, -0.2):
        top_p = 1 / (1 + math.exp(-(odds + shift)))
        found = distances(top_p=top_p)
        assert found[3] == pytest.approx(max(0.0, -shift), abs=1e-9)
        assert found[0] == pytest.approx(max(0.0, shift), abs=1e-9)


def test_filters_keep_every_token_with_a_margin(cases: list[Case], oracle: GetOracle) -> None:
    raw = oracle().logits(cases[0].prompt)[-1].double()
    for filters in (
        {"min_p": 0.05},
        {"top_k": 7},
        {"top_p": 0.9},
        {"min_p": 0.01, "top_k": 9, "top_p": 0.8},
    ):
        params = SamplingParams(temperature=1.0, seed=1, **filters)
        kept = perturbed_logits(raw, params, cases[0].prompt, []).isfinite()
        assert torch.equal(filter_margins(raw, params) >= 0, kept), filters
        assert 1 < kept.sum() < 100


def test_without_filters_edges_change_no_gap_and_with_them_they_only_narrow_it(
    cases: list[Case], plain: list[RequestOutput], oracle: GetOracle
) -> None:
    narrower = 0
    for case, request in zip(cases[:5], plain, strict=False):
        output = request.outputs[0].token_ids
        for place in (0, 40):
            chosen = output[place]
            for other in (chosen + 1, 5, 300):
                given = case.params, case.prompt, output[:place], (chosen, other % 2048)
                strict, at_edges = oracle().gap(*given), oracle().gap_with_edges(*given)
                assert at_edges <= strict + 1e-6
                if case.name in ("greedy", "temperature", "penalties"):
                    assert at_edges == pytest.approx(strict, abs=1e-6)
                narrower += at_edges < strict - 1e-6
    assert narrower > 0
