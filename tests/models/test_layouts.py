"""Checkpoints of published layouts: each tensor is needed, no other is taken, and one sentence says
which it is. test_block_heads.py, test_qwen3_next.py and test_eagle3_loading.py have heads."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.deepseek import save_deepseek
from tests.models.fp8_checkpoint import is_projection, keeping_fp8, keeping_int4, quantise
from tests.models.gemma4 import KINDS, TOWERS, save_larger, save_with_towers
from tests.models.helpers import load
from tests.models.qwen3_next import save_qwen3_next, save_with_images
from tests.models.test_families import SAVE
from tests.models.test_qwen3_next_formats import FORMATS, is_published, saved
from tests.models.with_images import save_with_images as save_with_pixtral

Save = Callable[[Path], Any]
WIDE = {"hidden_size": 128, "intermediate_size": 160, "moe_intermediate_size": 48}


def in_fp8(save: Callable[..., Any], *names: str, **config: Any) -> Save:
    """In blocks of 128, of which the last is short. names: of what else is quantised."""

    def wants(name: str) -> bool:
        return is_projection(name) or name.endswith(names)

    def write(folder: Path) -> None:
        save(folder, **WIDE | config)
        quantise(folder, wants, "deepseek")

    return write


INDEXER = ("indexer.wq_b.weight", "indexer.wk.weight")
LAYOUTS: dict[str, Save] = {
    "Qwen3-Next": save_qwen3_next,
    "Qwen3.5": partial(save_qwen3_next, family="Qwen3_5"),
    "Qwen3.5, images": partial(save_with_images, family="Qwen3_5"),
    "Qwen3.5 MoE, images": partial(save_with_images, family="Qwen3_5Moe"),
    **{
        f"{family}, {name}": partial(
            saved, family=family, quantise=partial(FORMATS[name], wants=is_published)
        )
        for family in ("Qwen3Next", "Qwen3_5")
        for name in FORMATS
    },
    **{f"Gemma 4, {kind}": partial(save_larger, kind=kind) for kind in KINDS},
    **{name: partial(save_with_towers, architecture=name, kind="dense") for name in TOWERS},
    "DeepSeek V3.2": partial(save_deepseek, architecture="DeepseekV32"),
    "DeepSeek V3.2, FP8": in_fp8(partial(save_deepseek, architecture="DeepseekV32"), *INDEXER),
    "GLM-5": partial(save_deepseek, architecture="GlmMoeDsa"),
    "GLM-5, FP8": in_fp8(partial(save_deepseek, architecture="GlmMoeDsa"), *INDEXER),
    "Ministral 3": SAVE["Ministral3"],
    "Ministral 3, images": partial(save_with_pixtral, family="Mistral3, Ministral 3"),
    "Mistral 4": SAVE["Mistral4"],
    "Mistral 4, images": partial(save_with_pixtral, family="Mistral3, Mistral 4"),
    "MiniMax M2": SAVE["MiniMaxM2"],
    "MiniMax M2, FP8": in_fp8(SAVE["MiniMaxM2"], "w1.weight", "w2.weight", "w3.weight"),
    "OLMo 2": SAVE["Olmo2"],
}
# Sizes that follow from others, groups of neighbouring inputs, and scales without an effect.
OPTIONAL = ("weight_shape", "g_idx", "input_scale")
LEFT_OUT = ("visual.", "vision_", "audio", "embed_vision", "multi_modal")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.thinned(40)
def test_each_tensor_is_needed_and_no_other_is_taken(layout: str, tmp_path: Path) -> None:
    LAYOUTS[layout](tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    texts = [name for name in tensors if not any(part in name for part in LEFT_OUT)]
    kinds = {re.sub(r"\d+", "0", name): name for name in texts if not name.endswith(OPTIONAL)}
    if "desc_act" in layout:
        kinds |= {name: name for name in texts if "out_proj.g_idx" in name}

    def refusal(kept: dict[str, torch.Tensor]) -> str:
        save_file(kept, file, metadata={"format": "pt"})
        with keeping_fp8(), keeping_int4(), pytest.raises(ValueError) as found:
            load(tmp_path)
        return str(found.value)

    def check(sentence: str, name: str) -> None:
        own = name.removesuffix(".weight").rpartition("language_model.")[2]
        module = own if own in sentence else own.rpartition(".")[0]
        assert module.removeprefix("model.") in sentence, (name, sentence)
        assert "\n" not in sentence and sentence.endswith(".")

    with keeping_fp8(), keeping_int4():
        load(tmp_path)
    for name in kinds.values():
        check(refusal({each: x for each, x in tensors.items() if each != name}), name)
    name = re.sub(r"\.[a-z_]+$", ".other", texts[0])
    check(refusal(tensors | {name: torch.ones(3)}), name)
