"""A stop ends the text where plain decoding ends it, at whatever place of an accepted run it comes,
and also while the next round is in flight."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.executor.harness import user_provided
from tests.lossless.cases import Case, assert_same, generate
from tests.lossless.engines import engine
from tests.lossless.oracle import Oracle
from tllm_spec.executor.request import LlmRequest
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.text.tokenizer import Tokenizer

ENGINES = [
    pytest.param(engine, marks=[] if engine[1] in (3, 4) else [pytest.mark.slow])
    for engine in [("known", length) for length in (1, 2, 4, 6)]
    + [("itself", length) for length in (1, 3, 5, 7)]
]


@pytest.fixture(scope="module", params=ENGINES, ids=lambda engine: f"{engine[0]}-K{engine[1]}")
def llm(
    request: pytest.FixtureRequest, known_texts: dict[tuple[int, ...], list[int]]
) -> Iterator[LLM]:
    """Every draft is right, beyond the stop too: rounds of 2 to 8 tokens lie differently across it.
    "known": drafts from the host; "itself": the target drafts for itself inside its forward, and
    rounds overlap."""

    def propose(request: LlmRequest) -> list[int]:
        text = known_texts[tuple(request.tokens[: request.prompt_len])]
        return text[request.num_output_tokens :][: request.num_drafts_wanted]

    drafts, length = request.param
    if drafts == "known":
        options = user_provided(propose, length)
    else:
        options = engine("draft_target_one_model", length, speculative_model="zoo:llama")
    with LLM("zoo:llama", max_batch_size=2, **options) as llm:
        assert llm._executor.parts.overlaps == (drafts == "itself")
        yield llm
        llm.check_integrity()


def test_a_stop_inside_a_run_of_accepted_drafts_drops_the_rest_of_the_run(
    llm: LLM, cases: list[Case], plain: list[RequestOutput], oracle: Callable[[], Oracle]
) -> None:
    window = llm.args.speculative_config.max_draft_len + 1
    for case, output, expected in zip(
        cases[8:], generate(llm, cases[8:], 2), plain[8:], strict=True
    ):
        assert_same(case, output, expected, oracle)
        stats = output.speculative_decoding
        assert stats is not None and stats.num_drafted_tokens == stats.rounds * (window - 1)
        # All but the last round emitted a whole window, the last one what stands up to the stop.
        assert (stats.rounds - 1) * window < stats.num_emitted_tokens <= stats.rounds * window


def test_the_stop_itself_is_in_the_output_on_request_only(
    llm: LLM, cases: list[Case], plain: list[RequestOutput]
) -> None:
    case, text = cases[8], plain[8].outputs[0].text
    stop = case.params.stop_strings[0]
    including = replace(case.params, include_stop_str_in_output=True)
    (output,) = generate(llm, [Case(case.name, case.prompt, including)], 1)
    assert output.outputs[0].text == text + stop and stop not in text


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_inside_a_token_cuts_the_text_at_its_very_end_or_beginning(
    plain_llm: LLM,
    tokenizer: Tokenizer,
    cases: list[Case],
    plain: list[RequestOutput],
    include: bool,
) -> None:
    case, text, stops = next(
        (case, request.outputs[0].text, stops)
        for case, request in zip(cases[:3], plain, strict=False)
        if len(stops := insides(tokenizer, request.outputs[0].token_ids)) >= 6
    )
    for stop in stops[:6]:
        params = replace(case.params, stop=stop, include_stop_str_in_output=include)
        (output,) = generate(plain_llm, [Case(stop, case.prompt, params)], 1)
        assert output.outputs[0].text == text[: text.find(stop) + include * len(stop)]


def insides(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    """Texts of different tokens without their first and last character, where two or more are
    left. Their number depends on the prompts, which are this Python's own sources."""
    inside = [tokenizer.decode([token])[1:-1] for token in token_ids]
    return [stop for stop in dict.fromkeys(inside) if len(stop) > 1]


def test_a_stop_before_min_tokens_is_passed_over(
    llm: LLM, cases: list[Case], plain: list[RequestOutput], unstopped: list[list[int]]
) -> None:
    case, length = cases[8], plain[8].outputs[0].length
    patient = replace(case.params, min_tokens=length + 20)
    (output,) = generate(llm, [Case(case.name, case.prompt, patient)], 1)
    assert output.outputs[0].token_ids == unstopped[0][: output.outputs[0].length]
    assert output.outputs[0].length > length + 15
