"""`record_hidden_states`: the recorded states of a text are those that one forward of the text has,
whatever drafts were verified next to it."""

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.harness import Harness, user_provided
from tests.lossless.engines import tiny_engine
from tests.lossless.test_row_counts import draw_budgets
from tllm_spec.bench.tune_report import read_served, replay_report
from tllm_spec.executor import traffic_recorder
from tllm_spec.executor.graphs.slot_graphs import graph_keys
from tllm_spec.llm import LLM
from tllm_spec.recording import traffic_folder
from tllm_spec.recording.traffic_folder import (
    HiddenStates,
    TrafficFolder,
    files_of,
    latest_records,
    metadata_of,
    read_hidden_states,
    read_records,
    states_files_of,
)
from tllm_spec.sampling_params import SamplingParams

NO_MATCH = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 2}}
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
        runner.capture_graphs(keys, pads=True)


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
    deep: Path, drafts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


# `record_traffic`: what is recorded of which request, and that recording harms none.


PARAMS = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.7)


def make_llm(tiny: Path, folder: Path, **options: Any) -> LLM:
    return LLM(
        tiny,
        skip_tokenizer_init=True,
        max_batch_size=4,
        max_seq_len=64,
        record_traffic=str(folder),
        **options,
    )


def test_a_record_has_the_request_its_drawn_seed_and_what_happened(
    tiny: Path, tmp_path: Path
) -> None:
    options = user_provided(lambda request: [63] * len(request.py_draft_tokens))
    with make_llm(tiny, tmp_path / "traffic", **options) as llm:
        output = llm.generate([1, 2, 3], PARAMS)
        stats = output.speculative_decoding
    (record,) = read_records(tmp_path / "traffic")
    assert (record.prompt, record.output) == ([1, 2, 3], output.outputs[0].token_ids)
    assert record.sampling["temperature"] == 0.7
    assert (record.max_tokens, record.finish_reason) == (9, "length")
    assert record.stats == stats
    assert sum(number for _, number, _ in record.rounds) == 9
    assert record.rounds[0][2] is None, "the prompt's forward brings the first token"
    assert [drafts for *_, drafts in record.rounds[1:]].count(0) <= 1
    offsets = [offset for offset, *_ in record.rounds]
    assert offsets == sorted(offsets)
    with LLM(tiny, skip_tokenizer_init=True, max_seq_len=64) as llm:
        again = llm.generate(
            record.prompt,
            SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.7, seed=record.seed),
        )
    assert again.outputs[0].token_ids == record.output


def test_the_client_decides_what_is_recorded(tiny: Path, tmp_path: Path) -> None:
    with make_llm(tiny, tmp_path / "traffic") as llm:
        for prompt, options in (
            (1, {}),
            (2, {"store": False}),
            (3, {"cache_salt": "own"}),
            (4, {"cache_salt": "own", "store": True}),
        ):
            llm.generate_async([prompt], PARAMS, **options).result()
    assert [record.prompt for record in read_records(tmp_path / "traffic")] == [[1], [4]]


def test_consent_without_recording_is_refused(tiny: Path) -> None:
    with (
        LLM(tiny, skip_tokenizer_init=True, max_seq_len=64) as llm,
        pytest.raises(ValueError, match="nothing is stored without record_traffic"),
    ):
        llm.generate_async([1], PARAMS, store=True)


