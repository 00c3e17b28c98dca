"""An MTP module equals its plain-torch transcription, and its tensors are accounted for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.helpers import PagedRunner, load, random_tokens, reference_logits
from tests.models.mtp_reference import SAVERS, PlainMTP, export_modules, modules_of, save_with_mtp
from tllm_spec.models.draft_head import HeadRows
from tllm_spec.models.layers import Embedding
from tllm_spec.models.mtp import NextnModules, check_nextn
from tllm_spec.models.registry import model_config

TOKENS = random_tokens(31)


class ModuleRunner(PagedRunner):
    """Runs a module over its own pool."""

    def __init__(self, module: NextnModules) -> None:
        super().__init__(module.modules_by_step[0].target)
        self.module = module
        self.use_layers_of(module)

    @torch.inference_mode()
    def predict(
        self, tokens: list[int], hidden: torch.Tensor, *, as_window: bool = False, step: int = 0
    ) -> torch.Tensor:
        rows = {0: tokens}
        metadata = self.metadata({}, rows, 0) if as_window else self.metadata(rows, {}, 0)
        read = HeadRows(torch.tensor(tokens), metadata.positions, hidden)
        return self.module.forward(read, self.context(metadata), step)


def load_module(folder: Path, **options: Any) -> NextnModules:
    return modules_of(folder, load(folder, **options), **options)


@pytest.mark.parametrize("family", SAVERS)
def test_a_module_equals_its_transcription_in_chunks_and_windows(
    family: str, tmp_path: Path
) -> None:
    plain = PlainMTP(*save_with_mtp(tmp_path, family=family), tmp_path)
    hidden = plain.target_states(TOKENS[:-1])
    expected = plain.states(TOKENS[1:], hidden)
    runner = ModuleRunner(load_module(tmp_path))
    before = hidden.clone()
    states = [
        runner.predict(TOKENS[1:12], hidden[:11]),
        runner.predict(TOKENS[12:24], hidden[11:23]),
        runner.predict(TOKENS[24:28], hidden[23:27], as_window=True),
        runner.predict(TOKENS[28:], hidden[27:], as_window=True),
    ]
    assert torch.equal(hidden, before)
    torch.testing.assert_close(torch.cat(states), expected, rtol=0, atol=1e-4)
    logits, own = runner.module.compute_logits(states[-1]), plain.logits(expected[-3:])
    assert own.std() > 0.3
    torch.testing.assert_close(logits, own, rtol=0, atol=1e-4)


@pytest.mark.parametrize("step", [0, 1])
def test_the_modules_of_all_steps_share_one_lookup_of_a_steps_tokens(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup in an embedding that is sharded is a sum over the ranks."""
    save_with_mtp(tmp_path, num_modules=3)
    target, looked_up, lookup = load(tmp_path), list[torch.Tensor](), Embedding.lookup
    module = modules_of(tmp_path, target, 3)

    def counted(embedding: Embedding, ids: torch.Tensor) -> Any:
        looked_up.append(ids)
        return lookup(embedding, ids)

    monkeypatch.setattr(Embedding, "lookup", counted)
    ModuleRunner(module).predict(TOKENS, torch.randn(len(TOKENS), 64), step=step)
    assert [ids.tolist() for ids in looked_up] == [TOKENS]


def test_the_target_of_a_checkpoint_with_modules_equals_transformers(tmp_path: Path) -> None:
    model, _ = save_with_mtp(tmp_path, num_modules=2)
    logits = PagedRunner(load(tmp_path)).step({0: TOKENS})[0]
    torch.testing.assert_close(logits, reference_logits(model, TOKENS), rtol=0, atol=1e-4)


