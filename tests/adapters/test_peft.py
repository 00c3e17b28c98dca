"""Adapters that peft itself has written: logits and texts equal those of peft's model, merged and
not, in float32."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.adapters.test_adapted import DELTA, MLP, logits, put, tiny, with_tables
from tests.distributed.tiny_models import EXPERTS
from tests.executor.harness import Harness, output_of
from tests.models.deepseek import save_deepseek
from tests.models.gpt_oss import save_gpt_oss
from tests.models.helpers import load, random_tokens, reference_logits
from tests.models.qwen3_next import save_qwen3_next
from tests.models.test_gemma3 import save_gemma3
from tllm_spec.zoo.registry import resolve_model

peft = pytest.importorskip("peft")

STACKS = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
PATTERNS = {
    "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6},
    "alpha_pattern": {r".*\.1\.self_attn\.q_proj": 3, "down_proj": 1},
}


@dataclass(frozen=True)
class Case:
    """A model, and the configuration of an adapter of it. targets: as `lora_target_modules`."""

    save: Callable[[Path], object]
    config: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] | None = None


def zoo(folder: Path) -> None:
    shutil.copytree(resolve_model("zoo:llama"), folder)


MOE = tiny("Qwen3Moe", **EXPERTS)
V3 = partial(save_deepseek, architecture="DeepseekV3")
CASES = {
    "zoo:llama": Case(zoo, {"target_modules": "all-linear", **PATTERNS}),
    "rslora": Case(zoo, {"target_modules": r".*\.(0|2)\.self_attn\.[qv]_proj", "use_rslora": True}),
    "gaussian": Case(zoo, {"target_modules": ["up_proj"], "init_lora_weights": "gaussian"}),
    "qwen 3 moe": Case(MOE, {"target_modules": ATTENTION}),
    "qwen 3 moe, experts": Case(
        MOE, {"target_modules": [], "target_parameters": STACKS}, ("experts",)
    ),
    # These rewrite themselves to parameters: the router's and all experts'.
    "qwen 3 moe, all linear": Case(
        MOE, {"target_modules": "all-linear"}, ("experts", "gate", *ATTENTION)
    ),
    "deepseek, all linear": Case(
        V3, {"target_modules": "all-linear"}, ("experts", "gate", *LATENT, *MLP)
    ),
    "qwen 3 next, all linear": Case(
        partial(save_qwen3_next, shared_expert_intermediate_size=24),
        {"target_modules": "all-linear"},
        ("experts", "gate", "shared_expert_gate", *ATTENTION, *DELTA, *MLP),
    ),
    "gpt-oss, all linear": Case(
        save_gpt_oss, {"target_modules": "all-linear"}, ("experts", "router", *ATTENTION)
    ),
    "gemma 3": Case(save_gemma3, {"target_modules": "all-linear"}),
    "deepseek": Case(V3, {"target_modules": LATENT}),
    "deepseek, experts": Case(
        V3, {"target_modules": LATENT, "target_parameters": STACKS}, ("experts", *LATENT)
    ),
    "gpt-oss": Case(save_gpt_oss, {"target_modules": ATTENTION}),
    "gpt-oss, experts": Case(
        save_gpt_oss,
        {"target_modules": ["q_proj"], "target_parameters": STACKS},
        ("experts", "q_proj"),
    ),
}
WITNESS = "zoo:llama"


def peft_model(base: Path, folder: Path, config: dict[str, Any]) -> Any:
    """A random adapter in float32, also written to the folder."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.config._experts_implementation = "eager"
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 8} | config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.parametrize(
    "name",
    [each if each == WITNESS else pytest.param(each, marks=pytest.mark.slow) for each in CASES],
)
def test_logits_with_an_adapter_of_peft_equal_those_of_pefts_model(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    case.save(tmp_path / "base")
    adapted = peft_model(tmp_path / "base", tmp_path / "adapter", case.config)
    tables = with_tables(model := load(tmp_path / "base"), case.targets)
    put(tables, 1, tmp_path / "adapter")
    tokens = random_tokens(24)
    plain, found = logits(model, tables, [-1, 1], tokens=tokens)
    unmerged = reference_logits(adapted, tokens)
    merged = reference_logits(adapted.merge_and_unload(), tokens)
    assert (unmerged - plain).abs().max() > 0.1, "the adapter acts"
    for expected in (unmerged, merged):  # logits of zoo:llama are up to 17
        atol = 1e-5 * max(10.0, expected.abs().max().item())
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.slow
def test_the_text_with_an_adapter_of_peft_is_that_of_peft(tmp_path: Path) -> None:
    zoo(tmp_path / "base")
    adapted = peft_model(tmp_path / "base", tmp_path / "adapter", CASES[WITNESS].config)
    spec = {"decoding_type": "NGram", "max_draft_len": 4}
    lora = {"lora_dir": {"own": str(tmp_path / "adapter")}}
    harness = Harness(tmp_path / "base", lora_config=lora, speculative_config=spec)
    prompt = [each + 4 for each in random_tokens(24)]
    requests = [harness.submit(prompt, 24, adapter=name) for name in ("own", None)]
    harness.run()
    own, other = map(output_of, requests)
    text = adapted.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert text[0, len(prompt) :].tolist()[: len(own)] == own != other
