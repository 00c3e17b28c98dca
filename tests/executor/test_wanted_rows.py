"""Rows whose hidden states nobody asks for skip what lies behind the last layer's attention."""

from pathlib import Path

import pytest
import torch

from tests.executor.harness import Harness
from tllm_spec.attention.spec_metadata import SpecMetadata
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.rows import ContextChunk
from tllm_spec.models.layers import RMSNorm
from tllm_spec.models.llama import MLP

PROMPT = [5, 9, 2, 7, 7, 1, 3, 8, 4, 6]


def engine_of(harness: Harness) -> ModelEngine:
    """With pages 1 to 4 for slot 0."""
    engine = harness.parts.runner.engine
    engine.rows.table.device_rows[0, :4] = torch.arange(1, 5, dtype=torch.int32)
    return engine


@pytest.fixture
def rows_of_mlps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows went through each MLP, in the order in which they did."""
    seen: list[int] = []
    add_to = MLP.add_to

    def watched(mlp: MLP, hidden: torch.Tensor, norm: RMSNorm) -> None:
        seen.append(len(hidden))
        add_to(mlp, hidden, norm)

    monkeypatch.setattr(MLP, "add_to", watched)
    return seen


@torch.inference_mode()
def test_the_wanted_rows_are_those_of_a_whole_forward_and_all_rows_leave_their_kv(
    tiny: Path, rows_of_mlps: list[int]
) -> None:
    engine, twin = engine_of(Harness(tiny)), engine_of(Harness(tiny))
    every = twin.forward([ContextChunk(0, 0, PROMPT)], None)
    num_layers = len(rows_of_mlps)
    some = engine.forward([ContextChunk(0, 0, PROMPT)], None, torch.tensor([9, 4]))
    torch.testing.assert_close(some, every[[9, 4]])
    torch.testing.assert_close(engine.backend.pool.data, twin.backend.pool.data)
    assert engine.backend.pool.data[-1].count_nonzero() > 0
    assert rows_of_mlps[num_layers:] == [10] * (num_layers - 1) + [2]


@torch.inference_mode()
def test_where_no_row_is_wanted_only_the_kv_is_left(tiny: Path, rows_of_mlps: list[int]) -> None:
    engine, twin = engine_of(Harness(tiny)), engine_of(Harness(tiny))
    twin.forward([ContextChunk(0, 0, PROMPT)], None)
    num_layers = len(rows_of_mlps)
    hidden = engine.forward([ContextChunk(0, 0, PROMPT)], None, torch.tensor([], dtype=torch.int64))
    assert hidden.shape == (0, engine.model.config.hidden_size)
    assert torch.equal(engine.backend.pool.data, twin.backend.pool.data)
    assert rows_of_mlps[num_layers:] == [10] * (num_layers - 1)


def test_of_a_prompt_one_row_goes_through_the_last_layer_and_none_of_an_earlier_chunk(
    tiny: Path, rows_of_mlps: list[int]
) -> None:
    harness = Harness(tiny, enable_chunked_prefill=True, max_num_tokens=8)
    request = harness.submit(PROMPT, max_tokens=1)
    harness.run()
    num_layers = harness.parts.runner.engine.model.config.num_layers
    assert rows_of_mlps == [8] * (num_layers - 1) + [2] * (num_layers - 1) + [1]
    assert request.num_output_tokens == 1


def test_log_probabilities_of_a_prompt_need_all_rows(tiny: Path, rows_of_mlps: list[int]) -> None:
    harness = Harness(tiny)
    request = harness.submit(PROMPT, max_tokens=1, prompt_logprobs=1)
    harness.run()
    assert set(rows_of_mlps) == {10} and len(request.prompt_logprobs) == 10


@torch.inference_mode()
@pytest.mark.parametrize("captured", [0, -1], ids=["the first layer", "the last layer"])
def test_what_a_draft_head_reads_is_captured_of_all_rows(captured: int, tiny: Path) -> None:
    plain = engine_of(Harness(tiny))
    config = plain.model.config
    layer = captured % config.num_layers
    states = []
    for wanted in (None, torch.tensor([9])):
        spec = SpecMetadata((layer,), config.hidden_size, 16, torch.float32, torch.device("cpu"))
        engine = ModelEngine(plain.model, plain.backend, plain.rows, config.vocab_size, spec)
        hidden = engine.forward([ContextChunk(0, 0, PROMPT)], None, wanted)
        states.append((spec.captured(10).clone(), hidden if wanted is not None else hidden[[9]]))
    (all_states, expected), (some_states, found) = states
    torch.testing.assert_close(some_states, all_states)
    torch.testing.assert_close(found, expected)
