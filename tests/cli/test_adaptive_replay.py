"""`tllm-bench adaptive-replay` from its command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tllm_spec.cli.bench import main

Replay = Callable[..., Result]


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    def run(rounds: list[object], config: str, *options: str) -> Result:
        trace, yaml_file = tmp_path / "trace.jsonl", tmp_path / "x.yaml"
        trace.write_text("".join(json.dumps(each) + "\n" for each in rounds))
        yaml_file.write_text(config)
        return CliRunner().invoke(main, ["adaptive-replay", str(trace), "--config", str(yaml_file), *options])

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
    assert result.output.splitlines()[:3] == [f"round {i}: batch 2, draft length 7" for i in (1, 2, 3)]


def test_the_configuration_may_stand_in_llm_arguments_or_be_a_preset(replay: Replay) -> None:
    nested = "speculative_config: {decoding_type: NGram, max_draft_len: 7, adaptive: " + EMA + "}"
    assert "3 -> 7" in replay(ACCEPTED, nested).output
    assert "3 -> 7" in replay(ACCEPTED, "aggressive").output


def test_measured_times_and_the_recorded_draft_length_reach_the_cost_model(
    replay: Replay, tmp_path: Path
) -> None:
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"round_ms": {"1": {"0": 4, "1": 5}, "8": {"0": 10, "1": 30}}}))
    rounds: list[object] = [
        {"batch_size": size, "num_accepted": [1] * size, "num_steps": 1, "seconds": 0.01} for size in (1, 5)
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
    ],
)
def test_a_mistake_is_one_sentence(
    replay: Replay, rounds: list[object], config: str, options: list[str], named: str
) -> None:
    result = replay(rounds, config, *options)
    assert result.exit_code and named in result.output and "Traceback" not in result.output


def test_the_other_commands_still_need_a_model() -> None:
    result = CliRunner().invoke(main, ["throughput", "--dataset", "x"])
    assert result.exit_code == 2 and "Missing option '--model'" in result.output