def test_tensors_after_the_announced_modules_are_surplus(tmp_path: Path) -> None:
    save_with_mtp(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.4.enorm.weight"] = torch.ones(64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"surplus model\.layers\.4\.enorm\.weight"):
        load(tmp_path)


def test_missing_and_surplus_tensors_of_a_module_are_named(tmp_path: Path) -> None:
    save_with_mtp(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.3."
    tensors[prefix + "surprise"] = tensors.pop(prefix + "eh_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing eh_proj\.weight; surplus surprise"):
        load_module(tmp_path)


def test_a_checkpoint_needs_the_modules_that_draft(tmp_path: Path) -> None:
    for number, wanted, problem in (
        (0, 1, "is 0; speculative_model may name a folder"),
        (2, 3, "max_draft_len = 3 needs .* is 2"),
    ):
        folder = tmp_path / str(number)
        save_with_mtp(folder, num_modules=number)
        with pytest.raises(ValueError, match=problem):
            check_nextn(model_config(folder), wanted)
    check_nextn(model_config(folder), 2)


def rewrite(folder: Path, changes: dict[str, torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | changes, folder / "model.safetensors", metadata={"format": "pt"})


def test_an_embedding_and_an_output_layer_that_differ_from_the_targets_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tensors = save_with_mtp(tmp_path)
    names = ("embed_tokens.weight", "shared_head.head.weight")
    own = {name: tensors[name].flip(0).contiguous() for name in names}
    number = model.config.num_hidden_layers
    rewrite(tmp_path, {f"model.layers.{number}.{name}": own[name] for name in names})
    plain, module = PlainMTP(model, tensors | own, tmp_path), load_module(tmp_path)
    hidden = plain.target_states(TOKENS[:-1])
    states = ModuleRunner(module).predict(TOKENS[1:], hidden)
    torch.testing.assert_close(states, plain.states(TOKENS[1:], hidden), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module.compute_logits(states), plain.logits(states))
    for name in ("embed_tokens", "lm_head"):
        assert f"{name}.weight differs from the target's" in caplog.text


def test_modules_with_different_embeddings_are_refused(tmp_path: Path) -> None:
    model, tensors = save_with_mtp(tmp_path, num_modules=2)
    name = f"model.layers.{model.config.num_hidden_layers + 1}.embed_tokens.weight"
    rewrite(tmp_path, {name: tensors["embed_tokens.weight"].flip(0).contiguous()})
    target = load(tmp_path)
    with pytest.raises(ValueError, match=f"{name} in .* differs from that of another MTP module"):
        modules_of(tmp_path, target, 2)


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, Path]:
    """A target without modules, and the folder of its module."""
    target, folder = tmp_path / "target", tmp_path / "exported"
    target.mkdir()
    save_with_mtp(target)
    export_modules(target, folder)
    return target, folder


def load_exported(target: Path, folder: Path) -> NextnModules:
    model = load(target)
    return modules_of(folder, model, is_exported=True)


def test_an_exported_module_is_that_of_the_whole_checkpoint(
    exported: tuple[Path, Path], tmp_path: Path
) -> None:
    save_with_mtp(tmp_path)
    expected = dict(load_module(tmp_path).named_parameters())
    found = dict(load_exported(*exported).named_parameters())
    assert found.keys() == expected.keys() and "steps.0.mlp.experts.gate_up" in found
    assert all(torch.equal(found[name], expected[name]) for name in found)
    target, folder = exported
    check_nextn(model_config(target), 1, folder)


def test_every_tensor_of_an_exported_folder_is_accounted_for(exported: tuple[Path, Path]) -> None:
    target, folder = exported
    file = folder / "nextn_layer_parameters.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.surprise"] = tensors.pop("model.layers.0.eh_proj.weight")
    tensors["model.norm.weight"] = torch.ones(64)
    tensors["model.layers.0.embed_tokens.weight"] = torch.ones(128, 64)  # a copy of the target's
    save_file(tensors, file)
    problem = r"missing eh_proj\.weight; surplus model\.norm\.weight, surprise\."
    with pytest.raises(ValueError, match=problem):
        load_exported(target, folder)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, r"exported MTP modules, whose .*NextN"),
        ({"rms_norm_eps": 1e-3}, r"not for this target: rms_norm_eps: 0\.001, and "),
        ({"kv_lora_rank": 16}, r"not for this target: mla: "),
    ],
)
def test_an_exported_folder_must_have_modules_for_the_target(
    change: dict[str, Any], problem: str, exported: tuple[Path, Path]
) -> None:
    target, folder = exported
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=problem):
        check_nextn(model_config(target), 1, folder)


def test_an_exported_folder_needs_a_module_for_each_step(exported: tuple[Path, Path]) -> None:
    target, folder = exported
    with pytest.raises(
        ValueError, match=r"max_draft_len = 2 needs .* num_hidden_layers of .* is 1"
    ):
        check_nextn(model_config(target), 2, folder)


def test_dummy_weights_need_only_the_config(tmp_path: Path) -> None:
    save_with_mtp(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    module = load_module(tmp_path, load_format="dummy")
    states = ModuleRunner(module).predict(TOKENS, torch.randn(len(TOKENS), 64))
    assert 0.3 < states.std() < 3
