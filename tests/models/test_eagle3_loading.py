"""The checkpoint of an EAGLE-3 head: every published form loads the same weights, the target's are
shared, and what does not fit is named."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.executor.tiny_llama import write_tiny_llama
from tests.models.eagle3_runner import captured_states, load_head
from tests.models.helpers import load
from tests.models.tiny_eagle3 import (
    SPELLINGS,
    Spelling,
    Tensors,
    edit_config,
    rewrite,
    save,
    write_tiny_eagle3,
)
from tllm_spec.models.eagle3 import Eagle3Head
from tllm_spec.models.llama import CausalLM

VOCAB_SIZE = 64


@pytest.fixture
def target(tmp_path: Path) -> CausalLM:
    return load(write_tiny_llama(tmp_path / "target", num_layers=6))


def test_draft_ids_map_to_the_targets_ids_that_the_checkpoint_marks(
    target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head")
    marked = load_file(folder / "model.safetensors")["t2d"].nonzero().flatten()
    ids = load_head(folder, target).draft_to_target
    assert ids is not None and ids.dtype == torch.int64 and ids.equal(marked)
    assert not ids.equal(torch.arange(48))


def test_ids_instead_of_offsets_are_read_where_t2d_marks_them(
    target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head")
    marked = load_file(folder / "model.safetensors")["t2d"].nonzero().flatten()
    rewrite(folder, lambda tensors: tensors.update(d2t=marked.flip(0)))
    ids = load_head(folder, target).draft_to_target
    assert ids is not None and ids.equal(marked.flip(0))


@pytest.mark.parametrize("t2d", [None, torch.zeros(VOCAB_SIZE), torch.ones(VOCAB_SIZE)])
def test_offsets_are_read_where_t2d_says_nothing(
    t2d: torch.Tensor | None, target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head")
    marked = load_file(folder / "model.safetensors")["t2d"].nonzero().flatten()
    rewrite(folder, lambda tensors: tensors.pop("t2d"))
    if t2d is not None:
        rewrite(folder, lambda tensors: tensors.update(t2d=t2d))
    ids = load_head(folder, target).draft_to_target
    assert ids is not None and ids.equal(marked)


def test_a_d2t_that_leads_to_other_tokens_than_t2d_marks_is_refused(
    target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head")
    marks = load_file(folder / "model.safetensors")["t2d"].flip(0)
    rewrite(folder, lambda tensors: tensors.update(t2d=marks))
    with pytest.raises(ValueError, match="leads to other tokens than its t2d marks"):
        load_head(folder, target)


@pytest.mark.parametrize("draft_vocab_size", [None, VOCAB_SIZE])
def test_a_head_of_the_whole_vocabulary_has_no_id_map(
    draft_vocab_size: int | None, target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", draft_vocab_size=draft_vocab_size)
    assert load_head(folder, target).draft_to_target is None
    if draft_vocab_size:
        rewrite(folder, lambda tensors: tensors.pop("d2t"))
        assert load_head(folder, target).draft_to_target is None


def test_a_permuted_whole_vocabulary_has_an_id_map(target: CausalLM, tmp_path: Path) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", draft_vocab_size=VOCAB_SIZE)
    swap = torch.zeros(VOCAB_SIZE, dtype=torch.int32)
    swap[3], swap[7] = 4, -4
    rewrite(folder, lambda tensors: tensors.update(d2t=swap))
    ids = load_head(folder, target).draft_to_target
    assert ids is not None and ids[[3, 7, 8]].tolist() == [7, 3, 8]


def all_weights(head: Eagle3Head) -> Tensors:
    assert head.draft_to_target is not None
    return head.state_dict() | {"d2t": head.draft_to_target}


@pytest.mark.covering
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "LlamaForCausalLM"])
def test_every_spelling_and_file_loads_the_same_weights(
    spelling: Spelling, file: Any, architecture: str, target: CausalLM, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"fc_norm": True, "bias": True, "num_layers": 2}
    expected = all_weights(load_head(write_tiny_eagle3(tmp_path / "flat", **options), target))
    options |= {"spelling": spelling, "file": file, "architectures": [architecture]}
    folder = write_tiny_eagle3(tmp_path / "head", **options)
    weights = all_weights(load_head(folder, target))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_the_speculators_format_loads_the_weights_and_the_capture_layers(
    target: CausalLM, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"norm_before_fc": True, "fc_norm": True, "num_layers": 2}
    expected = all_weights(load_head(write_tiny_eagle3(tmp_path / "flat", **options), target))
    options |= {"speculators": True, "spelling": "layers"}
    options["eagle_aux_hidden_state_layer_ids"] = [1, 3, 6]
    folder = write_tiny_eagle3(tmp_path / "head", **options)
    training = {
        "verifier_norm.weight": torch.ones(32),
        "verifier_lm_head.weight": torch.ones(48, 32),
    }
    rewrite(folder, lambda tensors: tensors.update(training))
    head = load_head(folder, target)
    assert head.config.capture_layers == (0, 2, 5)
    weights = all_weights(head)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_use_aux_norm_is_the_older_name_of_fc_norm(target: CausalLM, tmp_path: Path) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", fc_norm=True)
    captured = captured_states(target, [5, 9, 2, 6], (0, 1, 2))
    expected = load_head(folder, target).fuse(captured)
    edit_config(folder, fc_norm=None, use_aux_norm=True)
    assert load_head(folder, target).fuse(captured).equal(expected)


def test_a_sharded_head_is_read_and_unused_tensors_are_skipped(
    target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head")
    expected = all_weights(load_head(folder, target))
    tensors = load_file(folder / "model.safetensors")
    assert "t2d" in tensors
    tensors["embed_tokens.weight"] = target.state_dict()["model.embed_tokens.weight"].clone()
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    shards = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(sorted(tensors))}
    for shard in set(shards.values()):
        save(folder / shard, {name: tensors[name] for name in shards if shards[name] == shard})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    weights = all_weights(load_head(folder, target))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    "options",
    [{}, {"draft_vocab_size": None}, {"draft_vocab_size": None, "tie_word_embeddings": True}],
    ids=["own output layer", "the target's", "tied"],
)
def test_shared_weights_are_the_targets_memory_and_are_not_changed(
    options: dict[str, Any], load_format: str, target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", **options)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    head = load_head(folder, target, load_format=load_format)
    weights = target.state_dict()
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert not addresses(head.parameters()) & addresses(target.parameters())
    assert head.borrowed[0] is target.get_submodule("model.embed_tokens")
    own = dict(head.named_parameters()).get("lm_head.weight")
    if options:
        shared = (
            "model.embed_tokens.weight" if "tie_word_embeddings" in options else "lm_head.weight"
        )
        assert own is None
        assert head.borrowed[1].weight.data_ptr() == weights[shared].data_ptr()
    else:
        assert own is not None and own.shape == (48, 32)


@pytest.mark.parametrize("stored", ["nothing", "the target's", "its own"])
def test_the_output_layer_of_a_tied_head_is_the_embedding_that_the_head_uses(
    stored: str, target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(
        tmp_path / "head", draft_vocab_size=VOCAB_SIZE, tie_word_embeddings=True
    )
    embedding = target.state_dict()["model.embed_tokens.weight"]
    if stored == "its own":
        embedding = embedding.flip(0).contiguous()
    if stored != "nothing":
        copies = {"embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
        rewrite(folder, lambda tensors: tensors.update(copies))
    head = load_head(folder, target)
    assert (head.embed_tokens is None) == (stored != "its own")
    states = torch.eye(32)
    # Each row has one number that is not zero, so that the order of the sum changes no bit.
    assert head.compute_logits(states).equal(head.norm.forward(states) @ embedding.t())


def test_an_embedding_and_an_output_layer_that_differ_from_the_targets_are_used_and_named(
    target: CausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", draft_vocab_size=None, own_modules=True)
    own = torch.randn(VOCAB_SIZE, 32)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": own}))
    weights = load_head(folder, target).state_dict()
    assert torch.equal(weights["lm_head.weight"], own)
    stored = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(weights["embed_tokens.weight"], stored)
    for name in ("embed_tokens", "lm_head"):
        assert f"{name}.weight differs from the target's" in caplog.text


def test_a_whole_vocabulary_without_an_output_layer_has_the_targets(
    target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", draft_vocab_size=VOCAB_SIZE)
    for name in ("lm_head.weight", "d2t", "t2d"):
        rewrite(folder, lambda tensors, name=name: tensors.pop(name))
    assert load_head(folder, target).output is target.get_submodule("lm_head")


@pytest.mark.parametrize("size", [56, 72])
def test_a_head_of_a_padded_or_shorter_vocabulary_drafts_the_tokens_that_it_has(
    size: int, target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", vocab_size=size)
    embedding = target.state_dict()["model.embed_tokens.weight"]
    copy = torch.cat((embedding, torch.zeros(8, 32)))[:size]
    ids = {"d2t": torch.arange(48) // 8, "t2d": torch.zeros(size, dtype=torch.bool)}
    rewrite(folder, lambda tensors: tensors.update({"embed_tokens.weight": copy, **ids}))
    head = load_head(folder, target)
    assert head.embed_tokens is None and head.config.vocab_size == VOCAB_SIZE
    assert head.draft_to_target is not None
    assert head.draft_to_target.tolist() == [number + number // 8 for number in range(48)]
    ids["d2t"][47] = 17
    rewrite(folder, lambda tensors: tensors.update(ids))
    with pytest.raises(ValueError, match="leads to the token id 64; ids are 0 to 63"):
        load_head(folder, target)


CHECKPOINT_ERRORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "fc": (lambda tensors: tensors.pop("fc.weight"), r"The checkpoint has no fc\.weight"),
    "fc inputs": (
        lambda tensors: tensors.update({"fc.weight": torch.ones(32, 64)}),
        r"fc\.weight of the EAGLE-3 head takes 64 inputs; 3 captured layers of 32 each give 96",
    ),
    "lm_head rows": (
        lambda tensors: tensors.update({"lm_head.weight": torch.ones(40, 32)}),
        r"lm_head\.weight of the EAGLE-3 head has 40 rows; draft_vocab_size is 48",
    ),
    "shape": (
        lambda tensors: tensors.update({"norm.weight": torch.ones(33)}),
        r"norm\.weight has the shape \[33\].*\[32\]",
    ),
    "missing and surplus": (
        lambda tensors: tensors.update(other=tensors.pop("midlayer.hidden_norm.weight")),
        r"missing layers\.0\.hidden_norm\.weight; surplus other\.",
    ),
    "missing lm_head": (
        lambda tensors: tensors.pop("lm_head.weight"),
        r"missing lm_head\.weight; surplus none",
    ),
    "surplus norms": (
        lambda tensors: tensors.update({"aux_norm_low.weight": torch.ones(32)}),
        r"missing none; surplus fc_norm\.0\.weight",
    ),
    "surplus norm of all states": (
        lambda tensors: tensors.update({"input_norm.weight": torch.ones(96)}),
        r"missing none; surplus input_norm\.weight",
    ),
    "the mask of a parallel drafter": (
        lambda tensors: tensors.update(mask_hidden=torch.ones(1, 96)),
        "missing none; surplus mask_hidden",
    ),
    "twice": (
        lambda tensors: tensors.update({"model.layers.0.hidden_norm.weight": torch.ones(32)}),
        r"has layers\.0\.hidden_norm\.weight twice",
    ),
    "d2t": (
        lambda tensors: tensors.pop("d2t"),
        "no d2t; draft_vocab_size 48 of vocab_size 64 needs one",
    ),
    "d2t too high": (
        lambda tensors: tensors["d2t"].index_fill_(0, torch.tensor(47), 17),
        "d2t of the EAGLE-3 head leads to the token id 64; ids are 0 to 63",
    ),
    "d2t negative": (
        lambda tensors: tensors["d2t"].index_fill_(0, torch.tensor(2), -3),
        "d2t of the EAGLE-3 head leads to the token id -1; ids are 0 to 63",
    ),
    "d2t twice": (
        lambda tensors: tensors["d2t"].copy_(torch.tensor([0] * 7 + [-3] + [0] * 40)),
        "d2t of the EAGLE-3 head leads to the token id 4 more than once",
    ),
    "d2t shape": (
        lambda tensors: tensors.update(d2t=torch.zeros(47, dtype=torch.int64)),
        r"d2t has the shape \[47\] .* must be 48 integers",
    ),
    "d2t type": (
        lambda tensors: tensors.update(d2t=torch.zeros(48)),
        "the type torch.float32; it must be 48 int",
    ),
    "d2t of truth values": (
        lambda tensors: tensors.update(d2t=torch.zeros(48, dtype=torch.bool)),
        r"the type torch\.bool; it must be 48 int",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINT_ERRORS)
def test_a_checkpoint_that_does_not_fit_is_named(
    name: str, target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head")
    change, message = CHECKPOINT_ERRORS[name]
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        load_head(folder, target)


def test_an_output_layer_without_a_draft_vocabulary_is_refused_with_the_remedy(
    target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head")
    edit_config(folder, draft_vocab_size=None)
    with pytest.raises(ValueError, match="set draft_vocab_size to 48 in the head's config"):
        load_head(folder, target)


def test_missing_and_unreadable_files_are_named(target: CausalLM, tmp_path: Path) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", file="pytorch_model.bin")
    file = folder / "pytorch_model.bin"
    torch.save({"model": {}}, file)
    with pytest.raises(
        ValueError, match=r"pytorch_model\.bin must hold a dictionary of names to tensors"
    ):
        load_head(folder, target)
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not a readable"):
        load_head(folder, target)
    file.unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load_head(folder, target)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        load_head(folder, target)


class Planted:
    """Unpickling it with code execution creates a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", file="pytorch_model.bin")
    trace = tmp_path / "trace"
    torch.save({"fc.weight": Planted(trace)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not a readable"):
        load_head(folder, target)
    assert not trace.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert trace.exists(), "the pickle must run code if it is allowed to"
