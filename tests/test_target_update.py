"""The target's weights are replaced in a running engine: what is answered is that of a new engine
with these weights, whatever drafts; what runs meanwhile goes on or is computed again; what does not
fit changes nothing."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.harness import Harness
from tests.executor.test_draft_weights import copy_of
from tests.models.fp8_checkpoint import keeping_fp8, quantise
from tests.models.mtp_reference import save_predictable
from tllm_spec.executor.weight_swap import StagedWeights
from tllm_spec.llm import LLM
from tllm_spec.models.formats import weight_format
from tllm_spec.models.formats.weight_format import CudaWeight
from tllm_spec.models.registry import load_model
from tllm_spec.outputs import WeightVersion
from tllm_spec.recording.traffic_folder import read_records
from tllm_spec.request_handle import RequestHandle
from tllm_spec.target_update import folder_of
from tllm_spec.zoo.registry import resolve_model

A = "zoo:llama"
HEAD = {"decoding_type": "Eagle3", "speculative_model": "zoo:llama-eagle3", "max_draft_len": 3}
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"decoding_type": "NGram", "max_draft_len": 3},
    "eagle3": HEAD,
    "draft_model": {
        "decoding_type": "Draft_Target",
        "speculative_model": "zoo:llama-draft",
        "max_draft_len": 2,
    },
    "eagle3_two_model": HEAD | {"eagle3_one_model": False},
    "eagle3_tree": HEAD | {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3},
    "peagle": HEAD | {"speculative_model": "zoo:llama-peagle"},
    "sa": {"decoding_type": "SA", "max_draft_len": 3},
}
PROMPT = list(range(300, 312))
SMALL = list(range(5, 17))  # of a model with few tokens
SAMPLED = {"max_tokens": 30, "temperature": 0.5, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """B: a checkpoint with other answers."""
    return str(copy_of(A, tmp_path_factory.mktemp("b") / "other", 0.9))


def make_llm(model: str = A, spec: dict[str, Any] | None = HEAD, **options: Any) -> LLM:
    options = {"skip_tokenizer_init": True, "max_batch_size": 8, "max_seq_len": 256} | options
    return LLM(model, speculative_config=spec, **options)


def text(llm: LLM, prompt: list[int] = PROMPT, **params: Any) -> list[int]:
    return llm.generate(prompt, SAMPLED | params).outputs[0].token_ids


def run(harness: Harness, first: int = 300) -> tuple[list[int], list[int]]:
    """A text, and its rounds by outcome. first: token of the prompt."""
    request = harness.submit(list(range(first, first + 12)), **SAMPLED)
    harness.run()
    return request.tokens, request.counters.rounds_by_outcome


def replaced(harness: Harness, folder: str, version: str | None = None) -> None:
    weights = harness.parts.target_weights
    assert weights is not None
    harness.executor.replace_weights(weights.stage(folder, "target"), version, retract=True)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", DRAFTERS)
def test_an_updated_engine_answers_as_a_new_one_and_back(name: str, other: str) -> None:
    options = {} if DRAFTERS[name] is None else {"speculative_config": DRAFTERS[name]}
    harness = Harness(A, **options)
    first = run(harness)
    replaced(harness, other)
    assert run(harness) == run(Harness(other, **options)) != first
    replaced(harness, str(resolve_model(A)))
    assert run(harness) == first


def test_copies_in_the_layout_of_onednn_are_replaced_too(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_format, "MIN_PACKED_ELEMENTS", 1)
    harness = Harness(A)
    first = run(harness)
    replaced(harness, other)
    assert run(harness) == run(Harness(other)) != first


def with_modules(folder: Path) -> Harness:
    spec = {"decoding_type": "MTP", "max_draft_len": 2}
    return Harness(folder, max_seq_len=64, speculative_config=spec)


def test_mtp_modules_of_the_checkpoint_are_replaced_with_it(tmp_path: Path) -> None:
    """And stay if it has none."""
    save_predictable(tmp_path / "a")
    b = copy_of(str(tmp_path / "a"), tmp_path / "b", 0.5)
    harness = with_modules(tmp_path / "a")
    first = run(harness, 5)
    replaced(harness, str(b))
    assert run(harness, 5) == run(with_modules(b), 5) != first
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    number = json.loads((tmp_path / "a" / "config.json").read_text())["num_hidden_layers"]
    without = {k: v for k, v in tensors.items() if not k.startswith(f"model.layers.{number}.")}
    save_file(without, tmp_path / "a" / "model.safetensors")
    replaced(harness, str(tmp_path / "a"))
    after = run(harness, 5)
    assert after[0] == first[0] and after[1] != first[1]
    weights = harness.parts.target_weights
    assert weights is not None
    with pytest.raises(ValueError, match="do not fit an MTP module: missing"):
        weights.stage(str(tmp_path / "a"), "all")


def test_mtp_modules_are_replaced_without_the_target(tmp_path: Path) -> None:
    save_predictable(tmp_path / "a")
    b = copy_of(str(tmp_path / "a"), tmp_path / "b", 0.5)
    spec = {"decoding_type": "MTP", "max_draft_len": 2}
    with make_llm(str(tmp_path / "a"), spec, max_seq_len=64) as llm:
        before = llm.generate(SMALL, SAMPLED)
        with pytest.raises(ValueError, match="accepted are modules for the present target"):
            llm.update_weights(str(b), part="draft")  # its modules go with its embedding
        tensors = tensors_of(str(tmp_path / "a"))
        own = [(name, -each if "eh_proj" in name else each) for name, each in tensors]
        told = llm.update_weights(own, part="draft")
        after = llm.generate(SMALL, SAMPLED)
        assert told["version"] == after.weight_version == "default"
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        rounds = [each.speculative_decoding.per_position_accepted for each in (before, after)]
        assert rounds[0] != rounds[1]
        llm.update_weights(str(b), part="all")
        assert text(llm, SMALL) != before.outputs[0].token_ids
        llm.check_integrity()


def test_a_head_of_its_own_folder_is_updated_by_its_tensors(tmp_path: Path) -> None:
    head = str(copy_of("zoo:llama-eagle3", tmp_path / "head", 0.5))
    with make_llm() as llm, make_llm(spec=HEAD | {"speculative_model": head}) as fresh:
        before = llm.generate(PROMPT, SAMPLED)
        assert llm.update_weights(tensors_of(head), part="draft")["version"] == 1
        found, expected = llm.generate(PROMPT, SAMPLED), fresh.generate(PROMPT, SAMPLED)
        assert found.outputs[0].token_ids == before.outputs[0].token_ids
        assert found.speculative_decoding == expected.speculative_decoding
        assert found.speculative_decoding != before.speculative_decoding
        for options, why in (
            ({"part": "all"}, "are not in the target's checkpoint; accepted: 'target' and 'draft'"),
            ({"part": "draft", "version": "b"}, "names the target's weights"),
            ({"part": "head"}, "it must be one of target, draft, all"),
        ):
            with pytest.raises(ValueError, match=why):
                llm.update_weights(A, **options)


def test_weights_are_staged_in_host_memory_in_the_form_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    options = {"dtype": torch.float32, "max_positions": 64}
    staged = load_model(resolve_model(A), device=torch.device("cuda"), staged=True, **options)
    assert {each.device.type for each in (*staged.parameters(), staged.model.cos_sin)} == {"cpu"}
    assert isinstance(staged.lm_head.weight_format, CudaWeight)


@pytest.mark.parametrize("granularity", ["deepseek", pytest.param("row", marks=pytest.mark.slow)])
def test_quantised_weights_are_updated_as_a_new_engine_has_them(
    granularity: str, tmp_path: Path
) -> None:
    folders = [copy_of(A, tmp_path / name, factor) for name, factor in (("a", 1.0), ("b", 0.9))]
    for folder in folders:
        quantise(folder, granularity=granularity)
    with keeping_fp8():
        harness = Harness(folders[0], speculative_config=HEAD)
        first = run(harness)
        replaced(harness, str(folders[1]))
        assert run(harness) == run(Harness(folders[1], speculative_config=HEAD)) != first


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["deepseek", "block", "modelopt"])
def test_on_a_gpu_quantised_weights_are_updated_in_place(granularity: str, tmp_path: Path) -> None:
    folders = [copy_of(A, tmp_path / name, factor) for name, factor in (("a", 1.0), ("b", 0.9))]
    for folder in folders:
        quantise(folder, granularity=granularity)
    harness, options = Harness(folders[0]), {"max_tokens": 12}
    request = harness.submit(PROMPT, **options)
    harness.run()
    replaced(harness, str(folders[1]))
    texts = []
    for own in (harness, Harness(folders[1])):
        again = own.submit(PROMPT, **options)
        own.run()
        texts.append(again.tokens)
    assert texts[0] == texts[1] != request.tokens


@pytest.mark.slow
def test_an_update_under_64_streams_loses_no_request(other: str) -> None:
    with make_llm(max_batch_size=16) as llm:
        prompts = [list(range(first, first + 9)) for first in range(100, 740, 10)]
        streams = [llm.generate_async(each, SAMPLED, streaming=True) for each in prompts]
        next(streams[0])
        llm.update_weights(other, "b")
        outputs = [stream.result() for stream in streams]
        assert [each.outputs[0].length for each in outputs] == [30] * 64
        assert all(each.error is None for each in outputs)
        assert {outputs[-1].weight_version} == {"b"}
        llm.check_integrity()


def test_an_update_drops_what_was_learned_of_acceptance(other: str) -> None:
    rule = {"strategy": "ema", "1": {"candidate_steps": [1, 3]}}
    harness = Harness(A, speculative_config=HEAD | {"adaptive": rule})
    at_start = harness.executor.state()["controller"]["slots"]
    run(harness)
    assert harness.executor.state()["controller"]["slots"] != at_start
    replaced(harness, other)
    assert harness.executor.state()["controller"]["slots"] == at_start


def test_an_engine_whose_update_breaks_off_serves_no_more(other: str) -> None:
    with make_llm() as llm:
        stream, weights = started(llm), llm._executor.parts.target_weights
        assert weights is not None
        pairs = [*weights.stage(other, "target").pairs, (torch.ones(2), torch.ones(3))]
        weights.stage = lambda *_: StagedWeights(other, pairs)  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="while weights were written, and the engine serves"):
            llm.update_weights(other)
        assert "serves no more" in str(stream.result().error)
        with pytest.raises(RuntimeError, match="serves no more"):
            llm.generate(PROMPT)


def test_a_request_that_is_kept_goes_on_with_its_old_keys_and_values(other: str) -> None:
    harness = Harness(A, speculative_config=HEAD)
    expected, weights = run(harness)[0], harness.parts.target_weights
    request = harness.submit(PROMPT, **SAMPLED)
    harness.rounds(6)
    assert weights is not None
    harness.executor.replace_weights(weights.stage(other, "target"), "b", retract=False)
    start = request.num_output_tokens
    harness.run()
    assert request.weight_versions == [("default", 0), ("b", start)]
    end = len(PROMPT) + start
    assert request.num_preemptions == 0 and 0 < start < 30
    assert request.tokens[:end] == expected[:end] and request.tokens != expected
    assert run(harness)[0] == run(Harness(other, speculative_config=HEAD))[0], "not its pages"


def test_a_request_that_is_retracted_is_computed_again(other: str) -> None:
    """Its text is A's and then what B makes of it."""
    harness, greedy = Harness(A, speculative_config=HEAD), {"max_tokens": 30, "ignore_eos": True}
    request = harness.submit(PROMPT, **greedy)
    harness.rounds(6)
    replaced(harness, other)
    end = request.num_tokens
    harness.run()
    assert request.num_preemptions == 1 and request.weight_versions[1:] == [("1", end - 12)]
    fresh = Harness(other, speculative_config=HEAD)
    rest = fresh.submit(request.tokens[:end], **greedy | {"max_tokens": 42 - end})
    fresh.run()
    assert request.tokens == rest.tokens


