"""Log probabilities with speculation are those of plain decoding and of transformers."""

import math
from functools import partial
from itertools import product
from typing import Any, get_args

import pytest
import torch

from tests.lossless.engines import engine
from tests.lossless.oracle import GetOracle, _edited, _filtered
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.option_checks import PROCESSED, LogprobsMode
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.grammar.guided_decoding import GuidedDecodingParams
from tllm_spec.intake import Intake
from tllm_spec.llm import LLM
from tllm_spec.outputs import Logprob, RequestOutput
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server.protocol import CompletionRequest

NUM_BEST, OUTPUT_LEN = 3, 24
# Penalties, bias and temperature change what is chosen, never what the model itself says of it.
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "presence_penalty": 0.7, "logit_bias": {5: 2.0}},
    {"temperature": 1.2, "top_p": 0.9},
]
CHUNKS: dict[str, Any] = {"enable_chunked_prefill": True, "max_num_tokens": 40}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": engine("plain", 0) | CHUNKS,
    "ngram": engine("ngram", 4),
    "draft_target": engine("draft_target", 4) | CHUNKS,
    "draft_target_one_model": engine("draft_target_one_model", 3),
    "eagle3": engine("eagle3", 4) | CHUNKS,
    "eagle3_in_turn": engine("eagle3", 4, overlap=False),
    "eagle3_two_model": engine("eagle3_two_model", 2) | CHUNKS,
}


def generate(llm: LLM, prompts: list[list[int]], batched: bool) -> list[RequestOutput]:
    all_params = [
        SamplingParams(
            max_tokens=OUTPUT_LEN,
            ignore_eos=True,
            seed=5,
            logprobs=NUM_BEST,
            prompt_logprobs=NUM_BEST,
            **way,
        )
        for way in WAYS
    ]
    if batched:
        outputs = llm.generate(prompts, all_params, use_tqdm=False)
        assert isinstance(outputs, list)
        return outputs
    return [llm.generate_async(*each).result() for each in zip(prompts, all_params, strict=True)]


@pytest.fixture(scope="module")
def plain_outputs(plain_llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return generate(plain_llm, prompts[:3], batched=False)


def values(entries: list[Any]) -> torch.Tensor:
    """`[N, 1 + NUM_BEST]`: of the chosen token, then of the best ones in order of rank."""
    rows = []
    for entry in entries:
        chosen, *_ = entry.values()
        best = sorted(entry.values(), key=lambda each: each.rank)[:NUM_BEST]
        rows.append([each.logprob for each in (chosen, *best)])
    return torch.tensor(rows)


LONG_ONLY = ("draft_target", "draft_target_one_model", "eagle3_two_model", "eagle3_in_turn")


@pytest.mark.thinned
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in LONG_ONLY else []) for name in ENGINES],
)
def test_log_probabilities_are_plain_decodings(
    name: str, plain_outputs: list[RequestOutput], prompts: list[list[int]]
) -> None:
    with LLM("zoo:llama", **ENGINES[name]) as llm:
        outputs = generate(llm, prompts[:3], batched=True)
        llm.check_integrity()
    for output, plain in zip(outputs, plain_outputs, strict=True):
        ours, theirs = output.outputs[0], plain.outputs[0]
        assert ours.token_ids == theirs.token_ids
        assert [next(iter(entry)) for entry in ours.logprobs] == ours.token_ids
        assert (values(ours.logprobs) - values(theirs.logprobs)).abs().max() < 1e-4
        assert ours.prompt_logprobs[0] is None is theirs.prompt_logprobs[0]
        assert (
            values(ours.prompt_logprobs[1:]) - values(theirs.prompt_logprobs[1:])
        ).abs().max() < 1e-4
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-2)


def test_plain_log_probabilities_are_transformers(
    plain_outputs: list[RequestOutput], oracle: GetOracle
) -> None:
    for output in plain_outputs:
        sample, prompt = output.outputs[0], output.prompt_token_ids
        text = prompt + sample.token_ids
        expected = oracle().logits(text).log_softmax(-1)
        entries = sample.prompt_logprobs[1:] + sample.logprobs
        assert len(entries) == len(text) - 1 and len(sample.logprobs) == OUTPUT_LEN
        for row, token, entry in zip(expected, text[1:], entries, strict=False):
            assert entry is not None
            assert_entry(entry, row, token)


def assert_entry(entry: dict[int, Logprob], row: torch.Tensor, token: int) -> None:
    assert next(iter(entry)) == token
    for each, found in entry.items():
        assert abs(found.logprob - float(row[each])) < 1e-4
    best = row.topk(NUM_BEST).values
    assert all(float(row[each]) > float(best[-1]) - 1e-4 for each in list(entry)[1:])
    assert len(entry) in (NUM_BEST, NUM_BEST + 1)


