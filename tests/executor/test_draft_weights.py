"""Draft weights are replaced in a running engine: which fit, what of the prefix cache is used
after, and when a swap is taken back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.executor.harness import Harness
from tests.lossless.cases import heldout_prompts
from tests.models.mtp_reference import export_modules, save_predictable
from tests.server.http_answers import wait_for
from tllm_spec.draft_swap import MIN_REPLAYED
from tllm_spec.executor.draft_weights import WATCHED_ROUNDS, DraftWeights
from tllm_spec.executor.request import RequestState
from tllm_spec.executor.resources.interface import PageGroup
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.zoo.registry import resolve_model

HEAD = "zoo:llama-eagle3"
HEADS = {
    "eagle3": (HEAD, {"decoding_type": "Eagle3"}),
    "eagle3_tree": (
        HEAD,
        {"decoding_type": "Eagle3", "use_dynamic_tree": True, "dynamic_tree_max_topK": 3},
    ),
    "draft_model": ("zoo:llama-draft", {"decoding_type": "Draft_Target"}),
}


def copy_of(model: str, folder: Path, factor: float) -> Path:
    """The same checkpoint with all weights multiplied, also those of norms, of which layers derive
    others."""
    folder.mkdir()
    source = resolve_model(model)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
            continue
        changed = {
            name: tensor * factor if tensor.is_floating_point() else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(changed, folder / path.name)
    return folder


def run(harness: Harness, first: int) -> tuple[list[int], list[int]]:
    """The tokens and the rounds by outcome of a prompt of tokens from the first on."""
    prompt = list(range(first, first + 10))
    request = harness.submit(prompt, max_tokens=24, temperature=0.5, seed=7)
    harness.run()
    return request.tokens, request.counters.rounds_by_outcome


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", HEADS)
def test_a_swapped_engine_counts_what_a_new_engine_counts(name: str, tmp_path: Path) -> None:
    model, spec = HEADS[name]
    other = copy_of(model, tmp_path / "other", 0.7)
    options = {"speculative_config": spec | {"speculative_model": model, "max_draft_len": 3}}
    harness = Harness("zoo:llama", **options)
    before = run(harness, 300)
    weights = harness.parts.draft_weights
    weights.swap(weights.stage(str(other)))
    after = run(harness, 300)
    own = {"speculative_config": spec | {"speculative_model": str(other), "max_draft_len": 3}}
    assert after[0] == before[0], "the text never depends on the drafter"
    assert after == run(Harness("zoo:llama", **own), 300)
    assert after[1] != before[1]


def with_head() -> Harness:
    spec = {"decoding_type": "Eagle3", "speculative_model": HEAD, "max_draft_len": 2}
    return Harness("zoo:llama", speculative_config=spec)


def test_exported_mtp_modules_are_replaced(tmp_path: Path) -> None:
    target, folder, other = tmp_path / "target", tmp_path / "modules", tmp_path / "other"
    save_predictable(target)
    export_modules(target, folder)
    copy_of(str(folder), other, 0.0)

    def with_modules(modules: Path) -> Harness:
        spec = {"decoding_type": "MTP", "speculative_model": str(modules), "max_draft_len": 2}
        return Harness(target, max_seq_len=64, speculative_config=spec)

    harness = with_modules(folder)
    before, weights = run(harness, 5), harness.parts.draft_weights
    weights.swap(weights.stage(str(other)))
    after = run(harness, 5)
    assert after == run(with_modules(other), 5)
    assert after[0] == before[0] and after[1] != before[1]


def test_the_token_map_is_replaced_with_the_weights(tmp_path: Path) -> None:
    """A head whose draft vocabulary is in the opposite order drafts the same tokens."""
    folder = copy_of(HEAD, tmp_path / "turned", 1.0)
    tensors = load_file(folder / "model.safetensors")
    size = len(tensors["d2t"])
    ids = (tensors["d2t"] + torch.arange(size)).flip(0)
    turned = {"d2t": ids - torch.arange(size), "lm_head.weight": tensors["lm_head.weight"].flip(0)}
    save_file(tensors | turned, folder / "model.safetensors")
    harness = with_head()
    counts = []
    for _ in range(2):
        request = harness.submit(list(range(300, 340)), max_tokens=40, seed=7)
        harness.run()
        counts.append(request.counters.rounds_by_outcome)
        weights = harness.parts.draft_weights
        weights.swap(weights.stage(str(folder)))
    assert counts[0] == counts[1] and counts[0][-1] > 0


def test_weights_that_do_not_fit_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    narrow = copy_of(HEAD, tmp_path / "narrow", 1.0)
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    weights = with_head().parts.draft_weights
    with pytest.raises(ValueError, match=r"do not fit: draft\.\S*eps is 1e-0\d in the engine"):
        weights.stage(str(narrow))
    with pytest.raises(ValueError, match="speculative_model"):
        weights.stage(str(tmp_path / "nowhere"))
    assert weights.version == 0


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "norm.weight", "d2t"])
def test_a_tensor_that_is_one_number_is_refused_as_what_does_not_fit(
    name: str, tmp_path: Path
) -> None:
    folder = copy_of(HEAD, tmp_path / "head", 1.0)
    tensors = load_file(folder / "model.safetensors")
    one = torch.ones((), dtype=tensors[name].dtype)
    save_file(tensors | {name: one}, folder / "model.safetensors")
    weights = with_head().parts.draft_weights
    with pytest.raises(ValueError, match=name):
        weights.stage(str(folder))


def test_whatever_loading_raises_is_a_mistake_of_the_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = with_head().parts.draft_weights
    for error in (IndexError("no such row"), RuntimeError("a size does not match")):

        def fail(folder: str, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(weights, "_load", fail)
        with pytest.raises(ValueError, match=rf"^head: {type(error).__name__}: {error}$"):
            weights.stage("head")


def test_other_sizes_are_told_by_their_keys_in_the_config(tmp_path: Path) -> None:
    narrow = copy_of(HEAD, tmp_path / "narrow", 1.0)
    config = json.loads((narrow / "config.json").read_text())
    size, less = config["intermediate_size"], config["intermediate_size"] - 64
    (narrow / "config.json").write_text(json.dumps(config | {"intermediate_size": less}))
    tensors = load_file(narrow / "model.safetensors")
    cut = {
        name: tensor[:less] if "down" not in name else tensor[:, :less]
        for name, tensor in tensors.items()
        if ".mlp." in name
    }
    save_file(tensors | {k: v.contiguous() for k, v in cut.items()}, narrow / "model.safetensors")
    weights = with_head().parts.draft_weights
    with pytest.raises(ValueError) as caught:
        weights.stage(str(narrow))
    assert f"intermediate_size {size} against {less}" in str(caught.value)
    assert "mlp.gate_up_proj.weight" in str(caught.value) and "_modules" not in str(caught.value)


def cached_after_swap(*, keep_cache: bool) -> int:
    harness = with_head()
    prompt = list(range(300, 400))
    harness.submit(prompt)
    harness.run()
    weights = harness.parts.draft_weights
    running = harness.submit(prompt[::-1])
    harness.run_until(running, RequestState.GENERATION)
    weights.swap(weights.stage(HEAD), keep_cache=keep_cache)
    harness.run()
    # What began before the swap is stored for the version before.
    again = harness.submit(prompt[::-1])
    request = harness.submit(prompt)
    harness.run()
    assert (again.cached_tokens > 0) == keep_cache
    assert (running.draft_version, request.draft_version) == (0, 1)
    return request.cached_tokens


def test_prefixes_of_old_weights_are_not_reused_unless_they_are_kept() -> None:
    assert cached_after_swap(keep_cache=False) == 0
    assert cached_after_swap(keep_cache=True) > 32


class Ended:
    """A request, as `add_end` reads it."""

    draft_limit = 3

    def __init__(self, version: int, tokens: int) -> None:
        self.draft_version, self.counters = version, self
        self.rounds, self.num_emitted_tokens = WATCHED_ROUNDS // 2, tokens

    def stats(self) -> "Ended":
        return self


@pytest.mark.parametrize(("tokens", "version"), [(1000, 1), (950, 1), (880, 2)])
def test_a_swap_is_taken_back_when_requests_after_it_have_fewer_tokens_a_round(
    tokens: int, version: int
) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    weight = model.weight.detach().clone()
    cache = PagedCache([PageGroup(4, lambda source, destination: None, None)], 4)
    weights = DraftWeights(lambda folder: other, model, cache, "old")
    for _ in range(2):
        weights.add_end(Ended(0, 1000))  # type: ignore[arg-type] # a stand-in
    weights.swap(weights.stage("new"))
    weights.add_end(Ended(0, 0))  # type: ignore[arg-type] # began before the swap
    for _ in range(2):
        assert weights.version == 1
        weights.add_end(Ended(1, tokens))  # type: ignore[arg-type] # a stand-in
        weights.swap_back_if_worse()
    assert weights.version == version
    assert torch.equal(model.weight, weight if version == 2 else other.weight)
    assert weights.folder == ("old" if version == 2 else "new")
    rows = weights.state()["by_version"]
    assert [rows[each]["tokens"] for each in ("0", "1")] == [2000, 2 * tokens]
    assert rows["1"]["tokens_per_round"] == 2 * tokens / WATCHED_ROUNDS


def test_a_swap_under_running_streams_loses_and_changes_nothing(tmp_path: Path) -> None:
    other = copy_of(HEAD, tmp_path / "other", 0.9)
    spec = {"decoding_type": "Eagle3", "speculative_model": HEAD, "max_draft_len": 3}
    prompts = [list(range(300 + 7 * index, 330 + 7 * index)) for index in range(6)]
    params = [
        SamplingParams(max_tokens=16, temperature=index % 2 * 0.7, seed=index, ignore_eos=True)
        for index in range(6)
    ]
    with LLM("zoo:llama", max_batch_size=4, max_seq_len=128, speculative_config=spec) as llm:
        before = llm.generate(prompts, params, use_tqdm=False)
        streams = [
            llm.generate_async(*each, streaming=True) for each in zip(prompts, params, strict=True)
        ]
        streamed: list[list[int]] = [[] for _ in streams]
        versions = []
        for turn in range(200):
            for tokens, stream in zip(streamed, streams, strict=True):
                if not stream.finished:
                    tokens += next(stream).outputs[0].token_ids_diff
            if turn in (2, 6):
                folder = other if turn == 2 else HEAD
                versions.append(llm.load_draft_weights(folder)["version"])
        llm.check_integrity()
        after = llm.generate(prompts, params, use_tqdm=False)
    texts = [output.outputs[0].token_ids for output in before]
    assert versions == [1, 2]
    assert streamed == texts
    assert [output.outputs[0].token_ids for output in after] == texts


def test_weights_that_recorded_traffic_shows_to_be_worse_are_refused_unless_forced(
    tmp_path: Path,
) -> None:
    worse = copy_of(HEAD, tmp_path / "worse", 0.0)
    spec = {"decoding_type": "Eagle3", "speculative_model": HEAD, "max_draft_len": 2}
    options = {"max_batch_size": 4, "max_seq_len": 128, "speculative_config": spec}
    with LLM("zoo:llama", record_traffic=str(tmp_path / "traffic"), **options) as llm:
        prompts = heldout_prompts(llm.get_tokenizer(), MIN_REPLAYED, 20)
        llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
        wait_for(lambda: any((tmp_path / "traffic").glob("*.jsonl")))
        with pytest.raises(ValueError, match="force = true takes it all the same"):
            llm.load_draft_weights(worse)
        assert llm.load_draft_weights(worse, force=True)["version"] == 1
        told = llm.load_draft_weights(HEAD)
    assert told["replayed"] == MIN_REPLAYED
    assert told["tokens_per_round"]["before"] == 1 < told["tokens_per_round"]["after"]


def test_a_swap_says_why_recorded_traffic_did_not_decide(tmp_path: Path) -> None:
    spec = {"decoding_type": "Eagle3", "speculative_model": HEAD, "max_draft_len": 2}
    options = {"max_batch_size": 2, "max_seq_len": 64, "speculative_config": spec}
    with LLM("zoo:llama", record_traffic=str(tmp_path / "traffic"), **options) as llm:
        few, forced = (llm.load_draft_weights(HEAD, force=each) for each in (False, True))
    with LLM("zoo:llama", **options) as llm:
        nothing = llm.load_draft_weights(HEAD)
    assert [each["replayed"] for each in (few, forced, nothing)] == [0, 0, 0]
    assert "0 requests are recorded, and 8 are needed" in few["reason"]
    assert (forced["reason"], nothing["reason"]) == (
        "force = true",
        "no requests are recorded (record_traffic)",
    )


def test_an_engine_without_draft_weights_of_its_own_says_what_is_accepted() -> None:
    with (
        LLM("zoo:llama", max_seq_len=64) as llm,
        pytest.raises(ValueError, match="whose speculative_model is a folder"),
    ):
        llm.load_draft_weights(HEAD)
