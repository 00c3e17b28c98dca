"""The zoo's target and draft: their files, and their quality on held-out text of this interpreter's
standard library, with bounds that hold for Python 3.10 to 3.13; quantised copies."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.models.helpers import load, save_checkpoint
from tests.zoo.runs import NAMES, ZOO, Models, read_json, read_weights
from tllm_spec.models.linear import ColumnLinear, Linear
from tllm_spec.models.registry import model_config
from tllm_spec.training.acceptance import rounds, summary
from tllm_spec.zoo.quantise import is_projection, main
from tllm_spec.zoo.registry import resolve_model


@pytest.fixture(scope="module")
def models() -> Models:
    target, draft = (
        AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.float32).eval()
        for name in NAMES
    )
    return target, draft


def spread(tokens: Tensor, num_windows: int, length: int) -> Tensor:
    """`[num_windows, length]`: evenly spaced sequences."""
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    return windows[:: len(windows) // num_windows][:num_windows]


def test_all_weights_of_the_zoo_stay_under_26_mib() -> None:
    files = list(ZOO.rglob("*.safetensors"))
    assert len(files) >= len(NAMES)
    assert sum(file.stat().st_size for file in files) < 26 * 2**20


def test_the_draft_is_at_least_six_times_smaller(models: Models) -> None:
    target, draft = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert (target, draft) == (4_674_240, 737_920)
    assert draft * 6 <= target


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bf16_finite_and_tied(name: str) -> None:
    tensors, config = (
        read_weights(resolve_model(name)),
        read_json(resolve_model(name) / "config.json"),
    )
    assert "lm_head.weight" not in tensors
    assert all(
        tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in tensors.values()
    )
    assert tensors["model.embed_tokens.weight"].shape == (
        config["vocab_size"],
        config["hidden_size"],
    )


@pytest.mark.parametrize("name", NAMES)
def test_configs_are_spelt_as_in_transformers_4_and_load_here_and_there(name: str) -> None:
    folder = resolve_model(name)
    raw, tokenizer = read_json(folder / "config.json"), read_json(folder / "tokenizer_config.json")
    assert raw.keys() >= {"torch_dtype", "rope_theta"} and raw.keys().isdisjoint(
        {"dtype", "rope_parameters"}
    )
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"

    ours, theirs = model_config(folder), AutoConfig.from_pretrained(folder)
    assert (ours.dtype, theirs.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (ours.rope.theta, ours.eos_token_ids) == (raw["rope_theta"], (theirs.eos_token_id,))
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.decode([2, *loaded.encode("x = 1"), 3, 1], skip_special_tokens=True) == "x = 1"


@pytest.mark.slow
@torch.inference_mode()
def test_both_models_predict_held_out_code_and_mostly_the_same(
    models: Models, heldout_tokens: Tensor
) -> None:
    """An untrained model has log(2048) = 7.6 nats a token. Agreement on the files' own text
    excludes a pair that only repeats itself."""
    tokens = spread(heldout_tokens, 16, 512)
    target, draft = (model(tokens).logits for model in models)
    nats = [F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:]).item() for logits in (target, draft)]
    assert nats[0] < 2.4 and nats[1] < 2.8
    assert (target.argmax(-1) == draft.argmax(-1)).float().mean() > 0.6


@pytest.mark.slow
@torch.inference_mode()
def test_the_draft_has_the_required_acceptance_on_held_out_files(
    models: Models, heldout_tokens: Tensor
) -> None:
    """An acceptance length of 2.2 with four draft tokens is required. The texts are too short for
    most repetition."""
    target, draft = models
    prompts = spread(heldout_tokens, 24, 128)
    text = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=64, min_new_tokens=64
    )
    matches = (draft(text).logits[:, :-1].argmax(-1) == text[:, 1:])[:, 127:]
    accepted = [count for row in matches.tolist() for count in rounds(row, draft_len=4)]
    figures = summary(accepted, 4)
    assert figures["acceptance_length"] > 2.7
    assert figures["per_position"][0] > 0.65


# The largest error of a weight by the largest of a row.
FORMATS = {
    "fp8": 2.0**-3, "awq": 0.1, "gptq": 0.1, "gptq_v2": 0.1, "compressed": 0.1, "mxfp4": 0.26,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_a_copy_in_each_format_is_served_with_about_the_same_weights(
    form: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "model", "Llama", hidden_size=64, intermediate_size=96)
    main([str(tmp_path / "model"), str(tmp_path / "copy"), "--format", form])
    model, copy = (load(tmp_path / name) for name in ("model", "copy"))
    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            own, found = layer.full_weight(), copy.get_submodule(name)
            assert isinstance(found, Linear)
            parts = layer.parts if isinstance(layer, ColumnLinear) else [name]
            assert torch.equal(own, found.full_weight()) != all(
                is_projection(f"{part}.weight") for part in parts
            )
            largest = own.abs().amax(1, keepdim=True)
            assert ((found.full_weight() - own).abs() <= FORMATS[form] * largest).all()


def test_mxfp4_has_one_size_of_groups(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["zoo:llama", str(tmp_path / "copy"), "--format", "mxfp4", "--group-size", "64"])
    assert not (tmp_path / "copy").exists()
