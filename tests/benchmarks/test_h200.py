"""`benchmarks/h200.py`: what it counts and prints, that a failing job is reported, and that it
runs."""

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks import h200
from benchmarks.h200 import Job, Outcome, run_jobs, tables
from benchmarks.h200_parts.figures import Figure, Reference, point_table
from benchmarks.h200_parts.llm import Stream, check_complete, serving_details
from benchmarks.h200_parts.rounds import floor_ms
from benchmarks.h200_parts.setup import Report, Setup
from benchmarks.harness.models import (
    EAGLE3_8B,
    LLAMA_1B,
    LLAMA_8B,
    Models,
    eagle3_bytes,
    kv_bytes,
    prefill_flops,
    streamed_bytes,
)
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.models.eagle3 import Eagle3Head
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.layers import Placement
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.registry import model_config_of
from tllm_spec.outputs import CompletionOutput, RequestMetrics, RequestOutput

META = Placement(torch.bfloat16, torch.device("meta"), SINGLE_RANK)
TINY = {
    **LLAMA_8B,
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def model_of(config: dict[str, object]) -> CausalLM:
    return CausalLM(model_config_of(dict(config)), 8, META)


def matrices(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.dim() == 2)


def test_streamed_bytes_are_those_of_the_models() -> None:
    for config in (LLAMA_8B, LLAMA_1B):
        model = model_of(config)
        tied = model.config.tie_word_embeddings
        looked_up = 0 if tied else model.model.embed_tokens.weight.numel()
        assert streamed_bytes(config) == 2 * (matrices(model) - looked_up)
    config = Eagle3Config.from_dict(dict(EAGLE3_8B))
    head = Eagle3Head(config, model_of(LLAMA_8B), 3, 8, META, owns={"lm_head.weight"})
    fusion = matrices(head.fc)
    assert eagle3_bytes(1) == 2 * matrices(head)
    assert eagle3_bytes(3) == 2 * (3 * (matrices(head) - fusion) + fusion)


def test_the_floor_reads_draft_keys_once_per_draft() -> None:
    alone, with_drafts = (floor_ms(8, length, "draft", 2) for length in (0, 1000))
    keys = kv_bytes(LLAMA_8B, 8000) + 2 * kv_bytes(LLAMA_1B, 8000)
    assert with_drafts - alone == pytest.approx(keys / 4.45e12 * 1e3)


def test_prefill_operations_are_those_of_the_gemms() -> None:
    model, length = model_of(TINY), 6
    layers = matrices(model.model.layers)
    scores = sum(2 * 2 * 4 * (position + 1) * 4 for position in range(length))  # heads of 4
    expected = 2 * layers * length + 5 * scores + 2 * 40 * 16
    assert prefill_flops(3, length, TINY) == 3 * expected


def test_serving_figures_are_of_all_requests_together() -> None:
    streams = [Stream(1.0, [1.1, 1.2, 1.4]), Stream(2.0, [2.3, 2.35])]
    found = serving_details(streams)
    assert found["first token ms"] == pytest.approx(200)
    assert found["between increments ms"] == pytest.approx(100)  # of 50, 100, 200
    assert found["p99 of it"] == pytest.approx(100 + 0.98 * 100)


def test_an_answer_that_is_too_short_is_no_measurement() -> None:
    answer = CompletionOutput(0, token_ids=[1, 2])
    output = RequestOutput(1, None, [1], [answer], RequestMetrics(0.0))
    check_complete([output], 2)
    with pytest.raises(RuntimeError, match="2 tokens, not 3"):
        check_complete([output], 3)


def test_a_table_shows_what_is_met_missed_and_not_measured() -> None:
    references = {
        (1, "fast"): Reference("ms", 4.3, 4.76),
        (1, "rate"): Reference("tok/s", 490, 433),
        (1, "gone"): Reference("ms", 2.0, 3.0),
        (2, "elsewhere"): Reference("ms", 1.0),
    }
    figures = [
        Figure(1, "fast", "ms", 4.4, 3.5, {"context": 1060.4}),
        Figure(1, "rate", "tok/s", 512.3),
        Figure(2, "elsewhere", "ms", 0.5),
    ]
    lines = point_table(1, figures, references)
    assert "| fast | 4.40 ms | 4.30 | **no** | 4.76 | 3.50 | 1.26x | context 1,060 |" in lines
    assert "| rate | 512 tok/s | 490 | yes | 433 |  |  |  |" in lines
    assert "| gone | **failed** | 2.00 | no | 3.00 |  |  |  |" in lines
    assert not any("elsewhere" in line for line in lines)


def good(setup: Setup, report: Report) -> None:
    report(Figure(1, "good", "ms", 1.0))


def broken(setup: Setup, report: Report) -> None:
    report(Figure(1, "before the fault", "ms", 2.0))
    raise ValueError("a fault")


def endless(setup: Setup, report: Report) -> None:
    time.sleep(60)


def test_a_job_that_fails_or_hangs_is_reported_and_the_others_run(tmp_path: Path) -> None:
    setup = Setup(Models("zoo", "cpu", tmp_path), True, frozenset({1}))
    jobs = tuple(Job(run.__name__, frozenset({1}), run) for run in (broken, good, endless))
    outcome = run_jobs(setup, jobs[:2], 120.0)
    assert [figure.name for figure in outcome.figures] == ["before the fault", "good"]
    assert outcome.failures.keys() == {"broken"} and "exit code 1" in outcome.failures["broken"]
    assert "not done" in run_jobs(setup, jobs[2:], 0.5).failures["endless"]
    assert any(line.startswith("**broken**: ") for line in tables(outcome, setup.points, {}))


def test_a_job_runs_only_for_its_points(tmp_path: Path) -> None:
    setup = Setup(Models("zoo", "cpu", tmp_path), True, frozenset({2}))
    assert run_jobs(setup, (Job("broken", frozenset({1, 3}), broken),), 9.0) == Outcome()


def run_h200(tmp_path: Path, parts: str) -> dict[int, set[str]]:
    """Names of the figures by point."""
    file = tmp_path / "result.json"
    options = ["--shape", "zoo", "--device", "cpu", "--quick", "--parts", parts]
    assert h200.main([*options, "--output", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["failures"] == {}
    points = set(map(int, parts.split(",")))
    assert {figure["point"] for figure in result["figures"]} == points
    return {
        point: {figure["name"] for figure in result["figures"] if figure["point"] == point}
        for point in points
    }


@pytest.mark.slow
def test_rounds_prefill_and_host_time_run_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_h200(tmp_path, "1,3,4")
    printed = capsys.readouterr().out
    assert {"plain round, batch 1", "plain round, batch 3, 16 context"} <= names[1]
    ways = ("plain", *(f"{way} K=3" for way in ("EAGLE-3", "EAGLE-3 two-model", "NGram")))
    ways += ("Draft/Target two-model K=3",)
    assert names[4] == {f"host time, {way}, batch 2" for way in ways}
    assert all(f"| {name} | " in printed for own in names.values() for name in own)


@pytest.mark.slow
def test_every_point_runs_on_a_cpu(tmp_path: Path) -> None:
    names = run_h200(tmp_path, "1,2,3,4,5,6")
    wanted = {"Draft/Target two-model K=3 round, batch 2", "EAGLE-3 K=3 decoding, batch 1"}
    assert wanted <= names[2]
    assert "plain, 3 at a time, 16 in / 6 out" in names[5]
    assert "start-up, plain" in names[6]
