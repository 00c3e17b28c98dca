"""Rows that are not wanted skip everything after the last layer's attention."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import count_forwards, network_of, one_model, with_lengths
from tests.executor.harness import Harness
from tests.executor.tiny_llama import write_tiny_llama
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.attention.interface import HeadsBackend, SpecMetadata
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.rows import ContextChunk
from tllm_spec.executor.speculative.drafting.network_drafter import BACKLOG_LEN
from tllm_spec.models.layers import RMSNorm
from tllm_spec.models.llama import MLP

PROMPT = [5, 9, 2, 7, 7, 1, 3, 8, 4, 6]


def engine_of(harness: Harness) -> ModelEngine:
    """With pages 1 to 4 for slot 0."""
    engine = harness.parts.runner.engine
    engine.rows.table.write(0, [1, 2, 3, 4], 0)
    engine.rows.table.flush()
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


def record_attention(backend: HeadsBackend, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that attend from now on."""
    layers: list[int] = []
    run = backend.run

    def watched(layer: int, *others: Any) -> torch.Tensor:
        layers.append(layer)
        return run(layer, *others)

    monkeypatch.setattr(backend, "run", watched)
    return layers


@torch.inference_mode()
def test_wanted_rows_equal_those_of_a_full_forward_and_all_rows_write_their_kv(
    tiny: Path, rows_of_mlps: list[int]
) -> None:
    engine, reference = engine_of(Harness(tiny)), engine_of(Harness(tiny))
    every = reference.forward([ContextChunk(0, 0, PROMPT)], None)
    num_layers = len(rows_of_mlps)
    some = engine.forward([ContextChunk(0, 0, PROMPT)], None, torch.tensor([9, 4]))
    torch.testing.assert_close(some, every[[9, 4]])
    torch.testing.assert_close(
        engine.attention.groups[0].backend.pool.data,
        reference.attention.groups[0].backend.pool.data,
    )
    assert engine.attention.groups[0].backend.pool.data[-1].count_nonzero() > 0
    assert rows_of_mlps[num_layers:] == [10] * (num_layers - 1) + [2]


