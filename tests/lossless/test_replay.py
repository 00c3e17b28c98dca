"""A replay of recorded traffic counts what serving counted, request by request, with the drafter
that served it and with another one."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.executor.harness import user_provided
from tests.lossless.cases import Case, assert_same, generate, heldout_prompts
from tests.lossless.engines import MODES, engine, tiny_engine
from tests.lossless.oracle import GetOracle
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.request import LlmRequest
from tllm_spec.grammar.guided_decoding import compiler_name
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.recording.replay import Replayed, replay, why_simulated
from tllm_spec.recording.traffic_folder import read_records, states_files
from tllm_spec.recording.traffic_record import TrafficRecord
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import Tokenizer

LIMITS: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 256}
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.7, "stop": [" return", ")"]},
    {"temperature": 1.0, "presence_penalty": 0.5},
    {"speculation": {"max_draft_len": 2}, "max_tokens": 17},
]


MTP: dict[str, dict[str, Any]] = {
    "mtp": {"decoding_type": "MTP", "num_nextn_predict_layers": 3},
    "mtp_two_model": {
        "decoding_type": "MTP",
        "num_nextn_predict_layers": 3,
        "mtp_eagle_one_model": False,
    },
}
# What they draft depends on the order of requests.
ORDERED = (
    "eagle3_sa",
    "draft_target_one_model_sa",
    "draft_target_sa",
    "draft_target_sa_tree",
    "pard_two_model_sa",
    "eagle3_sa_tree",
    "eagle3_two_model_sa_tree",
)
DEFAULT = ("eagle3_tree",)


def options_of(mode: str) -> dict[str, Any]:
    return {"speculative_config": MTP[mode]} if mode in MTP else engine(mode, 4)


def served(
    folder: Path, mode: str, share: float = 0.5, model: str = "zoo:llama"
) -> list[TrafficRecord]:
    """Two prompts with each way of sampling. share: of those with hidden states."""
    record = {"record_traffic": str(folder), "record_hidden_states": share}
    with LLM(model, **record, **LIMITS, **options_of(mode)) as llm:
        prompts = heldout_prompts(llm.get_tokenizer(), 2, 40)
        pairs = list(product(prompts, PARAMS))
        params = [SamplingParams(**{"max_tokens": 28, "seed": 3} | given) for _, given in pairs]
        llm.generate([prompt for prompt, _ in pairs], params, use_tqdm=False)
        llm.check_integrity()
    return read_records(folder)


def replayed(
    records: list[TrafficRecord], mode: str, folder: Path, model: str = "zoo:llama"
) -> Replayed:
    args = LlmArgs.from_kwargs(model, **LIMITS, **options_of(mode))
    return replay(records, args, states_files(folder))


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[] if mode in DEFAULT else [pytest.mark.slow])
        for mode, spec in MODES.items()
        if spec is not None and mode not in ORDERED
    ],
)
def test_counts_of_a_replay_are_those_of_serving(mode: str, tmp_path: Path) -> None:
    records = served(tmp_path / "traffic", mode)
    assert sum(record.stats.num_accepted_tokens for record in records) > 0
    found = replayed(records, mode, tmp_path / "traffic")
    assert found.simulated == []
    assert found.requests == [record.stats for record in records]


@pytest.mark.parametrize("mode", ["sa", pytest.param("eagle3_tree", marks=pytest.mark.slow)])
def test_traffic_of_plain_decoding_tells_what_a_drafter_would_have_done(
    mode: str, tmp_path: Path
) -> None:
    plain, drafted = served(tmp_path / "plain", "plain"), served(tmp_path / "drafted", mode)
    # Without a drafter no record says that a request wanted shorter drafts.
    pairs = [pair for pair in zip(plain, drafted, strict=True) if pair[1].draft_limit is None]
    assert len(pairs) == 8
    found = replayed([each for each, _ in pairs], mode, tmp_path / "plain")
    assert found.requests == [each.stats for _, each in pairs]


def test_a_head_is_replayed_from_recorded_states_without_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [each for each in served(tmp_path, "eagle3", 1.0) if not each.cached_tokens]
    assert len(records) == len(states_files(tmp_path)) >= 4
    monkeypatch.setattr(ModelEngine, "forward", None)
    found = replayed(records, "eagle3", tmp_path)
    assert found.requests == [each.stats for each in records]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MTP)
def test_counts_of_the_models_own_modules_are_those_of_serving(mode: str, tmp_path: Path) -> None:
    records = served(tmp_path, mode, model="zoo:deepseek")
    assert sum(record.stats.num_accepted_tokens for record in records) > 0
    found = replayed(records, mode, tmp_path, "zoo:deepseek")
    assert found.requests == [record.stats for record in records]


def record_of(prompt: list[int], output: list[int]) -> TrafficRecord:
    """A record of a greedy request that has emitted `output`."""
    chosen = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return TrafficRecord(
        id="a",
        client="",
        user="",
        arrived_us=1,
        prompt=prompt,
        output=output,
        seed=1,
        sampling=chosen | {"end_ids": [], "stop_token_ids": [], "bad_sequences": [], "edits": 0},
        max_tokens=len(output),
        draft_limit=None,
        guided=False,
        finish_reason="length",
        rounds=[[5, len(output), None]],
        num_rounds=0,
        num_emitted=0,
        drafted=[],
        accepted=[],
        cached_tokens=0,
        num_preemptions=0,
        draft_version=0,
    )


def test_requests_that_are_replayed_together_have_the_drafts_that_each_has_alone() -> None:
    """Ten windows of 6 rows would fit into 64, but nine leave no quarter of them to prompts."""
    record = record_of([5, 6, 7] * 2, [5, 6, 7] * 8)
    args = LlmArgs.from_kwargs("zoo:llama", max_num_tokens=64, **engine("sa", 5))
    (alone,) = replay([record], args).requests
    assert replay([record] * 9, args).requests == [alone] * 9


@pytest.mark.parametrize(("patience", "edits", "causes"), [(3, 1, 1), (3, 0, 0), (30, 1, 0)])
def test_a_replay_with_pauses_next_to_logits_processors_is_called_simulated(
    patience: int, edits: int, causes: int, tiny: Path, drafts: tuple[Path, Path]
) -> None:
    """Without overlap a pause begins a round earlier."""
    own = tiny_engine("draft_target", drafts, 3, max_rejected_rounds=patience)
    record = record_of([5, 6, 7], [1] * 20)
    record.sampling["edits"] = edits
    args = LlmArgs.from_kwargs(str(tiny), skip_tokenizer_init=True, **own)
    assert len(replay([record], args).simulated) == causes


def test_counts_that_serving_may_not_have_are_called_simulated() -> None:
    args = LlmArgs.from_kwargs("zoo:llama", **LIMITS, **engine("eagle3_sa", 4))
    (cause,) = why_simulated([], args)
    assert "sa_config" in cause
    record = TrafficRecord.model_construct(
        prompt=[1] * 30,
        output=[2] * 10,
        arrived_us=1,
        draft_limit=None,
        rounds=[[5, 10, None]],
        guided=False,
        num_preemptions=0,
    )
    for max_tokens, causes in ((80, 0), (64, 1)):
        pool = {"kv_cache_config": {"max_tokens": max_tokens}}
        args = LlmArgs.from_kwargs("zoo:llama", **LIMITS, **pool, **engine("draft_target", 4))
        assert len(why_simulated([record, record], args)) == causes
    without_drafts = record.model_copy(update={"draft_limit": 0})
    args = LlmArgs.from_kwargs("zoo:llama", **LIMITS, **engine("sa", 4))
    assert len(why_simulated([record, record], args)) == 0
    assert len(why_simulated([record, without_drafts], args)) == 1
    args = LlmArgs.from_kwargs("zoo:llama", **LIMITS, **engine("sa", 4, verify_budget=2))
    assert len(why_simulated([record, record], args)) == 1
    for max_batch_size, causes in ((2, 0), (3, 1)):
        rows = {"max_batch_size": max_batch_size, "max_num_tokens": 10}
        args = LlmArgs.from_kwargs("zoo:llama", **rows, **engine("sa", 4))
        assert len(why_simulated([record, record], args)) == causes


def test_records_of_another_compilers_grammars_are_called_simulated() -> None:
    pytest.importorskip("llguidance")
    args = LlmArgs.from_kwargs("zoo:llama", **LIMITS, **engine("sa", 4))
    values = {"prompt": [1], "output": [2], "arrived_us": 1, "rounds": [], "num_preemptions": 0}
    for guided, causes in (
        (False, 0), (compiler_name(), 1), (True, 2), ("llguidance 1.0.0", 2),
        ("thinking_budget", 1), (f"thinking_budget {compiler_name()}", 1),
        ("thinking_budget llguidance 1.0.0", 2),
    ):  # fmt: skip
        record = TrafficRecord.model_construct(**values, draft_limit=None, guided=guided)
        assert len(why_simulated([record], args)) == causes


BUDGET: dict[str, Any] = {"thinking_token_budget": 5}
YES_OR_NO: dict[str, Any] = {"guided_decoding": {"choice": ["yes", "no"]}}
# Nothing is forced or excluded.
NO_EFFECT: list[dict[str, Any]] = [
    {"thinking_token_budget": 500},
    {"guided_decoding": {"regex": "(?s:.*)"}},
    {"thinking_token_budget": 500, "guided_decoding": {"regex": "(?s:.*)"}},
]


@pytest.mark.parametrize("mode", ["eagle3_tree", pytest.param("sa", marks=pytest.mark.slow)])
def test_a_replay_of_grammars_and_budgets_has_their_texts_and_says_what_it_lacks(
    mode: str, tmp_path: Path
) -> None:
    """Where they change nothing it has the acceptance of serving, too."""
    pytest.importorskip("llguidance")
    record = {"record_traffic": str(tmp_path), "reasoning_parser": "qwen3"}
    given = [*NO_EFFECT, BUDGET, YES_OR_NO, BUDGET | YES_OR_NO]
    with LLM("zoo:llama", **record, **LIMITS, **options_of(mode)) as llm:
        params = [SamplingParams(max_tokens=40, seed=3, **own) for own in given]
        prompts = [f"import os{each}\nimport re\nimport os\n<think>" for each in range(6)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.check_integrity()
    assert isinstance(outputs, list)
    texts = [output.outputs[0].token_ids for output in outputs]
    found = {tuple(each.prompt): each for each in read_records(tmp_path)}
    records = [found[tuple(output.prompt_token_ids)] for output in outputs]
    kinds = ["thinking_budget", compiler_name(), f"thinking_budget {compiler_name()}"]
    assert [each.guided for each in records] == kinds * 2
    assert [each.output for each in records] == texts
    again = replayed(records, mode, tmp_path)
    assert [each.num_emitted_tokens for each in again.requests] == [
        each.num_emitted for each in records
    ]
    lengths = [each.acceptance_length for each in again.requests]
    assert lengths[:3] == [each.stats.acceptance_length for each in records[:3]]
    assert sum(each.num_accepted_tokens for each in again.requests[:3]) > 0
    assert again.simulated == ["some requests had a grammar or a budget"]


# A prefix that comes back from host memory gives the text that it gives on the device, and that of
# an engine without prefix reuse.


QUICK = ("ngram",)
OTHERS = [[number] * 100 for number in range(20, 32)]
HOST_CACHE_PARAMS = [
    SamplingParams(max_tokens=12, ignore_eos=True, seed=5, temperature=temperature)
    for temperature in (0.0, 0.9)
]


def ask(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """The tokens of each prompt, with and without sampling, and the tokens that were cached."""
    found = []
    for params in HOST_CACHE_PARAMS:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert isinstance(outputs, list) and not any(output.error for output in outputs)
        found += [(output.outputs[0].token_ids, output.cached_tokens) for output in outputs]
    return found


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=[] if mode in QUICK else [pytest.mark.slow]) for mode in MODES],
)
def test_a_hit_in_host_memory_gives_the_text_of_a_hit_on_the_device(mode: str) -> None:
    options: dict[str, Any] = engine(mode, 3) | {"max_batch_size": 4, "max_seq_len": 256}
    prompts = [[3 + number, *range(40, 129)] for number in range(3)]
    cache = {"tokens_per_block": 16, "max_tokens": 1200}
    with LLM("zoo:llama", kv_cache_config={"enable_block_reuse": False}, **options) as llm:
        expected = [tokens for tokens, _ in ask(llm, prompts)]
    with LLM("zoo:llama", kv_cache_config=cache | {"host_cache_size": 1 << 28}, **options) as llm:
        ask(llm, prompts)
        on_device = ask(llm, prompts)
        host = llm._executor.parts.kv.cache.state()["host"]
        assert host["loaded"] == 0
        llm.generate(OTHERS, HOST_CACHE_PARAMS[0], use_tqdm=False)
        assert llm._executor.parts.kv.cache.match([*prompts[0], 1]) == 0, "it is still there"
        in_host = ask(llm, prompts)
        host = llm._executor.parts.kv.cache.state()["host"]
        assert host["loaded"] >= 5 * len(prompts)
        llm.check_integrity()
    assert [tokens for tokens, _ in on_device] == [tokens for tokens, _ in in_host] == expected
    assert all(cached == 80 for _, cached in on_device + in_host)


# A stop ends the text where plain decoding ends it, at whatever place of an accepted run it comes,
# and also while the next round is in flight.


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
    llm: LLM, cases: list[Case], plain: list[RequestOutput], oracle: GetOracle
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