PROMPT_LEN = 20
MODES: tuple[LogprobsMode, ...] = get_args(LogprobsMode)
TREE = engine("eagle3_tree", 3)
SAMPLED: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "repetition_penalty": 1.3,
    "logit_bias": {5: 2.0},
    "bad_token_ids": [7],
    "seed": 3,
}
PROCESSED_WAYS: dict[str, dict[str, Any]] = {
    "sampled": SAMPLED,
    "greedy": SAMPLED | {"temperature": 0},
    "min_tokens": {"temperature": 1.1, "top_k": 8, "min_p": 0.02, "min_tokens": 8, "seed": 4},
}
# A text that n-grams draft.
REPEATING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "logit_bias": {5: 14.0}, "seed": 2}
WITH_MODES = {
    "rejection": engine("eagle3", 3, use_rejection_sampling=True),
    "plain": engine("plain", 0),
    "chain": engine("eagle3", 4) | CHUNKS,
    "tree": TREE,
}
OTHER_DRAFTERS = "ngram", "sa", "draft_target", "eagle3_two_model", "peagle"


def said(raw: torch.Tensor, params: SamplingParams, text: list[int], at: int) -> torch.Tensor:
    """`[V]` float64: what a mode says of the token at `at`, by the oracle's own rules. raw `[V]`:
    logits of the token before it."""
    assert params.logprobs_mode is not None
    values = raw.double()
    if params.logprobs_mode.startswith("processed"):
        values = _edited(raw, params, text[:PROMPT_LEN], text[PROMPT_LEN:at])
        if not params.is_greedy:
            values = _filtered(values / params.effective_temperature, params)
    return values if params.logprobs_mode.endswith("logits") else values.log_softmax(-1)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "name", [*WITH_MODES, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_DRAFTERS)]
)
def test_every_mode_says_what_a_forward_of_the_whole_text_gives(
    name: str, prompts: list[list[int]], oracle: GetOracle
) -> None:
    """All modes are in one batch, and the whole vocabulary is compared."""
    prompt, vocab_size = (prompts[0] * PROMPT_LEN)[:PROMPT_LEN], oracle().logits([1]).shape[1]
    own: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logprobs": vocab_size}
    ways = [*PROCESSED_WAYS.values(), *([REPEATING] if name in ("ngram", "sa") else [])]
    asked = [SamplingParams(**own, **way, logprobs_mode=mode) for way in ways for mode in MODES]
    options = WITH_MODES[name] if name in WITH_MODES else engine(name, 3)
    with LLM("zoo:llama", **options) as llm:
        outputs = llm.generate([prompt] * len(asked), asked, use_tqdm=False)
        llm.check_integrity()
    assert isinstance(outputs, list)
    stats = [output.outputs[0].speculative_decoding for output in outputs]
    assert name == "plain" or any(each and each.num_accepted_tokens for each in stats)
    for params, output in zip(asked, outputs, strict=True):
        text = prompt + output.outputs[0].token_ids
        rows = oracle().logits(text)
        for at, entry in enumerate(output.outputs[0].logprobs, PROMPT_LEN):
            expected = said(rows[at - 1], params, text, at)
            assert len(entry) == vocab_size and next(iter(entry)) == text[at]
            assert math.isfinite(entry[text[at]].logprob)
            found = torch.tensor([entry[token].logprob for token in range(vocab_size)])
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_the_engines_mode_holds_where_a_request_has_none_and_prompts_are_raw(
    prompts: list[list[int]], oracle: GetOracle
) -> None:
    params = [
        SamplingParams(max_tokens=4, logprobs=0, prompt_logprobs=0, logprobs_mode=mode, **SAMPLED)
        for mode in (None, *MODES)
    ]
    with LLM("zoo:llama", logprobs_mode="processed_logits", **TREE) as llm:
        outputs = llm.generate([prompts[0]] * len(params), params, use_tqdm=False)
        llm.check_integrity()
    assert isinstance(outputs, list)
    by_mode = dict(zip((None, *MODES), outputs, strict=True))
    assert by_mode[None].outputs[0].logprobs == by_mode["processed_logits"].outputs[0].logprobs
    assert by_mode[None].outputs[0].logprobs != by_mode["raw_logits"].outputs[0].logprobs
    logits = oracle().logits(prompts[0])
    for mode, output in by_mode.items():
        is_logits = mode is None or mode.endswith("logits")
        rows = logits if is_logits else logits.log_softmax(-1)
        for row, token, entry in zip(
            rows, prompts[0][1:], output.outputs[0].prompt_logprobs[1:], strict=False
        ):
            assert entry is not None and abs(entry[token].logprob - float(row[token])) < 1e-4


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.slow), "chain"])
def test_a_completion_is_scored_as_it_would_be_drawn(name: str, prompts: list[list[int]]) -> None:
    """In each mode, whatever the prefix cache has, in chunks, and when asked for one of a batch."""
    own: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0, "seed": 3}
    ways: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.7, "top_k": 40, "top_p": 0.95})
    with LLM("zoo:llama", **WITH_MODES[name]) as llm:
        for way, mode in product(ways, MODES):
            params = SamplingParams(**own, **way, logprobs_mode=mode)
            outputs = llm.generate(prompts[:2], params, use_tqdm=False)
            assert isinstance(outputs, list)
            drawn = [
                [next(iter(entry.values())).logprob for entry in each.outputs[0].logprobs]
                for each in outputs
            ]
            texts = [each.outputs[0].token_ids for each in outputs]
            scored = llm.score(prompts[:2], texts, **way, logprobs_mode=mode)
            torch.testing.assert_close(torch.tensor(scored), torch.tensor(drawn), atol=1e-4, rtol=0)
        assert min(llm.score([5, 6], [[7] * 9], **ways[1], logprobs_mode=PROCESSED[0])[0]) < -1e9
        for wrong, why in (([[1]], "completions has 1 entries"), ([[1], []], "prompt is empty")):
            with pytest.raises(ValueError, match=why):
                llm.score([[1], [2]], wrong)
        llm.check_integrity()


