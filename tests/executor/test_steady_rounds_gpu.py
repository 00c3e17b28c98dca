"""Steady rounds on a GPU wait for the device nowhere but where a round's results are read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.graph_rounds import MODES, on_cuda, speculate
from tests.executor.harness import all_pages_are_back, user_provided
from tllm_spec.executor.device.transfer import ToHost
from tllm_spec.executor.request import RequestState

HOST_DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}},
    "ngram_tree": {
        "speculative_config": {
            "decoding_type": "NGram",
            "max_draft_len": 3,
            "use_dynamic_tree": True,
            "dynamic_tree_max_topK": 2,
        }
    },
    "user_provided": user_provided(lambda request: [1, 2, 3][: request.num_drafts_wanted], 3),
    "user_provided_tree": user_provided(
        lambda request: [[1, 2, 3][: request.num_drafts_wanted], [4]], 3, max_total_draft_tokens=5
    ),
}
NUM_ROUNDS = 12


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [*MODES, *HOST_DRAFTERS])
def test_on_a_gpu_a_steady_round_waits_only_where_a_round_is_read(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculation = HOST_DRAFTERS.get(mode) or speculate(tiny_draft, head, mode)
    harness = on_cuda(tiny, [4], **speculation)
    # Repetitions, so that NGram finds drafts.
    requests = [harness.submit([5, i, 7] * 4, max_tokens=150) for i in range(3)]
    for request in requests:
        harness.run_until(request, RequestState.GENERATION)
    for _ in range(3):
        harness.round()
    waits, wait = [], ToHost.wait

    def counted(to_host: ToHost) -> list[torch.Tensor]:
        waits.append(to_host)
        return wait(to_host)

    monkeypatch.setattr(ToHost, "wait", counted)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(NUM_ROUNDS):
            assert harness.executor.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == NUM_ROUNDS and not any(request.is_finished for request in requests)
    num_drafted = sum(request.counters.stats().num_drafted_tokens for request in requests)
    assert bool(num_drafted) == (mode != "plain")
    harness.run()
    assert all_pages_are_back(harness.executor)
