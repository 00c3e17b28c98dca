"""Plain decoding itself, against transformers' logits and a second reading of the sampling rules."""

import warnings
from collections.abc import Callable

from tests.lossless.cases import TOLERANCE, Case, NearTie
from tests.lossless.oracle import Oracle, perturbed_logits
from tllm_spec.outputs import RequestOutput


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
    assert all(60 < len(one.outputs[0].token_ids) < 200 for one in plain[8:])
