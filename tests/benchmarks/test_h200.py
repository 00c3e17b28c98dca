"""`benchmarks/h200.py`: what it counts and prints, that a fault in one job is told, and that it
runs at all."""

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import h200_rounds
import pytest
import torch
from driven_rounds import HostTime, Rounds, Timed, gap_between_launches, stopwatch
from h200 import Job, Outcome, run_jobs, tables
from h200_figures import Figure, Reference, table
from h200_llm import Stream, check_complete, serving_details
from h200_rounds import floor_ms
from h200_setup import Report, Setup
from h200_startup import checkpoint_shapes, peak_host_growth, write_checkpoint
from model_shapes import (
    EAGLE3_8B,
    LLAMA_1B,
    LLAMA_8B,
    eagle3_bytes,
    kv_bytes,
    prefill_flops,
    streamed_bytes,
)

from tllm_spec.distributed.mapping import SINGLE_RANK
from tllm_spec.executor.rounds.transfer import ToHost
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.eagle3 import Eagle3Head
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.llama import LlamaForCausalLM
from tllm_spec.models.module import Placement
from tllm_spec.models.registry import load_model
from tllm_spec.models.weights import weight_table
from tllm_spec.outputs import CompletionOutput, RequestMetrics, RequestOutput

ROOT = Path(__file__).resolve().parents[2]
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


def model_of(config: dict[str, object]) -> LlamaForCausalLM:
    return LlamaForCausalLM(ModelConfig.from_dict(dict(config)), 8, META)


def matrices(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.dim() == 2)


def test_the_bytes_of_a_step_are_those_that_the_bars_were_set_by() -> None:
    assert streamed_bytes(LLAMA_8B) / 1e9 == pytest.approx(15.01, abs=0.005)
    assert kv_bytes(LLAMA_8B, 64 * 1024) / 1e9 == pytest.approx(8.6, abs=0.05)
    assert floor_ms(1, 0) == pytest.approx(3.38, abs=0.01)
    assert floor_ms(1, 0, "eagle3", 3) == pytest.approx(3.9, abs=0.01)


def test_bytes_are_counted_as_the_models_have_them() -> None:
    for config in (LLAMA_8B, LLAMA_1B):
        model = model_of(config)
        looked_up = (
            0 if model.config.tie_word_embeddings else model.model.embed_tokens.weight.numel()
        )
        assert streamed_bytes(config) == 2 * (matrices(model) - looked_up)
    head = Eagle3Head(Eagle3Config.from_dict(dict(EAGLE3_8B)), model_of(LLAMA_8B), 3, 8, META)
    fusion = matrices(head.fc)
    assert eagle3_bytes(1) == 2 * matrices(head)
    assert eagle3_bytes(3) == 2 * (3 * (matrices(head) - fusion) + fusion)


def test_a_drafts_keys_are_read_once_for_each_draft() -> None:
    alone, with_drafts = (floor_ms(8, length, "draft", 2) for length in (0, 1000))
    keys = kv_bytes(LLAMA_8B, 8000) + 2 * kv_bytes(LLAMA_1B, 8000)
    assert with_drafts - alone == pytest.approx(keys / 4.45e12 * 1e3)


def test_the_floor_of_256_rows_is_what_their_linears_take_and_the_other_bytes() -> None:
    keys_ms = kv_bytes(LLAMA_8B, 256 * 512) / 4.45e12 * 1e3
    assert floor_ms(256, 512) == pytest.approx(7.14 + keys_ms)
    assert floor_ms(64, 0, "eagle3", 3) == pytest.approx(7.14 + eagle3_bytes(3) / 4.45e12 * 1e3)


def test_operations_of_a_prefill_are_those_of_its_products() -> None:
    model, length = model_of(TINY), 6
    layers = matrices(model.model.layers)
    scores = sum(
        2 * 2 * 4 * (position + 1) * 4 for position in range(length)
    )  # heads of 4, q k and p v
    expected = 2 * layers * length + 5 * scores + 2 * 40 * 16
    assert prefill_flops(3, length, TINY) == 3 * expected


def test_a_checkpoint_has_exactly_the_tensors_that_the_model_loads(tmp_path: Path) -> None:
    found = {name: shape for shard in checkpoint_shapes(LLAMA_8B) for name, shape in shard.items()}
    assert found == {name: slot.shape for name, slot in weight_table(model_of(LLAMA_8B)).items()}
    num_bytes = write_checkpoint(TINY, tmp_path, torch.device("cpu"))
    model = load_model(tmp_path, dtype=torch.bfloat16, device=torch.device("cpu"), max_positions=8)
    assert num_bytes == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert len(list(tmp_path.glob("*.safetensors"))) == 3  # 4 layers, 1 layer, the rest


