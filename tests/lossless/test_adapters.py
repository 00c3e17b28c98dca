"""With LoRA adapters every drafter, tree, SA, budget and cache situation produces the texts of
plain decoding with the adapter, in batches where requests have different adapters or none, and more
adapters than slots."""

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.folders import merged
from tests.adapters.tiny_adapters import (
    ALPHA,
    LORA,
    NAMES,
    RANK,
    pairs_of,
    with_adapters,
    write_adapters,
)
from tests.executor.harness import Harness, output_of
from tests.executor.row_rounds import PROMPT
from tests.lossless.engines import MODES, tiny_engine
from tllm_spec.executor.request import LlmRequest

DRAFT_LEN = 4
OF_REQUESTS = (None, *NAMES) * 2
NUM_COMPARED = 4  # requests, with each adapter and its merged model
PREEMPTS = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
SETTINGS: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "in turn": {"disable_overlap_scheduler": True},
    "chunks": {"enable_chunked_prefill": True, "max_num_tokens": 170},
    "preemption": {
        "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 96},
        "scheduler_config": PREEMPTS,
    },
    "one slot": {"lora_config": LORA | {"max_loras": 1}},
}
# Those of torch that the tiny drafts can have, and rounds whose requests share rows.
WAYS = {mode: (mode, {}) for mode in MODES if not mode.endswith("_onnxruntime")}
WAYS |= {
    f"{mode}, shared rows": (mode, {"verify_budget": 2.5})
    for mode in ("ngram", "sa", "draft_target", "draft_target_one_model", "eagle3", "eagle3_sa")
}
FAST = {
    ("plain", "preemption"),
    ("eagle3", "chunks"),
    ("eagle3_tree", "one slot"),
    ("draft_target_one_model", "undisturbed"),
}


def runs() -> list[Any]:
    """Every way of drafting in every setting; few of them are not slow."""
    return [
        pytest.param(way, setting, marks=[] if (way, setting) in FAST else [pytest.mark.slow])
        for way in WAYS
        for setting in SETTINGS
    ]


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("adapters"), tiny)


def submit(harness: Harness, number: int, adapter: str | None) -> LlmRequest:
    sampled = {"temperature": 0.7, "top_k": 20} if number % 3 == 1 else {}
    return harness.submit([*PROMPT, *PROMPT, number], 16, seed=number, adapter=adapter, **sampled)


@pytest.fixture(scope="module")
def alone(tiny: Path, adapters: Path) -> list[dict[str | None, list[int]]]:
    """For each request its outputs by adapter, of plain decoding with nothing next to it. Requests
    after NUM_COMPARED have only the output with their own."""
    harness = with_adapters(tiny, adapters, max_batch_size=1, disable_overlap_scheduler=True)
    found: list[dict[str | None, list[int]]] = []
    for number in range(len(OF_REQUESTS)):
        names = (None, *NAMES) if number < NUM_COMPARED else (OF_REQUESTS[number],)
        requests = {name: submit(harness, number, name) for name in names}
        harness.run()
        found.append({name: output_of(request) for name, request in requests.items()})
    return found


def test_the_text_with_an_adapter_is_another_one_and_that_of_the_merged_model(
    tiny: Path, adapters: Path, alone: list[dict[str | None, list[int]]], tmp_path: Path
) -> None:
    compared = alone[:NUM_COMPARED]
    for own in compared:
        assert len(set(map(tuple, own.values()))) == len(own)
    scale, models = ALPHA / RANK, {None: tiny}
    models |= {name: merged(tiny, tmp_path / name, pairs_of(tiny, name), scale) for name in NAMES}
    for adapter, model in models.items():
        harness = Harness(model)
        requests = [submit(harness, number, None) for number in range(NUM_COMPARED)]
        harness.run()
        assert list(map(output_of, requests)) == [own[adapter] for own in compared]


@pytest.mark.parametrize(("way", "setting"), runs())
def test_the_text_is_that_of_plain_decoding_with_the_adapter(
    way: str,
    setting: str,
    tiny: Path,
    drafts: tuple[Path, Path],
    adapters: Path,
    alone: list[dict[str | None, list[int]]],
) -> None:
    mode, speculation = WAYS[way]
    drafting = tiny_engine(mode, drafts, DRAFT_LEN, **speculation)
    harness = with_adapters(tiny, adapters, **drafting | SETTINGS[setting])
    requests = [submit(harness, number, name) for number, name in enumerate(OF_REQUESTS)]
    harness.run()
    assert not [request.error for request in requests if request.error]
    expected = [own[name] for own, name in zip(alone, OF_REQUESTS, strict=True)]
    assert list(map(output_of, requests)) == expected
    counts = [request.counters.stats() for request in requests]
    assert mode == "plain" or all(own.num_drafted_tokens for own in counts[1:])
    # The tiny heads are hardly ever right.
    is_right = mode != "plain" and "eagle" not in mode
    assert not is_right or sum(own.num_accepted_tokens for own in counts) > 0
    assert (harness.parts.scheduler.num_preemptions > 0) == (setting == "preemption")
