"""`tllm-bench tune`: the simulation of recorded arrivals, and its choice against what was really
served."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.lossless.cases import heldout_prompts
from tllm_spec.bench import tune as prompt_times
from tllm_spec.bench.tune import (
    PLAIN,
    Candidate,
    Request,
    Score,
    Times,
    best_of,
    candidates_of,
    score,
    score_of,
    simulate,
)
from tllm_spec.bench.tune_report import advice, best_yaml, share_of_other_rounds, tune
from tllm_spec.cli.bench import main
from tllm_spec.config.llm_args import LlmArgs, read_options
from tllm_spec.config.speculative_config import speculative_config_from
from tllm_spec.executor.build import BuiltExecutor, build_executor
from tllm_spec.executor.request import LlmRequest
from tllm_spec.llm import LLM
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.recording.replay import run_to_end
from tllm_spec.recording.traffic_folder import read_records
from tllm_spec.recording.traffic_record import TrafficRecord
from tllm_spec.sampling_params import SamplingParams

LIMITS: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 256}
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {"decoding_type": "Eagle3", "speculative_model": "zoo:llama-eagle3"},
    "ngram": {"decoding_type": "NGram", "max_matching_ngram_size": 3},
}


@pytest.mark.parametrize(
    ("arrivals", "rounds", "max_batch_size", "latencies"),
    [
        ([0, 0], [1, 2], 1, [11, 23]),  # one after the other
        ([0, 0], [1, 2], 2, [22, 23]),  # together, where a round takes twice as long
        ([0, 10.5], [3, 1], 2, [24, 13.5]),  # the second's prompt is read next to a round
        ([0, 30], [0, 1], 2, [10, 11]),  # idle time does not count
    ],
)
def test_requests_end_when_their_rounds_have_been_played(
    arrivals: list[float], rounds: list[int], max_batch_size: int, latencies: list[float]
) -> None:
    """A prompt has 100 tokens and takes 10 seconds, and a round a second for each request."""
    requests = [Request(at, 100, number) for at, number in zip(arrivals, rounds, strict=True)]
    times = Times(float, lambda tokens: tokens / 10)
    assert simulate(requests, times, max_batch_size)[-1] == latencies


def test_a_chain_is_tried_with_shorter_drafts_and_a_tree_as_it_is() -> None:
    chain = speculative_config_from(DRAFTERS["eagle3"] | {"max_draft_len": 4})
    assert [each.name for each in candidates_of("e", chain)] == ["e 1", "e 2", "e 3", "e 4"]
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_draft_len": 3}
    (only,) = candidates_of("e", speculative_config_from(DRAFTERS["eagle3"] | tree))
    assert only.name == "e 3x2/6"
    adaptive = speculative_config_from(DRAFTERS["eagle3"] | tree | {"adaptive": {}})
    found = candidates_of("e", adaptive)
    assert [each.shape for each in found] == ["1", "2", "3", "2x2/3", "3x2/6"]
    made = [speculative_config_from(each.spec).shapes.longest.name for each in found]
    assert made == [each.shape for each in found]


def test_the_best_configuration_says_why() -> None:
    def of(candidate: Candidate, ms: float) -> Score:
        return Score(candidate, 2.0, 100.0, ms, 1.0, 10)

    spec = {"decoding_type": "SA", "max_draft_len": 3, "adaptive": None}
    scores = [of(Candidate(PLAIN, PLAIN, None), 6.0), of(Candidate("sa", "3", spec), 4.0)]
    text = best_yaml(scores)
    assert "# sa 3: 4.000 ms a token" in text and "1.50 times that" in text
    assert text.endswith("speculative_config:\n  decoding_type: SA\n  max_draft_len: 3\n")


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        ((6.0, 5.0, 4.0, 3.0), "better: sa 3 takes 0.75 of the time that head 2 takes"),
        ((6.0, 5.0, 4.0, 3.95), "no other of these drafters is better than head (head 2)."),
        ((3.0, 5.0, 4.0, 3.5), "better: plain takes 0.75 of"),
    ],
)
def test_a_sentence_says_whether_another_drafter_would_be_better(
    ms: Sequence[float], said: str
) -> None:
    names = (PLAIN, PLAIN), ("head", "1"), ("head", "2"), ("sa", "3")
    found = [Candidate(*name, None if name[0] == PLAIN else {}) for name in names]
    scores = [Score(each, 1.0, 1.0, own, 1.0, 1) for each, own in zip(found, ms, strict=True)]
    assert said in advice(scores)


def test_the_best_configuration_is_whole_and_loads_again_equal(tiny: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_batch_size": 2,
        "max_seq_len": 64,
        "kv_cache_config": {"enable_block_reuse": False, "max_tokens": 512},
        "speculative_config": {"decoding_type": "SA", "max_draft_len": 2},
    }
    with LLM(tiny, record_traffic=str(tmp_path / "traffic"), **options) as llm:
        llm.generate([1, 2, 1, 2, 1], SamplingParams(max_tokens=9, ignore_eos=True))
    config = tmp_path / "own.yaml"
    config.write_text(json.dumps(options | {"record_traffic": str(tmp_path / "traffic")}))
    scores = tune(tmp_path / "traffic", None, [config])
    for each in scores:
        (written := tmp_path / "best.yaml").write_text(best_yaml([each]))
        found = LlmArgs.from_kwargs(str(tiny), **read_options(written))
        expected = options | {"speculative_config": each.candidate.spec}
        assert found == LlmArgs.from_kwargs(str(tiny), **expected), each.candidate.name


def test_a_data_set_is_tuned_on_the_outputs_that_the_model_writes(
    tiny: Path, tmp_path: Path
) -> None:
    config, data = tmp_path / "sa.yaml", tmp_path / "data.jsonl"
    spec = {"decoding_type": "SA", "max_draft_len": 1}
    options = {"max_batch_size": 2, "max_seq_len": 64, "skip_tokenizer_init": True}
    config.write_text(json.dumps(options | {"speculative_config": spec}))
    lines = [{"input_ids": [1, 2, 1, 2], "output_tokens": 7 + number} for number in range(2)]
    data.write_text("\n".join(map(json.dumps, lines)))
    scores = tune(data, str(tiny), [config])
    assert [each.candidate.name for each in scores] == ["plain", "sa 1"]
    assert scores[0].tokens_per_round == 1
    with pytest.raises(ValueError, match="--model, which is missing"):
        tune(data, None, [config])


def test_rounds_that_differ_from_serving_are_counted_once_each() -> None:
    served = TrafficRecord.model_construct(
        num_rounds=10, num_emitted=16, drafted=[10, 10], accepted=[5, 1]
    )
    same, other = (
        SpeculativeStats(10, 16, (10, 10), (5, 1)),
        SpeculativeStats(9, 16, (9, 9), (5, 2)),
    )
    assert share_of_other_rounds([served], [same]) == 0.0
    # With 0, 1 and 2 drafts accepted: 5, 4 and 1 rounds, then 4, 3 and 2.
    assert share_of_other_rounds([served, served], [same, other]) == 2 / 20


def test_a_model_without_a_tokenizer_is_tuned(tiny: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_batch_size": 2, "max_seq_len": 64}
    with LLM(tiny, record_traffic=str(tmp_path / "traffic"), **options) as llm:
        llm.generate([1, 2, 1, 2, 1], SamplingParams(max_tokens=9, ignore_eos=True))
    config = tmp_path / "sa.yaml"
    spec = {"decoding_type": "SA", "max_draft_len": 1}
    config.write_text(json.dumps({"speculative_config": spec, "max_batch_size": 2}))
    scores = tune(tmp_path / "traffic", None, [config])
    assert [each.candidate.name for each in scores] == ["plain", "sa 1"]
    assert all(each.output_tokens_per_s > 0 for each in scores)


def prompts_of(kind: str, llm: LLM) -> tuple[list[list[int]], SamplingParams]:
    """Code that goes on, edits that copy the prompt, and text at a high temperature."""
    code = heldout_prompts(llm.get_tokenizer(), 6, 40)
    if kind == "edits":
        return [each + each[:20] for each in code], SamplingParams(max_tokens=40, ignore_eos=True)
    temperature = 1.2 if kind == "hot" else 0.0
    return code, SamplingParams(max_tokens=40, temperature=temperature, seed=1, ignore_eos=True)


def served(folder: Path, kind: str, spec: Any) -> list[TrafficRecord]:
    with LLM("zoo:llama", record_traffic=str(folder), speculative_config=spec, **LIMITS) as llm:
        prompts, params = prompts_of(kind, llm)
        llm.generate(prompts, params, use_tqdm=False)
    return read_records(folder)


def seconds_of(candidate: Candidate, batch_size: int) -> float:
    length = 0 if candidate.spec is None else candidate.spec["max_draft_len"]
    return (1 + 0.06 * length) * (1 + 0.05 * batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["code", "edits", "hot"])
def test_the_choice_is_as_good_as_the_best_really_served(kind: str, tmp_path: Path) -> None:
    plain = served(tmp_path / "plain", kind, None)
    args = LlmArgs.from_kwargs("zoo:llama", **LIMITS)
    candidates = [Candidate(PLAIN, PLAIN, None)]
    for name, spec in DRAFTERS.items():
        candidates += candidates_of(name, speculative_config_from(spec | {"max_draft_len": 5}))
    tuned, real = [], []
    for number, each in enumerate(candidates):
        times = Times(partial(seconds_of, each), lambda tokens: tokens / 100)
        tuned.append(score(each, plain, args, times, 4))
        records = served(tmp_path / str(number), kind, each.spec)
        real.append(really(each, plain, records, times))
    choice = best_of(tuned).candidate
    (chosen,) = [found for found in real if found.candidate is choice]
    assert chosen.ms_per_token <= 1.03 * best_of(real).ms_per_token


def really(
    candidate: Candidate,
    arrived: Sequence[TrafficRecord],
    records: Sequence[TrafficRecord],
    times: Times,
) -> Score:
    """By the rounds that serving took, with the same arrivals. No two prompts are equal."""
    by_prompt = {tuple(each.prompt): each for each in records}
    found = [by_prompt[tuple(each.prompt)] for each in arrived]
    if candidate.spec is None:
        return score(candidate, arrived, LlmArgs.from_kwargs("zoo:llama"), times, 4)
    return score_of(candidate, arrived, [each.stats for each in found], times, 4)


# Prompt times of `tllm-bench tune`, with a clock that the prompts' tokens move.


OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_batch_size": 2, "max_seq_len": 64}
LENGTHS = (5, 20, 20, 37)


@pytest.fixture
def records(tiny: Path, tmp_path: Path) -> list[TrafficRecord]:
    prompts = [[1 + token % 9 for token in range(length)] for length in LENGTHS]
    with LLM(tiny, record_traffic=str(tmp_path / "traffic"), **OPTIONS) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    return read_records(tmp_path / "traffic")


def test_prompts_are_measured_alone_and_together_and_read_as_a_whole(
    tiny: Path, records: list[TrafficRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sizes = SimpleNamespace(now=0.0), list[int]()

    def requests(*arguments: Any) -> list[LlmRequest]:
        found = original(*arguments)
        assert len({each.cache_salt for each in found}) == len(found)
        sizes.append(sum(len(each.tokens) for each in found))
        made.extend(found)
        return found

    def run(built: BuiltExecutor, last: Sequence[LlmRequest]) -> None:
        run_to_end(built, last)
        assert all(len(each.tokens) == each.prompt_len + 1 for each in made)
        assert not any(each.cached_tokens for each in made)
        clock.now += prompt_times.IN_A_ROW * (1 + sizes[-1] / 10)

    made, original = list[LlmRequest](), prompt_times._requests
    monkeypatch.setattr(prompt_times, "_requests", requests)
    monkeypatch.setattr(prompt_times, "run_to_end", run)
    monkeypatch.setattr(prompt_times, "perf_counter", lambda: clock.now)
    args = LlmArgs.from_kwargs(tiny, **OPTIONS)
    built = build_executor(args, None, lambda responses: None)
    seconds = prompt_times.measured_prompt_seconds(built, records, 2, with_drafts=False)
    assert set(sizes) == {5, 20, 37, 40}
    assert [seconds(number) for number in (5, 20, 30, 40, 100)] == pytest.approx([1.5, 3, 4, 5, 11])


# `tllm-bench adaptive-replay` from its command line.


ROOT = Path(__file__).resolve().parent.parent.parent
Replay = Callable[..., Result]


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    def run(rounds: list[object], config: str, *options: str) -> Result:
        trace, yaml_file = tmp_path / "trace.jsonl", tmp_path / "x.yaml"
        trace.write_text("".join(json.dumps(each) + "\n" for each in rounds))
        yaml_file.write_text(config)
        return CliRunner().invoke(
            main, ["adaptive-replay", str(trace), "--config", str(yaml_file), *options]
        )

    return run


ACCEPTED = [{"batch_size": 2, "num_accepted": [3, 3]}] * 20
EMA = "{strategy: ema, 1: {candidate_steps: [1, 3, 7]}}"


def test_a_switch_is_printed_with_its_round_and_the_state_comes_last(replay: Replay) -> None:
    result = replay(ACCEPTED, EMA, "--initial_steps", "3")
    assert result.exit_code == 0, result.output
    first, _, state = result.output.partition("\n")
    assert first == "round 15: batch 2, draft length 3 -> 7"
    (switch,) = json.loads(state)["decisions"]["last"]
    assert (switch["old_steps"], switch["new_steps"]) == (3, 7) and "2.96" in switch["reason"]


def test_every_round_is_printed_on_request(replay: Replay) -> None:
    result = replay(ACCEPTED[:3], EMA, "--initial_steps", "7", "--every_round")
    assert result.output.splitlines()[:3] == [
        f"round {i}: batch 2, draft length 7" for i in (1, 2, 3)
    ]


def test_the_configuration_may_be_llm_arguments_or_a_preset(replay: Replay) -> None:
    nested = "speculative_config: {decoding_type: NGram, max_draft_len: 7, adaptive: " + EMA + "}"
    assert "3 -> 7" in replay(ACCEPTED, nested).output
    assert "3 -> 7" in replay(ACCEPTED, "aggressive").output


def adaptive_replay_served(ladder: str, *more: str, draft_len: int = 7) -> str:
    """LLM arguments with `adaptive` and further keys next to it."""
    spec = ["decoding_type: NGram", f"max_draft_len: {draft_len}", f"adaptive: {ladder}", *more]
    return "max_num_tokens: 64\nspeculative_config: {" + ", ".join(spec) + "}"


def lengths(result: Result) -> list[int]:
    """The draft length of every round that was printed."""
    assert result.exit_code == 0, result.output
    rounds = (
        line.partition(" -> ")[0]
        for line in result.output.splitlines()
        if line.startswith("round ")
    )
    return [int(line.rpartition(" ")[2]) for line in rounds]


ONE_OF_EACH: list[object] = [
    {"batch_size": size, "num_accepted": [0] * size} for size in (1, 2, 16)
]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (EMA, [3, 3, 3]),
        # 64 tokens are 4 for each of 16 requests, and prompts may need some of them ...
        (adaptive_replay_served(EMA), [3, 3, 1]),
        # ... unless no other request can join.
        (adaptive_replay_served(EMA) + "\nmax_batch_size: 16", [3, 3, 3]),
        (adaptive_replay_served(EMA, "max_concurrency: 1"), [3, 0, 0]),
        (adaptive_replay_served(EMA, "draft_len_schedule: {1: 7, 2: 1, 9: 0}"), [3, 1, 0]),
        (adaptive_replay_served("{prior_acceptance: 1}", draft_len=2), [2, 2, 2]),
    ],
)
def test_llm_arguments_are_replayed_with_the_limits_that_an_engine_has(
    replay: Replay, config: str, expected: list[int]
) -> None:
    assert lengths(replay(ONE_OF_EACH, config, "--every_round")) == expected


def test_the_acceptance_gate_of_llm_arguments_closes_in_a_replay(replay: Replay) -> None:
    gate = ["acceptance_rate_threshold: 0.5", "acceptance_rate_window_size: 2"]
    rounds: list[object] = [{"batch_size": 1, "num_accepted": [0], "num_steps": 3}] * 4
    assert lengths(replay(rounds, adaptive_replay_served(EMA, *gate), "--every_round")) == [
        3,
        3,
        0,
        0,
    ]
    assert lengths(replay(rounds, adaptive_replay_served(EMA), "--every_round")) == [3, 3, 3, 3]


def test_rounds_of_long_contexts_are_decided_apart(replay: Replay) -> None:
    short, long = (
        {"batch_size": 8, "num_accepted": [accepted] * 8, "num_steps": 3, "context_len": tokens}
        for accepted, tokens in ((3, 100), (0, 9000))
    )
    rounds: list[object] = ([short] * 20 + [long] * 20) * 4
    ladder = "candidate_steps: [0, 3]"
    apart = lengths(replay(rounds, "{" + ladder + ", context_buckets: [4096]}", "--every_round"))
    together = lengths(replay(rounds, "{" + ladder + "}", "--every_round"))
    # The right length of each round is 3 drafts for short contexts and none for long ones.
    wrong = [
        sum(steps != (0 if each is long else 3) for steps, each in zip(found, rounds, strict=True))
        for found in (apart, together)
    ]
    assert wrong[0] < 15 < 40 < wrong[1], wrong


@pytest.mark.parametrize("config", [EMA, adaptive_replay_served(EMA)])
def test_the_first_draft_length_can_be_chosen(replay: Replay, config: str) -> None:
    assert lengths(replay(ACCEPTED[:1], config, "--initial_steps", "1", "--every_round")) == [1]


def test_the_keys_of_adaptive_are_replayed_without_torch(tmp_path: Path) -> None:
    trace, config = tmp_path / "trace.jsonl", tmp_path / "x.yaml"
    trace.write_text(json.dumps(ACCEPTED[0]) + "\n")
    config.write_text(EMA)
    arguments = ["adaptive-replay", str(trace), "--config", str(config)]
    code = "import sys; sys.modules['torch'] = None\nfrom tllm_spec.cli.bench import main"
    code = f"{code}\nmain({arguments})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_measured_times_and_the_recorded_draft_length_reach_the_cost_model(
    replay: Replay, tmp_path: Path
) -> None:
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"round_ms": {"1": {"0": 4, "1": 5}, "8": {"0": 10, "1": 30}}}))
    rounds: list[object] = [
        {"batch_size": size, "num_accepted": [1] * size, "num_steps": 1, "seconds": 0.01}
        for size in (1, 5)
    ]
    options = ["--round_times", str(times), "--graph_batch_sizes", "1,8", "--every_round"]
    result = replay(rounds, "{candidate_steps: [0, 1]}", *options)
    assert "round 1: batch 1, draft length 1" in result.output
    assert "round 2: batch 5, draft length 0" in result.output


@pytest.mark.parametrize(
    ("rounds", "config", "options", "named"),
    [
        ([[1]], EMA, [], "line 1 of the trace"),
        ([{"batch_size": 0, "num_accepted": []}], EMA, [], "batch_size = 0"),
        ([*ACCEPTED, {"batch_size": 1}], EMA, [], "line 21 of the trace: num_accepted is required"),
        (ACCEPTED, "{strategy: best}", [], "adaptive.strategy = 'best'"),
        (ACCEPTED, EMA, ["--graph_batch_sizes", "1,x"], "1,x"),
        (
            [*ACCEPTED, {"batch_size": 1, "num_accepted": [1, 1]}],
            EMA,
            [],
            "line 21 of the trace: num_accepted has 2 numbers, and batch_size = 1",
        ),
        (
            [{"batch_size": 2, "num_accepted": [1, 4], "num_steps": 3}],
            EMA,
            [],
            "line 1 of the trace: num_accepted has 4, and num_steps = 3",
        ),
        (ACCEPTED, EMA, ["--initial_steps", "9"], "initial_steps = 9 is in no ladder"),
        (ACCEPTED, adaptive_replay_served(EMA), ["--initial_steps", "9"], "accepted: 1, 3, 7"),
        (ACCEPTED, adaptive_replay_served("null"), [], "adaptive = None: nothing to replay"),
        (
            ACCEPTED,
            "speculative_config: {decoding_type: NGram}",
            [],
            "speculative_config.max_draft_len",
        ),
        (ACCEPTED, adaptive_replay_served(EMA, draft_len=3), [], "max_draft_len = 3 is the most"),
        (
            ACCEPTED,
            adaptive_replay_served(EMA, "max_concurency: 3"),
            [],
            "did you mean max_concurrency",
        ),
        (ACCEPTED, "{max_batch_size: 8, 5: {}}", [], "must hold a mapping of option names"),
    ],
)
def test_a_mistake_is_reported_in_one_sentence(
    replay: Replay, rounds: list[object], config: str, options: list[str], named: str
) -> None:
    result = replay(rounds, config, *options)
    assert result.exit_code and named in result.output and "Traceback" not in result.output


def test_a_trace_that_is_not_utf_8_is_refused_with_its_name(tmp_path: Path) -> None:
    trace, config = tmp_path / "trace.jsonl", tmp_path / "x.yaml"
    trace.write_bytes(b'{"batch_size": 1, "num_accepted": []}\n{"caf\xe9": 1}\n')
    config.write_text(EMA)
    result = CliRunner().invoke(main, ["adaptive-replay", str(trace), "--config", str(config)])
    assert result.exit_code == 1 and f"cannot read {trace}: 'utf-8' codec" in result.output


def test_llm_arguments_without_speculation_are_refused(replay: Replay) -> None:
    plain = (ROOT / "yaml_examples" / "plain.yaml").read_text(encoding="utf-8")
    result = replay(ACCEPTED, plain)
    assert result.exit_code == 1 and "speculative_config = None: nothing to replay" in result.output
    assert len(result.output.splitlines()) == 1, result.output


def test_the_other_commands_still_need_a_model() -> None:
    result = CliRunner().invoke(main, ["throughput", "--dataset", "x"])
    assert result.exit_code == 2 and "Missing option '--model'" in result.output