def test_serving_figures_are_of_all_requests_together() -> None:
    streams = [Stream(1.0, [1.1, 1.2, 1.4]), Stream(2.0, [2.3, 2.35])]
    found = serving_details(streams)
    assert found["first token ms"] == pytest.approx(200)
    assert found["its p99"] == pytest.approx(100 + 0.99 * 200)
    assert found["between increments ms"] == pytest.approx(100)  # of 50, 100, 200
    assert found["p99 of it"] == pytest.approx(100 + 0.98 * 100)


def test_an_answer_that_is_too_short_is_no_measurement() -> None:
    output = RequestOutput(
        1, None, [1], [CompletionOutput(0, token_ids=[1, 2])], RequestMetrics(0.0)
    )
    check_complete([output], 2)
    with pytest.raises(RuntimeError, match="2 tokens, not 3"):
        check_complete([output], 3)


def test_a_table_says_what_is_met_missed_and_was_not_measured() -> None:
    references = {
        (1, "fast"): Reference("ms", 4.3, 4.76, stretch=3.9),
        (1, "slow"): Reference("ms", 4.3, None),
        (1, "rate"): Reference("tok/s", 490, 433),
        (1, "gone"): Reference("ms", 2.0, 3.0),
        (2, "elsewhere"): Reference("ms", 1.0),
    }
    figures = [
        Figure(1, "fast", "ms", 4.2, 3.5, {"context": 1060.4}),
        Figure(1, "slow", "ms", 4.4),
        Figure(1, "rate", "tok/s", 512.3),
        Figure(2, "elsewhere", "ms", 0.5),
    ]
    lines = table(1, figures, references)
    assert "| fast | 4.20 ms | 4.30 (3.90) | yes | 4.76 | 3.50 | 1.20x | context 1,060 |" in lines
    assert "| slow | 4.40 ms | 4.30 | **no** |  |  |  |  |" in lines
    assert "| rate | 512 tok/s | 490 | yes | 433 |  |  |  |" in lines
    assert "| gone | **failed** | 2.00 | no | 3.00 | | | |" in lines
    assert not any("elsewhere" in line for line in lines)


def good(setup: Setup, report: Report) -> None:
    report(Figure(1, "good", "ms", 1.0))


def broken(setup: Setup, report: Report) -> None:
    report(Figure(1, "before the fault", "ms", 2.0))
    raise ValueError("a fault")


def endless(setup: Setup, report: Report) -> None:
    time.sleep(60)


def test_a_job_that_fails_or_hangs_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    setup = Setup("zoo", "cpu", True, frozenset({1}), tmp_path)
    jobs = tuple(Job(run.__name__, frozenset({1}), run) for run in (broken, good, endless, good))
    outcome = run_jobs(setup, jobs, 2.0)
    assert [figure.name for figure in outcome.figures] == ["before the fault", "good"]
    assert "exit code 1" in outcome.failures["broken"]
    assert "not done" in outcome.failures["endless"]
    assert "not begun" in outcome.failures["good"]  # the second: the hanging one took all the time
    assert "**broken**: ended with exit code 1; see its messages" in tables(
        outcome, setup.points, {}
    )


def test_jobs_run_only_for_points_that_are_asked_for(tmp_path: Path) -> None:
    setup = Setup("zoo", "cpu", True, frozenset({2}), tmp_path)
    assert run_jobs(setup, (Job("broken", frozenset({1, 3}), broken),), 9.0) == Outcome()


def test_host_time_leaves_out_the_wait_for_the_device() -> None:
    def step() -> None:
        time.sleep(0.002)
        ToHost([]).wait()

    rounds = Rounds.__new__(Rounds)
    rounds.executor = SimpleNamespace(step=step)  # type: ignore[assignment] # only its step is asked for
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToHost, "wait", lambda self: time.sleep(0.2))
        found = rounds.host_time(3)
    assert 2.0 <= found.median < 100 and found.launch == 0.0


def test_a_stopwatch_leaves_the_method_as_it_was() -> None:
    before = ToHost.wait
    with stopwatch(ToHost, "wait") as seconds:
        assert ToHost([]).wait() == []
    assert len(seconds) == 1 and ToHost.wait is before


def test_the_gap_between_launches_does_not_count_copies() -> None:
    def work(
        start: float, duration: float, correlation: int, kind: str = "kernel"
    ) -> dict[str, object]:
        return {"cat": kind, "ts": start, "dur": duration, "args": {"correlation": correlation}}

    launches = [{"name": "cudaGraphLaunch", "args": {"correlation": number}} for number in (1, 2)]
    events = [
        *launches,
        work(0, 50, 1),
        work(40, 60, 1),
        work(105, 10, 7, "gpu_memcpy"),
        work(130, 50, 2),
    ]
    assert gap_between_launches(events) == 20