def test_only_the_owner_can_read_records(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traffic"
    with make_llm(tiny, folder) as llm:
        llm.generate([1], PARAMS)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    folder.chmod(0o750)
    with pytest.raises(ValueError, match="mode 0700"):
        make_llm(tiny, folder)


def test_one_clients_records_are_erased_and_their_names_are_not_written(
    tiny: Path, tmp_path: Path
) -> None:
    path = tmp_path / "traffic"
    with make_llm(tiny, path) as llm:
        for client in (("key a", "u"), ("key a", "v"), ("key b", "u")):
            llm.generate_async([1], PARAMS, client=client).result()
    (file,) = files_of(path)
    assert "key a" not in file.read_text()
    folder = TrafficFolder(path)
    user = folder.hashes_of(("key a", "u"))[1]
    assert folder.erase(lambda record: record.user == user) == 1
    client = folder.hashes_of(("key a",))[0]
    assert folder.erase(lambda record: record.client == client) == 1
    assert [record.client for record in read_records(path)] == [folder.hashes_of(("key b",))[0]]


def test_what_a_crash_has_damaged_is_erased_with_the_records(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "traffic"
    for _ in range(2):
        with make_llm(tiny, path) as llm:
            for client in ("a", "b"):
                llm.generate_async([1], PARAMS, client=(client,)).result()
    first, second = files_of(path)
    first.write_bytes(first.read_bytes()[:-40] + b"\n")  # of b
    second.write_bytes(second.read_bytes()[:-40])
    (path / "hidden-1-cut.safetensors").write_bytes(b"\xff" * 100)
    (path / "hidden-2-cut.new").write_bytes(b"text of a client")
    folder = TrafficFolder(path)
    client = folder.hash_of("a")
    assert folder.erase(lambda record: record.client == client) == 4
    assert b'"prompt"' not in b"".join(file.read_bytes() for file in path.iterdir())
    assert {file.name for file in path.iterdir()} == {first.name, second.name, "lock", "hash-key"}


def test_files_that_a_killed_engine_has_not_finished_take_no_room(tmp_path: Path) -> None:
    folder = TrafficFolder(tmp_path / "traffic")
    left = folder.path / "hidden-1-a.new"
    left.write_bytes(b"x" * 1000)
    folder.append([b"{}\n"])
    assert not left.exists()


def test_a_folder_whose_lock_a_stopped_process_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TrafficFolder(tmp_path / "traffic")
    monkeypatch.setattr(traffic_folder, "LOCK_SECONDS", 0.0)
    with folder._locked(), pytest.raises(ValueError, match="another process has had its lock"):
        TrafficFolder(tmp_path / "traffic")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": [10**6]}, "token id 1000000; the model has 0 to"),
        ({"output": []}, "output"),
        ({"prompt": [True]}, "prompt"),
        ({"seed": 2**63}, "seed"),
        ({"sampling": {}}, "temperature"),
        ({"rounds": [[1, 2]]}, "rounds"),
        ({"rounds": [[None, 1, 1]]}, "only the number of drafts may be null"),
        ({"accepted": [1, 1, 1]}, "drafted has"),
        ({"draft_version": None}, "draft_version"),
        ({"output": [1] * 100}, "the text has 101 tokens, and the engine of a replay runs 64"),
    ],
)
def test_a_record_that_no_engine_has_written_is_refused_by_its_line(
    tiny: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    folder = tmp_path / "traffic"
    with make_llm(tiny, folder) as llm:
        llm.generate([1], PARAMS)
    (file,) = files_of(folder)
    header, line = file.read_text().splitlines()
    file.write_text(f"{header}\n{json.dumps(json.loads(line) | change)}\n")
    config = tmp_path / "ngram.yaml"
    config.write_text("speculative_config: {decoding_type: NGram, max_draft_len: 2}")
    with pytest.raises(ValueError) as caught:
        replay_report(folder, None, [config])
    assert f"{file.name}, line 2: " in str(caught.value) and reason in str(caught.value)


@pytest.mark.parametrize("line", ["[" * 100_000, "[]", '{"format": 1}', '{"format": "x"}', "5"])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    folder = TrafficFolder(tmp_path / "traffic")
    folder.append([line.encode() + b"\n"])
    with pytest.raises(ValueError, match=r"jsonl, line 1: "):
        read_records(folder.path)


def test_records_without_the_model_that_was_served_are_refused(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traffic"
    with make_llm(tiny, folder) as llm:
        llm.generate([1], PARAMS)
    (file,) = files_of(folder)
    file.write_text(file.read_text().splitlines()[1] + "\n")
    with pytest.raises(ValueError, match="no file begins with the model"):
        read_served(folder)


def test_the_oldest_records_are_dropped_when_the_folder_is_full(tmp_path: Path) -> None:
    header = b'{"format": "tllm_spec traffic 1"}\n'
    folder = TrafficFolder(tmp_path / "traffic", header, max_bytes=16_000)
    lines = [json.dumps({"number": number, "text": "x" * 400}).encode() for number in range(100)]
    for line in lines:
        folder.append([line + b"\n"])
    files = files_of(tmp_path / "traffic")
    assert 8_000 < sum(file.stat().st_size for file in files) <= 16_000
    left = [line for file in files for line in file.read_bytes().splitlines()]
    assert left[-1] == lines[-1]
    assert lines[0] not in left


def test_the_latest_records_are_read_from_the_latest_files(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traffic"
    for prompt in (1, 2, 3):
        with make_llm(tiny, folder) as llm:
            llm.generate([[prompt], [prompt + 10]], PARAMS, use_tqdm=False)
    first, *_ = files_of(folder)
    first.write_text("not JSON\n")
    found = {record.prompt[0] for record in latest_records(folder, 3)}
    assert {3, 13} < found < {2, 12, 3, 13}


def test_a_line_that_is_just_being_written_is_left_out(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traffic"
    with make_llm(tiny, folder) as llm:
        llm.generate([1], PARAMS)
    (file,) = files_of(folder)
    _, line = file.read_bytes().splitlines(keepends=True)
    for size in range(len(line)):
        with file.open("ab") as lines:
            lines.write(line[size : size + 1])
        assert len(read_records(folder)) == (1 if size < len(line) - 2 else 2)


def test_a_full_disk_loses_records_and_no_request(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = os.write

    def write_half(descriptor: int, data: memoryview) -> int:
        write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "traffic"
    with make_llm(tiny, folder) as llm:
        monkeypatch.setattr("tllm_spec.recording.traffic_folder.os.write", write_half)
        for prompt in (1, 2):
            assert llm.generate([prompt], PARAMS).error is None
    monkeypatch.undo()
    assert caplog.text.count("traffic cannot be recorded") == 1
    with make_llm(tiny, folder) as llm:
        llm.generate([3], PARAMS)
    assert [record.prompt for record in read_records(folder)] == [[3]]


@pytest.mark.parametrize(("low", "is_said"), [(1.3, True), (1.0, False)])
def test_the_log_says_once_where_few_drafts_are_accepted_that_another_drafter_may_be_better(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    low: float,
    is_said: bool,
) -> None:
    monkeypatch.setattr(traffic_recorder, "ADVISED_RECORDS", 3)
    monkeypatch.setattr(traffic_recorder, "LOW_ACCEPTANCE_LENGTH", low)
    caplog.set_level("INFO")
    with LLM(tiny, skip_tokenizer_init=True, record_traffic=str(tmp_path / "t"), **NO_MATCH) as llm:
        for _ in range(2):
            llm.generate(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))
    said = [each for each in caplog.messages if f"tune {tmp_path / 't'}" in each]
    assert len(said) == is_said
    assert all(each.startswith("the first 3 recorded requests had 1.0") for each in said)