@torch.inference_mode()
def test_where_no_row_is_wanted_only_the_kv_is_left(
    tiny: Path, rows_of_mlps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, reference = engine_of(Harness(tiny)), engine_of(Harness(tiny))
    reference.forward([ContextChunk(0, 0, PROMPT)], None)
    num_layers = len(rows_of_mlps)
    attended = record_attention(engine.attention.groups[0].backend, monkeypatch)
    hidden = engine.forward([ContextChunk(0, 0, PROMPT)], None, torch.tensor([], dtype=torch.int64))
    assert attended == list(range(num_layers - 1)), "the last layer has no rows to attend for"
    assert hidden.shape == (0, engine.model.config.hidden_size)
    assert torch.equal(
        engine.attention.groups[0].backend.pool.data,
        reference.attention.groups[0].backend.pool.data,
    )
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
def test_hidden_states_for_a_draft_head_are_captured_of_all_rows(captured: int, tiny: Path) -> None:
    plain = engine_of(Harness(tiny))
    config = plain.model.config
    layer = captured % config.num_layers
    states = []
    for wanted in (None, torch.tensor([9])):
        spec = SpecMetadata((layer,), config.hidden_size, 16, torch.float32, torch.device("cpu"))
        engine = ModelEngine(plain.model, plain.attention, spec)
        hidden = engine.forward([ContextChunk(0, 0, PROMPT)], None, wanted)
        states.append((spec.captured(10).clone(), hidden if wanted is not None else hidden[[9]]))
    (all_states, expected), (some_states, found) = states
    torch.testing.assert_close(some_states, all_states)
    torch.testing.assert_close(found, expected)


def drafting(tiny: Path, tmp_path: Path, mode: str, max_num_tokens: int, **options: Any) -> Harness:
    """Drafts of 3 tokens by a draft network with one layer; the target has two."""
    head = write_tiny_eagle3(tmp_path / "head", num_captured=2)
    draft = write_tiny_llama(tmp_path / "draft", num_layers=1)
    return Harness(
        tiny,
        enable_chunked_prefill=True,
        max_batch_size=2,
        max_num_tokens=max_num_tokens,
        disable_overlap_scheduler=True,
        **one_model(draft, head, mode, **options),
    )


# Rows of the MLPs in each round: two prompts of 10 tokens in chunks of 8, then windows of 4. A head
# reads the target's last layer, too, so that there all rows go on.
STEADY = [8, 8, 2, 2, 2]
OF_A_HEAD = [[8, 8], [8, 8, 1, 1, 1], STEADY, STEADY]
ROWS_OF_ROUNDS = {
    "eagle3": OF_A_HEAD,
    "draft_target": [[8], [8, 1, 1, 1, 1], [8, 5, 2, 2, 2], STEADY],
    "eagle3_two_model": OF_A_HEAD,
}


@pytest.mark.parametrize("mode", ROWS_OF_ROUNDS)
def test_when_a_draft_network_catches_up_one_row_per_request_passes_its_last_layer(
    mode: str, tiny: Path, tmp_path: Path, rows_of_mlps: list[int]
) -> None:
    harness = drafting(tiny, tmp_path, mode, max_num_tokens=8)
    for i in range(2):
        harness.submit([i, *PROMPT[1:]], max_tokens=40)
    for expected in ROWS_OF_ROUNDS[mode]:
        rows_of_mlps.clear()
        harness.round()
        assert rows_of_mlps == expected


@pytest.mark.covering
@pytest.mark.parametrize("mode", ROWS_OF_ROUNDS)
@pytest.mark.parametrize(
    "options", [{"draft_len_schedule": {1: 3, 2: 0}}, {}], ids=["schedule", "one length"]
)
def test_in_rounds_without_drafts_a_draft_network_only_leaves_its_kv(
    options: dict[str, Any],
    mode: str,
    tiny: Path,
    tmp_path: Path,
    rows_of_mlps: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has one layer, so that it neither attends nor plans to."""
    harness = drafting(tiny, tmp_path, mode, max_num_tokens=64, **options)
    with_lengths(harness, 0)
    request = harness.submit(PROMPT[:5], max_tokens=40)
    backend = network_of(harness).net.attention.groups[0].backend
    attended = record_attention(backend, monkeypatch)
    monkeypatch.setattr(backend, "plan", None)
    harness.round()
    read = count_forwards(harness)
    rows_of_mlps.clear()
    harness.rounds(BACKLOG_LEN + 2)
    if mode == "draft_target":
        assert not read, "a draft model reads nothing while no drafts are wanted"
        backlog = network_of(harness)._backlog
        with torch.inference_mode():
            backlog.read([request])
    assert BACKLOG_LEN in read and sum(read) >= BACKLOG_LEN
    assert rows_of_mlps == [1, 1] * (BACKLOG_LEN + 2)  # the target's
    assert not attended


@pytest.mark.covering
@pytest.mark.parametrize(("mode", "num_read"), [("eagle3", 10), ("draft_target", 11)])
@pytest.mark.parametrize(
    ("wishes", "num_steps"),
    [
        ([{}], 2),
        ([{"max_tokens": 2}], 2),
        ([{"max_tokens": 1}], 0),
        ([{"draft_limit": 0}], 0),
        ([{"max_tokens": 1}, {"draft_limit": 0}], 0),
        ([{"max_tokens": 1}, {}], 2),
    ],
)
def test_no_drafts_are_made_after_contexts_whose_requests_can_use_none(
    wishes: list[dict[str, int]],
    num_steps: int,
    mode: str,
    num_read: int,
    tiny: Path,
    tmp_path: Path,
) -> None:
    """The prompts are read all the same: others may reuse them. The first of 3 drafts comes from
    that, and with a draft model the target's first token is read, too."""
    harness = drafting(tiny, tmp_path, mode, max_num_tokens=64)
    read = count_forwards(harness)
    requests = [harness.submit(PROMPT, **({"max_tokens": 9} | wish)) for wish in wishes]
    harness.round()
    assert read == [num_read * len(wishes)] + [len(wishes)] * num_steps
    assert [request.num_drafts_ready for request in requests] == [3 if num_steps else 0] * len(
        wishes
    )
    harness.run()
    assert not any(request.error for request in requests)