def test_the_gaps_of_a_round_of_two_launches_count_together() -> None:
    starts = [0, 11, 50, 62, 100, 111, 150]  # gaps of 1, 29, 2, 28, 1 and 29 around pieces of 10
    events: list[dict[str, object]] = []
    for number, start in enumerate(starts):
        events.append({"name": "cudaGraphLaunch", "args": {"correlation": number}})
        events.append({"cat": "kernel", "ts": start, "dur": 10, "args": {"correlation": number}})
    assert gap_between_launches(events, 2) == 30


def test_rounds_of_fewer_requests_are_not_timed(tmp_path: Path) -> None:
    setup = Setup("zoo", "cpu", True, frozenset({1}), tmp_path)
    rounds = Rounds(setup.target, max_batch_size=2, max_seq_len=48, **setup.options)
    rounds.start(2, 16)
    assert rounds.timed(4).tokens_a_round == 1.0
    with pytest.raises(RuntimeError, match="max_seq_len is too small"):
        rounds.run(20)
    rounds.stop()
    rounds.executor.check_integrity()


def test_host_memory_is_seen_while_it_is_held() -> None:
    with peak_host_growth() as memory:
        # A mapping of its own: a large object may lie in memory that other tests freed and the
        # process kept.
        held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        held.write(bytes(64 << 20))
        deadline = time.monotonic() + 10  # a busy machine may let the watching thread wait
        while memory.growth < 48 << 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        held.close()
    assert memory.growth >= 48 << 20


def run_h200(tmp_path: Path, parts: str) -> tuple[str, dict[str, object]]:
    file = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/h200.py", "--shape", "zoo", "--device", "cpu", "--quick"]
    run = subprocess.run(
        [*command, "--parts", parts, "--output", str(file)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    return run.stdout, result


def names(result: dict[str, object], point: int) -> set[str]:
    figures = result["figures"]
    assert isinstance(figures, list)
    return {figure["name"] for figure in figures if figure["point"] == point}


def test_it_runs_on_a_cpu_prints_a_table_a_point_and_writes_every_figure(tmp_path: Path) -> None:
    printed, result = run_h200(tmp_path, "1,3,4")
    assert [line for line in printed.splitlines() if line.startswith("###")] == [
        "### 1. Plain decoding",
        "### 3. Prefill",
        "### 4. The host between two rounds",
    ]
    assert names(result, 1) == {
        "plain round, batch 1",
        "plain round, batch 2",
        "plain round, batch 3, 16 context",
    }
    assert names(result, 4) == {"host time, plain, batch 2", "host time, EAGLE-3 K=3, batch 2"}
    assert not names(result, 2) and result["failures"] == {}
    for point in (1, 3, 4):
        assert all(f"| {name} | " in printed for name in names(result, point))


class LoggedRounds:
    """Stands in for an engine with graphs: writes down what is measured."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self.log: list[str] = []
        self.requests: list[int] = []
        self.built = SimpleNamespace(max_draft_len=0)
        self.executor = SimpleNamespace(
            parts=SimpleNamespace(runner=SimpleNamespace(graphs=object()))
        )

    def start(self, batch_size: int, prompt_len: int) -> None:
        self.requests = list(range(batch_size))

    def timed(self, number: int) -> Timed:
        self.log.append(f"timed {len(self.requests)}")
        return Timed(5.0, 1.0, 100.0)

    def host_time(self, number: int) -> HostTime:
        self.log.append(f"host {len(self.requests)}")
        return HostTime(1.0, 2.0, 0.1, 3.0)

    def traced(self, number: int) -> list[dict[str, object]]:
        self.log.append(f"traced {len(self.requests)}")
        return []


def test_what_a_profiler_would_slow_down_is_measured_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = LoggedRounds()
    monkeypatch.setattr(h200_rounds, "Rounds", lambda *arguments, **options: rounds)
    monkeypatch.setattr(h200_rounds, "gap_between_launches", lambda events: 20.0)
    found: list[Figure] = []
    h200_rounds.plain_rounds(Setup("zoo", "cpu", True, frozenset({1, 4}), tmp_path), found.append)
    each = list(dict.fromkeys(rounds.log))
    assert each == ["timed 1", "timed 2", "host 2", "timed 3", "traced 1", "traced 2"]
    assert [figure.name for figure in found if figure.unit == "µs"] == [
        "GPU idle between rounds, plain, batch 1",
        "GPU idle between rounds, plain, batch 2",
    ]


@pytest.mark.slow
def test_every_point_runs_on_a_cpu(tmp_path: Path) -> None:
    _, result = run_h200(tmp_path, "1,2,3,4,5,6")
    assert {"Draft/Target two-model K=3 round, batch 2", "EAGLE-3 K=3 decoding, batch 1"} <= names(
        result, 2
    )
    assert "plain, chunked prefill, 3 at a time, 16 in / 6 out" in names(result, 5)
    assert {"start-up, plain", "zoo weights"} <= names(result, 6)
    (details,) = (
        each["details"] for each in result["figures"] if each["name"] == "start-up, plain"
    )
    assert details["first load s"] > 0 and details["the same load again s"] > 0
