"""`record_hidden_states`: the recorded states of a text are those that one forward of the text has,
whatever drafts were verified next to it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.graph_rounds import CPU, DUMMY
from tests.executor.harness import Harness
from tests.lossless.engines import tiny_engine
from tests.lossless.test_row_counts import draw_budgets
from tllm_spec.executor.graphs.slot_graphs import graph_keys
from tllm_spec.recording.traffic_folder import (
    HiddenStates,
    TrafficFolder,
    metadata_of,
    read_hidden_states,
    read_records,
    states_files_of,
)

PROMPTS = [[(7 * i + j) % 60 + 1 for j in range(5 + i)] for i in range(4)]
MODES = ("plain", "ngram", "draft_target", "eagle3", "eagle3_two_model", "eagle3_sa", "peagle")
WAYS = [(mode, way) for mode in (*MODES, "eagle3_tree") for way in ("", "graphs", "chunks")]
WITNESSES = [("eagle3_tree", "chunks"), ("eagle3", "graphs")]
CHUNKS = {"enable_chunked_prefill": True, "max_num_tokens": 16}


def recorder(model: Path, folder: Path, share: float = 1.0, **options: Any) -> Harness:
    return Harness(model, record_traffic=str(folder), record_hidden_states=share, **options)


def capture(harness: Harness) -> None:
    """Stand-ins for the CUDA graphs of all rounds."""
    runner, shapes = harness.parts.runner, harness.parts.slots.shapes
    keys = graph_keys((2, 4), lambda _: {0, shapes.longest.depth}, shapes.of)
    with torch.inference_mode():
        runner.capture_graphs(keys, DUMMY, CPU, pads=True)


def states_of(harness: Harness, folder: Path) -> list[HiddenStates]:
    """After all of the harness's requests."""
    harness.run()
    harness.executor.close()
    found = list(read_hidden_states(folder)) if states_files_of(folder) else []
    return sorted(found, key=lambda states: states.record.prompt)


def check_states(model: Path, found: list[HiddenStates], folder: Path, **options: Any) -> None:
    """Each text as a prompt has the same states."""
    harness = recorder(model, folder, **options)
    for each in found:
        harness.submit(each.ids.tolist(), 1, draft_limit=0)
    expected = states_of(harness, folder)
    texts = sorted(found, key=lambda states: states.ids.tolist())
    for own, alone in zip(texts, expected, strict=True):
        assert own.layers == alone.layers and own.ids.tolist() == alone.ids.tolist()
        assert own.captured.shape == (len(own.ids), own.hidden.shape[1] * len(own.layers))
        torch.testing.assert_close(own.captured, alone.captured, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own.hidden, alone.hidden, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("mode", "way"),
    [pytest.param(*pair, marks=[] if pair in WITNESSES else [pytest.mark.slow]) for pair in WAYS],
)
def test_recorded_states_are_those_of_the_text_alone(
    deep: Path, drafts: tuple[Path, Path], mode: str, way: str, tmp_path: Path, eager_graphs: None
) -> None:
    own = tiny_engine(mode, drafts, 3) if mode != "plain" else {}
    harness = recorder(deep, tmp_path / "traffic", **own, **(CHUNKS if way == "chunks" else {}))
    if way == "graphs":
        capture(harness)
    requests = [
        harness.submit(prompt, 20 + i, temperature=0.8 * (i % 2), draft_limit=[3, 0][i == 2])
        for i, prompt in enumerate(PROMPTS)
    ]
    found = states_of(harness, tmp_path / "traffic")
    assert [each.ids.tolist() for each in found] == sorted(r.tokens[:-1] for r in requests)
    assert [each.record for each in found] == sorted(
        read_records(tmp_path / "traffic"), key=lambda record: record.prompt
    )
    check_states(deep, found, tmp_path / "alone", **own)


