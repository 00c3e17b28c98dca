"""Quantised copies of models, as the script writes them."""

from pathlib import Path

import pytest
import torch

from tests.models.helpers import load, save_checkpoint
from tllm_spec.models.linear import ColumnLinear, Linear
from tllm_spec.zoo.quantise import is_projection, main

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
