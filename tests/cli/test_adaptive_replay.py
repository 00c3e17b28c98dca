"""`tllm-bench adaptive-replay` from its command line."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tllm_spec.cli.bench import main

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


def served(ladder: str, *more: str, draft_len: int = 7) -> str:
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
        (served(EMA), [3, 3, 1]),
        # ... unless no other request can join.
        (served(EMA) + "\nmax_batch_size: 16", [3, 3, 3]),
        (served(EMA, "max_concurrency: 1"), [3, 0, 0]),
        (served(EMA, "draft_len_schedule: {1: 7, 2: 1, 9: 0}"), [3, 1, 0]),
        (served("{prior_acceptance: 1}", draft_len=2), [2, 2, 2]),
    ],
)
def test_llm_arguments_are_replayed_with_the_limits_that_an_engine_has(
    replay: Replay, config: str, expected: list[int]
) -> None:
    assert lengths(replay(ONE_OF_EACH, config, "--every_round")) == expected


def test_the_acceptance_gate_of_llm_arguments_closes_in_a_replay(replay: Replay) -> None:
    gate = ["acceptance_rate_threshold: 0.5", "acceptance_rate_window_size: 2"]
    rounds: list[object] = [{"batch_size": 1, "num_accepted": [0], "num_steps": 3}] * 4
    assert lengths(replay(rounds, served(EMA, *gate), "--every_round")) == [3, 3, 0, 0]
    assert lengths(replay(rounds, served(EMA), "--every_round")) == [3, 3, 3, 3]


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


@pytest.mark.parametrize("config", [EMA, served(EMA)])
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
        (ACCEPTED, served(EMA), ["--initial_steps", "9"], "accepted: 1, 3, 7"),
        (ACCEPTED, served("null"), [], "adaptive = None: nothing to replay"),
        (
            ACCEPTED,
            "speculative_config: {decoding_type: NGram}",
            [],
            "speculative_config.max_draft_len",
        ),
        (ACCEPTED, served(EMA, draft_len=3), [], "max_draft_len = 3 is the most"),
        (ACCEPTED, served(EMA, "max_concurency: 3"), [], "did you mean max_concurrency"),
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