def test_a_grammar_leaves_tokens_that_it_forbids_at_minus_infinity(
    prompts: list[list[int]],
) -> None:
    pytest.importorskip("llguidance")
    params = [
        SamplingParams(
            max_tokens=6,
            logprobs=2048,
            logprobs_mode=mode,
            guided_decoding=GuidedDecodingParams(regex="[0-9]{9}"),
        )
        for mode in ("processed_logprobs", "raw_logprobs")
    ]
    with LLM("zoo:llama", **TREE) as llm:
        processed, raw = llm.generate([prompts[0]] * 2, params, use_tqdm=False)
        digits = [token for token in range(2048) if llm.tokenizer.decode([token]).isdigit()]
    assert processed.outputs[0].token_ids == raw.outputs[0].token_ids
    for entry, plain in zip(processed.outputs[0].logprobs, raw.outputs[0].logprobs, strict=True):
        allowed = [token for token, found in entry.items() if found.logprob > -math.inf]
        assert set(allowed) <= set(digits) and next(iter(entry)) in allowed
        total = torch.tensor([plain[token].logprob for token in allowed]).logsumexp(0)
        for token in allowed:
            expected = plain[token].logprob - float(total)
            assert entry[token].logprob == pytest.approx(expected, abs=1e-4)


HEAD: dict[str, Any] = {"decoding_type": "Eagle3", "speculative_model": "head"}
LOSSY: dict[str, dict[str, Any]] = {
    "synthetic_acceptance_rates": HEAD | {"max_draft_len": 1, "synthetic_acceptance_rates": [0.5]},
    "threshold_acc": HEAD
    | {"max_draft_len": 2, "use_dynamic_tree": True, "dynamic_tree_max_topK": 2}
    | {"use_rejection_sampling": True, "threshold_acc": 0.5},
    "use_relaxed_acceptance_for_thinking": {
        "decoding_type": "MTP",
        "max_draft_len": 1,
        "use_relaxed_acceptance_for_thinking": True,
    },
}


@pytest.mark.parametrize("option", LOSSY)
def test_processed_modes_are_refused_where_drafts_are_accepted_that_were_not_drawn(
    option: str,
) -> None:
    args = LlmArgs(model="m", speculative_config=LOSSY[option])
    intake = Intake(args, None, RequestLimits(9, (), 64, 2, None))
    for mode in MODES:
        submit = partial(intake.submission, [1])
        if mode.startswith("raw"):
            assert submit(SamplingParams(logprobs=1, logprobs_mode=mode)).requests
            continue
        submit(SamplingParams(logprobs_mode=mode))  # nothing is asked for
        with pytest.raises(ValueError, match=f"logprobs_mode = '{mode}' is refused with {option}"):
            submit(SamplingParams(logprobs=1, logprobs_mode=mode))
        with pytest.raises(ValueError, match=f"logprobs_mode = '{mode}' is refused with {option}"):
            LlmArgs(model="m", logprobs_mode=mode, speculative_config=LOSSY[option])


def test_modes_come_with_a_body_and_unknown_ones_are_refused() -> None:
    body = CompletionRequest(model="m", prompt="a", logprobs=1, logprobs_mode="raw_logits")
    assert body.to_sampling_params().logprobs_mode == "raw_logits"
    with pytest.raises(ValueError, match="logprobs_mode = 'raw': one of raw_logprobs, processed_"):
        SamplingParams.from_dict({"logprobs_mode": "raw"})
