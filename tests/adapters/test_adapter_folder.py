"""Folders in PEFT's format: what is honoured, and every reason for which one is refused."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters.folders import PREFIX, linear_shapes, random_pairs, write_adapter
from tests.models.helpers import load, save_checkpoint
from tllm_spec.adapters.adapted import AdapterTables
from tllm_spec.adapters.adapter_folder import read_adapter

Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
SHAPES = {Q: (64, 64), V: (32, 64)}
PAIRS = random_pairs(SHAPES)


def scales_of(folder: Path, **config: Any) -> tuple[float, float]:
    """The factors of Q's and V's matrices."""
    pairs = random_pairs(SHAPES, {"q_proj": 4, "v_proj": 2})
    adapter = read_adapter(write_adapter(folder, pairs, rank_pattern={"v_proj": 2}, **config), 8)
    found = []
    for name in (Q, V):
        assert torch.equal(adapter.pairs[name].a, pairs[name][0])
        scale = (adapter.pairs[name].b / pairs[name][1]).mean().item()
        torch.testing.assert_close(adapter.pairs[name].b, scale * pairs[name][1])
        found.append(scale)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, (2, 4)),
        ({"use_rslora": True}, (4, 8 / math.sqrt(2))),
        ({"alpha_pattern": {"v_proj": 1.0}}, (2, 0.5)),
        ({"alpha_pattern": {"layers.1.*": 3, "v_proj": 1}}, (2, 1.5)),
        ({"alpha_pattern": {"proj": 3, "^model.layers.0.self_attn.q_proj": 6}}, (1.5, 4)),
        (
            {
                "target_modules": ["v_proj"],
                "target_parameters": ["q_proj.weight"],
                "alpha_pattern": {"q_proj": 3, "q_proj.weight": 6},
            },
            (1.5, 4),
        ),
    ],
    ids=str,
)
def test_each_module_has_the_scale_of_its_own_rank_and_alpha(
    config: dict[str, Any], scales: tuple[float, float], tmp_path: Path
) -> None:
    assert scales_of(tmp_path / "adapter", **config) == pytest.approx(scales)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": r"model\.layers\.\d+\.self_attn\.(q|v)_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": [Q, "self_attn.v_proj"]},
        {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", "inference_mode": False, "revision": "x"},
        {"use_dora": False, "modules_to_save": None, "layer_replication": None, "unheard_of": []},
        {"init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_what_names_the_modules_or_is_off_or_of_training_is_accepted(
    config: dict[str, Any], tmp_path: Path
) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "adapter", PAIRS, **config), 4)
    assert adapter.rank == 4 and adapter.pairs.keys() == SHAPES.keys()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "ADALORA"}, r"peft_type is 'ADALORA'; accepted is 'LORA'"),
        ({"use_dora": True}, "use_dora is True; it is served only if it is off"),
        ({"bias": "all"}, "bias is 'all'; accepted is 'none'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"unheard_of": 1}, "unheard_of is 1"),
        ({"r": 9}, "r is 9; accepted is 1 to max_lora_rank, which is 8"),
        ({"r": True}, "r is True"),
        ({"rank_pattern": {"v_proj": 0}}, "v_proj is 0; accepted is 1"),
        ({"rank_pattern": ["v_proj"]}, "rank_pattern is .* accepted is an object"),
        ({"lora_alpha": math.inf}, "lora_alpha is inf; accepted is a finite number"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000.*; accepted is a finite number"),
        ({"lora_alpha": 1e39}, "lora_alpha is 1e.39; accepted is a finite number"),
        ({"alpha_pattern": {"v_proj": "2"}}, "v_proj is '2'"),
        ({"r": 9, "rank_pattern": {"r": 4}}, "r is 9; accepted is 1"),
        ({"lora_alpha": "8", "alpha_pattern": {"lora_alpha": 8}}, "lora_alpha is '8'"),
        ({"use_rslora": 1}, "use_rslora is 1; accepted is true or false"),
        ({"target_modules": "(q_proj"}, "no regular expression"),
        ({"target_modules": 3}, "target_modules is 3"),
        ({"use_dora": True, "bias": "all"}, "bias is 'all'; .*; use_dora is True"),
    ],
    ids=str,
)
def test_a_config_that_is_not_served_is_refused_with_all_reasons(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", PAIRS, **config)
    with pytest.raises(ValueError, match=reason):
        read_adapter(folder, 8)


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return write


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def linked(folder: Path) -> None:
    outside = folder.parent.parent / "outside.safetensors"
    (folder / "adapter_model.safetensors").rename(outside)
    (folder / "adapter_model.safetensors").symlink_to(outside)


A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "no adapter_config.json"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "not readable JSON"),
    "a pickle": (pickled, "adapter_model.bin is a pickle, which is not read"),
    "cut": (cut, "not a readable safetensors file"),
    "a link": (linked, "files outside of .*: adapter_model.safetensors"),
    "no tensors": (changed(lambda t: t.clear()), "there are no tensors"),
    "no B": (changed(lambda t: t.pop(B)), "q_proj has no lora_B"),
    "no A": (changed(lambda t: t.pop(A)), "q_proj has no lora_A"),
    "NaN": (changed(lambda t: t[A].fill_(math.nan)), "infinite or no numbers"),
    "infinite": (changed(lambda t: t[B].view(-1)[7:8].fill_(math.inf)), "infinite or no numbers"),
    "another rank": (
        changed(lambda t: t.update({A: torch.ones(3, 64), B: torch.ones(64, 3)})),
        r"lora_A of the shape \[3, 64\] .* the rank is 4",
    ),
    "unlike ranks": (changed(lambda t: t.update({A: torch.ones(3, 64)})), r"must be \[r, in\]"),
    "integers": (changed(lambda t: t.update({A: torch.ones(4, 64).int()})), "types I32 and F32"),
    "a vector": (changed(lambda t: t.update({A: torch.ones(64)})), r"must be \[r, in\]"),
    "an embedding": (
        changed(
            lambda t: t.update({f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(4)})
        ),
        "lora_embedding_A' is no lora_A.weight or lora_B.weight",
    ),
    "a saved module": (
        changed(lambda t: t.update({f"{PREFIX}lm_head.weight": torch.ones(4)})),
        "lm_head.weight' is no lora_A.weight",
    ),
    "twice": (
        changed(lambda t: t.update({A.removeprefix(PREFIX): t[A] * 3})),
        f"q_proj has both {A.replace('.', '[.]')} and model.layers.0",
    ),
    "no target": (
        changed(
            lambda t: t.update({key.replace("q_proj", "k_proj"): t[key] + 0 for key in (A, B)})
        ),
        "k_proj is named by neither target_modules nor target_parameters",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    change, reason = BAD[name]
    root = tmp_path / "root"
    folder = write_adapter(root / "adapter", PAIRS)
    read_adapter(folder, 8, root)
    change(folder)
    with pytest.raises(ValueError, match=reason) as refused:
        read_adapter(folder, 8, root)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("shapes", "targets", "reason"),
    [
        ({Q: (32, 64)}, None, r"q_proj is \(32, 64\), its layer \(64, 64\)"),
        ({"model.layers.7.self_attn.q_proj": (64, 64)}, None, "is no linear layer of the model"),
        ({Q: (64, 64)}, ["v_proj"], "lora_target_modules does not have 'q_proj'"),
        ({"lm_head": (128, 64)}, None, "lm_head is the output layer"),
        ({Q: (32, 64), V: (9, 9)}, None, "q_proj is .*v_proj is"),
    ],
    ids=str,
)
@torch.inference_mode()
def test_an_adapter_that_does_not_fit_the_model_is_refused_with_all_reasons(
    shapes: Any, targets: Any, reason: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "base", "Llama")
    tables = AdapterTables(load(tmp_path / "base"), 1, 8, 8, targets)
    adapter = read_adapter(write_adapter(tmp_path / "adapter", random_pairs(shapes)), 8)
    with pytest.raises(ValueError, match=reason):
        tables.check(adapter)


@torch.inference_mode()
def test_a_module_under_two_of_its_names_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base", "Mixtral")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    shape = linear_shapes(stored, "layers.0.block_sparse_moe.experts.0.w1").popitem()[1]
    names = [f"model.layers.0.{layer}.experts.0.w1" for layer in ("mlp", "block_sparse_moe")]
    tables = AdapterTables(load(tmp_path / "base"), 1, 8, 8, ["experts"])
    for number, reason in ((1, ""), (2, "w1 is there twice")):
        pairs = random_pairs(dict.fromkeys(names[:number], shape))
        adapter = read_adapter(write_adapter(tmp_path / "adapter", pairs), 8)
        with pytest.raises(ValueError, match=reason) if reason else nullcontext():
            tables.check(adapter)


def test_the_hash_is_of_what_acts(tmp_path: Path) -> None:
    def hashed(name: str, pairs: Any = PAIRS, **config: Any) -> str:
        return read_adapter(write_adapter(tmp_path / name, pairs, **config), 8).content_hash

    own = hashed("own")
    assert len(own) == 64
    assert hashed("inert", lora_dropout=0.5, base_model_name_or_path="elsewhere") == own
    halved = {name: (a, b / 2) for name, (a, b) in PAIRS.items()}
    others = (
        hashed("scale", lora_alpha=9),
        hashed("b", halved),
        hashed("a", random_pairs(SHAPES, 3), r=3),
    )
    assert len({own, *others}) == 4