def test_a_checkpoint_in_another_float_type_is_cast(other: str, tmp_path: Path) -> None:
    folder = copy_of(other, tmp_path / "float32", 1.0)
    tensors = {name: each.float() for name, each in tensors_of(other)}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    harness = Harness(A)
    replaced(harness, str(folder))
    assert run(harness) == run(Harness(other))


def stage_together(weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates have both staged before one is committed."""
    stage, both = weights.stage, Barrier(2)

    def stage_both(*own: Any) -> StagedWeights:
        staged: StagedWeights = stage(*own)
        both.wait(60)
        return staged

    monkeypatch.setattr(weights, "stage", stage_both)


def test_updates_at_the_same_time_are_each_complete(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = str(copy_of("zoo:llama-eagle3", tmp_path / "head", 0.5))
    with make_llm() as llm, make_llm(other) as fresh, ThreadPoolExecutor(2) as threads:
        parts = llm._executor.parts
        assert parts.target_weights is not None and parts.draft_weights is not None
        expected = {A: text(llm), other: text(fresh)}
        stage_together(parts.target_weights, monkeypatch)
        told = [*threads.map(llm.update_weights, expected)]
        assert {each["version"] for each in told} == {"1", "2"}
        assert text(llm) == expected[parts.target_weights.folder]
        stage_together(parts.draft_weights, monkeypatch)
        heads = HEAD["speculative_model"], head
        told = [*threads.map(lambda each: llm.load_draft_weights(each, force=True), heads)]
        assert {each["version"] for each in told} == {1, 2}
        assert text(llm) == expected[parts.target_weights.folder]
        llm.check_integrity()


def test_an_engine_that_falls_asleep_during_an_update_keeps_its_weights(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm() as llm:
        before, weights = text(llm), llm._executor.parts.target_weights
        assert weights is not None
        stage = weights.stage

        def stage_then_sleep(*own: Any) -> StagedWeights:
            staged = stage(*own)
            llm.sleep()
            return staged

        monkeypatch.setattr(weights, "stage", stage_then_sleep)
        with pytest.raises(ValueError, match="the weights are asleep"):
            llm.update_weights(other)
        llm.wake_up()
        assert text(llm) == before and weights.version == "default"
        llm.check_integrity()


def changed(folder: Path, name: str, tensor: torch.Tensor | None) -> str:
    path = copy_of(A, folder, 0.9) / "model.safetensors"
    tensors = load_file(path) | {name: tensor}
    save_file({name: each for name, each in tensors.items() if each is not None}, path)
    return str(folder)


def test_what_does_not_fit_is_refused_and_the_old_model_answers(tmp_path: Path) -> None:
    norm = "model.norm.weight"
    with make_llm() as llm:
        before = text(llm)
        size = llm.model_config.hidden_size
        for number, (tensor, why) in enumerate(
            [
                (None, f"missing {norm}"),
                (torch.ones(size + 1), "has the shape"),
                (torch.full((size,), torch.nan), "infinite or no numbers"),
            ]
        ):
            folder = changed(tmp_path / str(number), norm, tensor)
            with pytest.raises(ValueError, match=why):
                llm.update_weights(folder)
        with pytest.raises(ValueError, match="running = 'stop'"):
            llm.update_weights(A, running="stop")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="twice"):
            llm.update_weights([("x", torch.ones(1)), ("x", torch.zeros(1))])
        assert text(llm) == before and not llm.is_paused
        llm.check_integrity()


def tensors_of(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield from load_file(Path(folder) / "model.safetensors").items()


def test_tensors_are_taken_by_their_names_while_streams_run(other: str) -> None:
    with make_llm() as llm, make_llm(other) as fresh:
        prompts = [list(range(first, first + 9)) for first in range(100, 500, 50)]
        streams = [llm.generate_async(each, SAMPLED, streaming=True) for each in prompts]
        for stream in streams:
            next(stream)
        llm.pause("keep")  # none may end before the update
        told = llm.update_weights(tensors_of(other), version="step 1")
        llm.resume()
        assert told["version"] == "step 1" and told["staged_seconds"] > 0
        for stream in streams:
            output = stream.result()
            assert output.outputs[0].length == 30 and output.weight_version == "step 1"
            (first, second) = output.weight_versions
            assert first == WeightVersion("default", 0, second.start) and second.end == 30
        again = llm.generate(PROMPT, SAMPLED)
        assert again.outputs[0].token_ids == text(fresh)
        assert again.weight_versions == [WeightVersion("step 1", 0, 30)]
        assert llm.server_info()["internal_states"][0]["weight_version"] == "step 1"
        llm.check_integrity()


def test_records_say_which_weights_computed_their_tokens(other: str, tmp_path: Path) -> None:
    with make_llm(record_traffic=str(tmp_path / "traffic")) as llm:
        stream = started(llm)
        llm.pause("keep")
        llm.update_weights(other, version="step 1")
        llm.resume()
        spans = [span._asdict() for span in stream.result().weight_versions]
        text(llm)
    records = read_records(tmp_path / "traffic")
    assert [each.weight_version for each in records] == ["step 1"] * 2
    assert [each.weight_versions for each in records] == [
        spans, [{"version": "step 1", "start": 0, "end": 30}]
    ]  # fmt: skip
    assert [each["version"] for each in spans] == ["default", "step 1"]


def test_tensors_lie_in_memory_only_if_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, has_room in ((1 << 40, Path("/dev/shm").is_dir()), (0, False)):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free)
        )
        with folder_of(tensors_of(str(resolve_model(A))), A) as folder:
            assert folder.startswith("/dev/shm") == has_room
            assert load_file(Path(folder) / "model.safetensors")
        assert not Path(folder).exists()


def test_tensors_for_a_model_of_one_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with (
        pytest.raises(ValueError, match="is one file: its weights are updated from a folder"),
        folder_of([], str(tmp_path / "m.gguf")),
    ):
        pass


def started(llm: LLM) -> RequestHandle:
    stream = llm.generate_async(PROMPT, SAMPLED, streaming=True)
    next(stream)
    return stream