@pytest.mark.slow
def test_states_are_recorded_where_requests_share_the_rows_of_a_round(
    deep: Path,
    drafts: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw_budgets(monkeypatch)
    own = tiny_engine("eagle3", drafts, 3, verify_budget=2.5)
    harness = recorder(deep, tmp_path / "traffic", **own)
    for prompt in PROMPTS:
        harness.submit(prompt, 20)
    found = states_of(harness, tmp_path / "traffic")
    assert len(found) == len(PROMPTS)
    check_states(deep, found, tmp_path / "alone", **own)


def test_a_share_of_the_requests_without_a_cached_prefix_is_recorded_and_erased(
    deep: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "traffic"
    harness = recorder(deep, folder, 0.5, kv_cache_config={"tokens_per_block": 4})
    for first in range(4):
        harness.submit([first, 2, 3, 4, 5], 3)
    harness.run()
    harness.submit([3, 2, 3, 4, 5, 6], 3)
    harness.run()
    refused = harness.submit([9], 3)
    refused.store = False
    found = states_of(harness, folder)
    assert [each.record.prompt[0] for each in found] == [1, 3]
    records = read_records(folder)
    assert [each.cached_tokens for each in records] == [0, 0, 0, 0, 5]
    assert {file.stat().st_mode & 0o777 for file in states_files_of(folder)} == {0o600}
    gone = found[0].record.id
    assert TrafficFolder(folder).erase(lambda record: record.id == gone) == 1
    assert [each.record for each in read_hidden_states(folder)] == [found[1].record]


def test_preempted_requests_have_no_states_and_those_of_a_full_folder_are_dropped(
    deep: Path, tmp_path: Path
) -> None:
    pool = {"tokens_per_block": 4, "max_tokens": 48, "enable_block_reuse": False}
    options = {"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}
    harness = recorder(deep, tmp_path / "a", kv_cache_config=pool, **options)
    for prompt in PROMPTS:
        harness.submit(prompt, 20)
    found = states_of(harness, tmp_path / "a")
    preempted = [each for each in read_records(tmp_path / "a") if each.num_preemptions]
    assert preempted and len(found) == len(PROMPTS) - len(preempted)
    folder = TrafficFolder(tmp_path / "b", max_bytes=3 * len(found[0].to_file()))
    for each in found[:1] * 3:
        folder.add_states(each.record, each.to_file())
    assert len(states_files_of(tmp_path / "b")) == 1


def test_a_text_whose_states_take_too_much_memory_is_recorded_without(
    deep: Path, tmp_path: Path
) -> None:
    """A row has four states of 32 numbers, and a text an eighth of half a MiB: 128 rows."""
    folder = tmp_path / "traffic"
    harness = recorder(deep, folder, record_traffic_mib=1)
    for first, length in enumerate((127, 129)):
        harness.submit([first + 1, 2], length)
    found = states_of(harness, folder)
    assert [each.record.prompt[0] for each in found] == [1]
    assert len(read_records(folder)) == 2


def test_states_need_a_folder_and_a_target_with_enough_layers(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"record_hidden_states = 1.0 needs record_traffic"):
        Harness(tiny, record_hidden_states=1.0)
    with pytest.raises(ValueError, match="has 2 layers, and 7 are needed"):
        recorder(tiny, tmp_path / "traffic")
    with pytest.raises(ValueError, match="no recorded hidden states"):
        list(read_hidden_states(tmp_path))
    (tmp_path / "hidden-1-a.safetensors").write_text("nothing")
    with pytest.raises(ValueError, match=r"cannot read .*hidden-1-a"):
        list(read_hidden_states(tmp_path))


@pytest.mark.parametrize(
    "damage",
    [
        lambda tensors, metadata: tensors.pop("captured"),
        lambda tensors, metadata: tensors.update(hidden=tensors["hidden"][:-1].clone()),
        lambda tensors, metadata: tensors.update(captured=tensors["captured"].long()),
        lambda tensors, metadata: metadata.pop("record"),
        lambda tensors, metadata: metadata.pop("layers"),
        lambda tensors, metadata: metadata.update(record="{}"),
        lambda tensors, metadata: metadata.update(layers="1,x"),
    ],
)
def test_a_file_that_has_not_the_states_of_its_record_is_refused_by_its_name(
    deep: Path, tmp_path: Path, damage: Callable[[Any, Any], object]
) -> None:
    harness = recorder(deep, tmp_path / "traffic")
    harness.submit([5, 6, 7], 4)
    assert len(states_of(harness, tmp_path / "traffic")) == 1
    (file,) = states_files_of(tmp_path / "traffic")
    tensors, metadata = load_file(file), metadata_of(file)
    damage(tensors, metadata)
    save_file(tensors, file, metadata)
    with pytest.raises(ValueError, match=re.escape(str(file))):
        list(read_hidden_states(tmp_path / "traffic"))
