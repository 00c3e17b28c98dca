"""Prompt times of `tllm-bench tune`, with a clock that the prompts' tokens move."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tllm_spec.bench import tune as prompt_times
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.build import BuiltExecutor, build_executor
from tllm_spec.executor.request import LlmRequest
from tllm_spec.llm import LLM
from tllm_spec.recording.replay import run_to_end
from tllm_spec.recording.traffic_folder import read_records
from tllm_spec.recording.traffic_record import TrafficRecord
from tllm_spec.sampling_params import SamplingParams

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
