"""A replay of recorded traffic counts what serving counted, request by request, with the drafter
that served it and with another one."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.lossless.cases import heldout_prompts
from tests.lossless.engines import MODES, engine, tiny_engine
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.grammar.guided_decoding import compiler_name
from tllm_spec.llm import LLM
from tllm_spec.recording.replay import Replayed, replay, why_simulated
from tllm_spec.recording.traffic_folder import read_records, states_files
from tllm_spec.recording.traffic_record import TrafficRecord
from tllm_spec.sampling_params import SamplingParams

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
        params = [SamplingParams(**{"max_tokens": 40, "seed": 3} | given) for _, given in pairs]
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
    # Without a drafter nobody keeps that a request wanted shorter drafts.
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
    for guided, causes in ((False, 0), (compiler_name(), 1), (True, 2), ("llguidance 1.0.0", 2)):
        record = TrafficRecord.model_construct(**values, draft_limit=None, guided=guided)
        assert len(why_simulated([record], args)) == causes
