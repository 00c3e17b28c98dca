"""EAGLE-1/2 and EAGLE-3 heads give the logits and states of a plain-torch transcription, with
attention over heads and over latents."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.tiny_llama import write_tiny_llama
from tests.models.deepseek import save_deepseek
from tests.models.eagle3_reference import Eagle3Reference
from tests.models.eagle3_runner import (
    HeadRunner,
    assert_wanted_rows_are_those_of_a_whole_forward,
    captured_states,
    load_head,
)
from tests.models.eagle_reference import EagleReference
from tests.models.helpers import (
    CPU,
    MAX_POSITIONS,
    assert_close,
    load,
    random_tokens,
    save_checkpoint,
)
from tests.models.latent_reference import LatentReference
from tests.models.test_eagle import VARIANTS as EAGLE_VARIANTS
from tests.models.test_eagle import load_head as load_eagle_head
from tests.models.tiny_eagle import write_tiny_eagle
from tests.models.tiny_eagle3 import edit_config, rewrite, write_tiny_eagle3
from tllm_spec.attention.geometry import LatentGeometry
from tllm_spec.distributed.communicator import Mapping
from tllm_spec.models.draft_head import DraftHead
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.layers import RMSNorm
from tllm_spec.models.llama import CausalLM

VOCAB_SIZE = 64
TOKENS = [token % VOCAB_SIZE for token in random_tokens(24)]

SPECULATORS: dict[str, Any] = {"speculators": True, "spelling": "layers"}
WIDE: dict[str, Any] = {"hidden_size": 48, "target_hidden_size": 32, "own_modules": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "reduced vocabulary": {},
    "whole vocabulary": {"draft_vocab_size": VOCAB_SIZE},
    "the target's output layer": {"draft_vocab_size": None},
    "the embedding as output layer": {"draft_vocab_size": None, "tie_word_embeddings": True},
    "a window": {"sliding_window": 4, "layer_types": ["sliding_attention"]},
    "its own embedding": {"own_modules": True},
    "its own tied embedding": {
        "draft_vocab_size": None,
        "tie_word_embeddings": True,
        "own_modules": True,
    },
    "another width": WIDE,
    "another width, all norms": WIDE | {"norm_before_fc": True, "fc_norm": True},
    "another width, tied": WIDE | {"tie_word_embeddings": True, "draft_vocab_size": None},
    "tied, with a reduced output layer": {"tie_word_embeddings": True, "own_modules": True},
    "norm_output": {"norm_output": True},
    "fc_norm": {"fc_norm": True, "norm_output": True},
    "biased fc": {"bias": True},
    "rope theta": {"rope_theta": 30.0},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "two layers": {"num_layers": 2},
    "five captured layers": {"num_captured": 5, "fc_norm": True},
    "wide enough for packed weights": {"intermediate_size": 2048, "draft_vocab_size": 60},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_residual, two layers": {"norm_before_residual": True, "num_layers": 2},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_fc, biased": {"norm_before_fc": True, "bias": True},
    "norm_before_fc and fc_norm": {"norm_before_fc": True, "fc_norm": True},
    "speculators": SPECULATORS,
    "speculators, all norms": SPECULATORS
    | {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True},
    "speculators, a Qwen3 layer": SPECULATORS
    | {"model_type": "qwen3", "norm_before_residual": True, "num_layers": 2},
}
# Run without the CPU's specialised norms, which is the path of CUDA on its kernels' references.
UNSPECIALISED = [
    *(("EAGLE-3", name) for name in ("reduced vocabulary", "norm_before_residual, two layers")),
    ("EAGLE-3", "speculators, all norms"),
    ("EAGLE-1/2", "all"),
]


@pytest.fixture
def target(tmp_path: Path) -> CausalLM:
    return load(write_tiny_llama(tmp_path / "target", num_layers=6))


def assert_drafts_like_the_reference(
    head: DraftHead, reference: Eagle3Reference, captured: torch.Tensor
) -> None:
    """A prompt in two chunks, three recurrent steps together with another request's, then a
    verified window of 4."""
    fused = head.fuse(captured)
    assert_close(fused, reference.fuse(captured))
    runner = HeadRunner(head)
    runner.draft({1: (TOKENS[:7], fused[1:8])})
    first = runner.draft({0: (TOKENS[:12], fused[:12])})[0]
    second = runner.draft({0: (TOKENS[12:20], fused[12:20])})[0]
    logits, recurrent = (torch.cat(parts) for parts in zip(first, second, strict=True))
    expected = reference.forward(TOKENS[:20], fused[:20])
    assert_close(logits, expected[0])
    assert_close(recurrent, expected[1])
    tokens, hidden = TOKENS[:20], fused[:20]
    own, other = recurrent[-1:], fused[:1]
    for _ in range(3):
        ids = logits[-1].argmax()
        token = int(ids if head.draft_to_target is None else head.draft_to_target[ids])
        tokens, hidden = [*tokens, token], torch.cat((hidden, own))
        drafted = runner.draft(windows={1: ([3], other), 0: ([token], own)})
        logits, own = drafted[0]
        expected = reference.forward(tokens, hidden)
        assert_close(logits, expected[0][-1:])
        assert_close(own, expected[1][-1:])
    runner.rewind(0, 3)
    verified = [*TOKENS[:20], 5, 9, 2, 6]
    window = runner.draft(windows={0: (verified[20:], fused[20:])})[0]
    expected = reference.forward(verified, fused)
    assert_close(window[0], expected[0][20:])
    assert_close(window[1], expected[1][20:])


YARN = {
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "factor": 64.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
    "type": "yarn",
}
LATENT_VARIANTS: dict[str, dict[str, Any]] = {
    "flat": {},
    "of V3, under layers": {
        "architectures": ["Eagle3DeepseekV3ForCausalLM"],
        "spelling": "layers",
        "draft_vocab_size": 64,
    },
    "norms of EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_residual, two layers": {"norm_before_residual": True, "num_layers": 2},
    "YaRN": {"rope_scaling": YARN, "rope_theta": 50000.0},
    "no q_lora": {"q_lora_rank": None},
    "a wide epsilon": {"rms_norm_eps": 0.5},
}
# By kind and variant. An EAGLE-1/2 head reads the target's state after its final norm.
HEADS = [
    *(("EAGLE-3", name) for name in VARIANTS),
    *(("latents", name) for name in LATENT_VARIANTS),
    *(("EAGLE-1/2", name) for name in EAGLE_VARIANTS),
]
NUM_LAYERS = 6


@dataclass(frozen=True)
class Made:
    head: Any
    reference: Eagle3Reference
    captured: torch.Tensor


def made(kind: str, name: str, folder: Path, **options: Any) -> Made:
    """A head for a target with these options of `load`."""
    target = load(write_tiny_llama(folder / "target", num_layers=NUM_LAYERS), **options)
    if kind == "EAGLE-1/2":
        path = write_tiny_eagle(folder / "head", **EAGLE_VARIANTS[name])
        captured = captured_states(target, TOKENS, (NUM_LAYERS,))
        return Made(load_eagle_head(path, target), EagleReference(path, target), captured)
    variant = VARIANTS[name] if kind == "EAGLE-3" else LATENT_VARIANTS[name] | {"latent": True}
    path, number = write_tiny_eagle3(folder / "head", **variant), variant.get("num_captured", 3)
    kind_of_reference = Eagle3Reference if kind == "EAGLE-3" else LatentReference
    captured = captured_states(target, TOKENS, tuple(range(number)))
    head = load_head(path, target, num_captured=number)
    return Made(head, kind_of_reference(path, target), captured)


@pytest.mark.parametrize(("kind", "name"), HEADS)
def test_prefill_and_recurrent_steps_equal_the_references_forward(
    kind: str, name: str, tmp_path: Path
) -> None:
    own = made(kind, name, tmp_path)
    assert_drafts_like_the_reference(own.head, own.reference, own.captured)


@pytest.mark.parametrize(("kind", "name"), UNSPECIALISED)
def test_the_path_without_specialised_norms_equals_the_reference(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RMSNorm, "specialize_for_cpu", lambda norm: None)
    own = made(kind, name, tmp_path)
    assert kind != "EAGLE-3" or own.head.norm.scaled_weight is None
    assert_drafts_like_the_reference(own.head, own.reference, own.captured)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("EAGLE-3", name) for name in ("reduced vocabulary", "norm_output", "two layers")),
        ("EAGLE-3", "norm_before_residual"),
        *(("EAGLE-1/2", name) for name in ("as published", "all")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_wanted_rows_equal_a_whole_forward_and_all_rows_write_their_kv(
    dtype: torch.dtype, kind: str, name: str, tmp_path: Path
) -> None:
    own = made(kind, name, tmp_path, dtype=dtype)
    hidden = own.head.fuse(own.captured)
    assert_wanted_rows_are_those_of_a_whole_forward(own.head, TOKENS, hidden)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("kind", "name"), [head for head in HEADS if head[0] != "latents"])
def test_a_gpu_gives_the_logits_and_states_of_the_cpu(kind: str, name: str, tmp_path: Path) -> None:
    results = []
    for device in ("cpu", "cuda"):
        own = made(kind, name, tmp_path, device=torch.device(device))
        fused, runner = own.head.fuse(own.captured), HeadRunner(own.head)
        prefill = runner.draft({0: (TOKENS[:20], fused[:20])})[0]
        window = runner.draft(windows={0: (TOKENS[20:], fused[20:])})[0]
        results.append([part.cpu() for part in (*prefill, *window)])
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)


def test_a_head_drafts_for_a_qwen3_target_with_its_own_head_dim(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "target", "Qwen3", head_dim=32, tie_word_embeddings=True)
    target = load(tmp_path / "target")
    folder = write_tiny_eagle3(
        tmp_path / "head",
        hidden_size=64,
        vocab_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_captured=2,
        rope_theta=1e6,
    )
    head = load_head(folder, target, num_captured=2)
    assert head.config.head_dim != head.config.hidden_size // head.config.num_heads
    assert_drafts_like_the_reference(
        head, Eagle3Reference(folder, target), captured_states(target, TOKENS, (0, 1))
    )


def test_positions_may_exceed_the_length_that_the_head_was_trained_on(
    target: CausalLM, tmp_path: Path
) -> None:
    head = load_head(write_tiny_eagle3(tmp_path / "head", max_position_embeddings=8), target)
    assert head.cos_sin.shape[0] == MAX_POSITIONS


def test_the_head_has_the_targets_dtype_and_device(tmp_path: Path) -> None:
    target = load(write_tiny_llama(tmp_path / "target", num_layers=6), dtype=torch.bfloat16)
    head = load_head(write_tiny_eagle3(tmp_path / "head", fc_norm=True), target)
    assert (head.dtype, head.device) == (torch.bfloat16, CPU)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    fused = head.fuse(captured_states(target, TOKENS, (0, 1, 2)))
    logits, recurrent = HeadRunner(head).draft({0: (TOKENS, fused)})[0]
    assert logits.dtype == recurrent.dtype == torch.bfloat16


def test_only_float32_on_a_cpu_is_specialised(target: CausalLM, tmp_path: Path) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", intermediate_size=8192)
    head = load_head(folder, target)
    layer = head.layers[0]
    assert head.norm.scaled_weight is not None
    assert layer.mlp.gate_up_proj.weight_format.packed is not None
    rounded = load(tmp_path / "target", dtype=torch.bfloat16)
    assert load_head(folder, rounded).norm.scaled_weight is None


def test_dummy_weights_need_only_the_config_and_have_a_valid_draft_vocabulary(
    target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", draft_vocab_size=48, fc_norm=True)
    (folder / "model.safetensors").unlink()
    heads = [load_head(folder, target, load_format="dummy") for _ in range(2)]
    captured = captured_states(target, TOKENS, (0, 1, 2))
    logits = [HeadRunner(head).draft({0: (TOKENS, head.fuse(captured))})[0][0] for head in heads]
    assert torch.equal(*logits)
    assert logits[0].shape == (24, 48) and 0.1 < logits[0].std() < 10
    ids = heads[0].draft_to_target
    assert ids is not None and ids.dtype == torch.int64
    assert (ids.diff() > 0).all() and ids[0] >= 0 and ids[-1] < VOCAB_SIZE
    edit_config(folder, draft_vocab_size=None)
    assert load_head(folder, target, load_format="dummy").draft_to_target is None


def test_a_head_with_latents_drafts_for_a_target_with_latents(tmp_path: Path) -> None:
    save_deepseek(tmp_path / "target", "DeepseekV3")
    target = load(tmp_path / "target")
    sizes = {"hidden_size": 64, "vocab_size": 128, "draft_vocab_size": 128}
    folder = write_tiny_eagle3(tmp_path / "head", latent=True, **sizes)
    head, captured = load_head(folder, target), captured_states(target, TOKENS, (0, 1, 2))
    assert_drafts_like_the_reference(head, LatentReference(folder, target), captured)


def test_a_published_config_is_read() -> None:
    config = Eagle3Config.from_dict(
        {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 1,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-5,
            "vocab_size": 163840,
            "draft_vocab_size": 163840,
            "rope_theta": 50000.0,
            "rope_scaling": YARN | {"original_max_position_embeddings": 4096},
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]},
            # Those of the target, which some heads repeat.
            "n_routed_experts": 384,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "num_experts_per_tok": 8,
            "ep_size": 1,
        }
    )
    assert config.capture_layers == (1, 29, 57)
    assert config.moe is None and config.num_nextn_layers == 0
    assert config.mla is not None and config.mla.norm_eps == 1e-5
    (group,) = config.layer_groups(Mapping(0, 8, 8))
    assert isinstance(group.geometry, LatentGeometry)
    assert (group.geometry.num_heads, group.geometry.latent_dim) == (8, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 8}, "sliding_window is 8, and only None is served"),
        ({"mlp_bias": True}, "mlp_bias is True, and only False is served"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"clip_qkv": 7}, "clip_qkv is 7, which is not served"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "o_proj.weight has the shape"),
    ],
)
def test_keys_that_are_not_served_are_named(
    changes: dict[str, Any], message: str, target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", latent=True)
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_head(folder, target)


def test_tensors_of_experts_are_named(target: CausalLM, tmp_path: Path) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", latent=True)
    router = {"midlayer.mlp.gate.weight": torch.zeros(4, 32)}
    rewrite(folder, lambda tensors: tensors.update(router))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate\.weight"):
        load_head(folder, target)
