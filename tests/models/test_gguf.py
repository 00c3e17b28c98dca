"""GGUF files give the logits of transformers for the same file, or are refused with the reason."""

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.fp8_checkpoint import keeping_int4
from tests.models.helpers import PagedRunner, load, random_tokens, reference_logits, save_checkpoint
from tests.models.test_int4 import int4_names
from tllm_spec.models.formats import gguf_tensors
from tllm_spec.models.registry import model_config
from tllm_spec.models.weights import weight_table
from tllm_spec.zoo import registry

gguf = pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Type  # noqa: E402 (the line above skips without it)

from tests.models.gguf_checkpoint import Settle, nothing, save_gguf  # noqa: E402

NO_LENGTH, PAST_END = b"\xff" * 8, r"model\.gguf is not .* end after the end of the file"
TOKENS = random_tokens(20)
SIZES = {"hidden_size": 256, "intermediate_size": 512}
# Each type at least once, by ends of names.
TYPES = {
    "layers.0.self_attn.q_proj.weight": Type.Q4_0,
    "layers.1.self_attn.q_proj.weight": Type.Q6_K,
    "layers.0.self_attn.k_proj.weight": Type.Q4_1,
    "layers.1.self_attn.k_proj.weight": Type.Q4_K,
    "v_proj.weight": Type.Q5_0,
    "o_proj.weight": Type.Q5_1,
    "gate_proj.weight": Type.Q4_K,
    "up_proj.weight": Type.Q5_K,
    "down_proj.weight": Type.Q6_K,
    "embed_tokens.weight": Type.Q8_0,
    "lm_head.weight": Type.BF16,
}


def window(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(8)


def save(
    folder: Path,
    architecture: str = "Llama",
    types: dict[str, Type] | None = None,
    settle: Settle = nothing,
    **config: Any,
) -> Path:
    model = save_checkpoint(folder / "plain", architecture, **SIZES | config)
    tensors = model.state_dict()
    if config.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    path = folder / "model.gguf"
    return save_gguf(path, architecture.lower(), model.config, tensors, types, settle)


def logits_of(path: Path) -> torch.Tensor:
    return PagedRunner(load(path)).step({0: TOKENS})[0]


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    # transformers does not read the size of a head, which Qwen3's default is 128 for.
    "Qwen3": {"head_dim": 128},
    "Gemma3": {
        "head_dim": 256,
        "num_hidden_layers": 7,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.thinned
@pytest.mark.parametrize("architecture", CONFIGS)
def test_all_types_give_the_logits_of_transformers(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate")
    monkeypatch.setattr(gguf_tensors, "AT_ONCE", 4096)  # so that parts of tensors are joined
    # transformers does not read the size of a head, which Qwen3's default is 128 for.
    path = save(
        tmp_path, architecture, TYPES, **({"head_dim": 128} if architecture == "Qwen3" else {})
    )
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    found, expected = logits_of(path), reference_logits(reference.eval(), TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.3


@pytest.mark.parametrize("architecture", CONFIGS)
def test_layers_of_q4_0_keep_4_bits(architecture: str, tmp_path: Path) -> None:
    """But for a layer with a part of another type."""
    types = {"layers.0.self_attn.q_proj.weight": Type.Q4_1, "weight": Type.Q4_0}
    path = save(tmp_path, architecture, types, **CONFIGS[architecture])
    expected = logits_of(path)
    with keeping_int4():
        model = load(path)
    found = PagedRunner(model).step({0: TOKENS})[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    dequantised = {f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"}
    projections = {name for name in weight_table(model) if "_proj.weight" in name}
    assert int4_names(model) == projections - dequantised


@pytest.mark.parametrize("kind", [Type.F32, Type.F16])
def test_a_file_with_unquantised_weights_gives_the_logits_of_the_folder(
    kind: Type, tmp_path: Path
) -> None:
    path = save(tmp_path, types={"weight": kind}, tie_word_embeddings=True)
    found, expected = logits_of(path), logits_of(tmp_path / "plain")
    tolerance = 0.0 if kind == Type.F32 else 0.02
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def llama3_factors(scale: float = 1.0) -> Settle:
    """What llama.cpp writes for Llama 3.1 with a head of 64, a theta of 10,000 and a factor of 8.

    scale: of the wavelengths between."""
    wavelengths = 2 * np.pi * 10000.0 ** (np.arange(32) / 32)
    smooth = (8192 / wavelengths - 1) / 3
    between = scale / ((1 - smooth) / 8 + smooth)
    factors = np.where(smooth > 1, 1.0, np.where(smooth < 0, 8.0, between)).astype(np.float32)
    return lambda writer: writer.add_tensor("rope_freqs.weight", factors)


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)


def yarn_in_full(writer: gguf.GGUFWriter) -> None:
    yarn(writer)
    writer.add_rope_scaling_yarn_beta_fast(24.0)
    writer.add_rope_scaling_yarn_beta_slow(2.0)
    writer.add_rope_scaling_yarn_attn_factor(1.25)
    writer.add_rope_scaling_yarn_ext_factor(1.0)


@pytest.mark.parametrize(
    ("settle", "scaling"),
    [
        (
            llama3_factors(),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (yarn, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
        (
            yarn_in_full,
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 24.0,
                "beta_slow": 2.0,
                "attention_factor": 1.25,
            },
        ),
        (
            lambda writer: writer.add_rope_scaling_factor(3.0),
            {"rope_type": "linear", "factor": 3.0},
        ),
    ],
)
def test_scaled_frequencies_are_those_of_the_folder(
    settle: Settle, scaling: dict[str, Any], tmp_path: Path
) -> None:
    rope = {"rope_theta": 10000.0, **scaling}
    path = save(tmp_path, settle=settle, rope_parameters=rope)
    found, expected = (model_config(each) for each in (path, tmp_path / "plain"))
    assert found.rope == expected.rope
    torch.testing.assert_close(logits_of(path), logits_of(tmp_path / "plain"), rtol=0, atol=0)


@pytest.mark.covering
@pytest.mark.parametrize(
    "spelling", ["rope.freq_base_swa", "rope.local.freq_base", "rope.local_freq_base"]
)
@pytest.mark.parametrize("pattern", [None, 3, [True, False, False, True, True, False, True]])
def test_gemma3_layers_with_a_window_and_their_frequencies_are_those_of_the_file(
    spelling: str, pattern: int | list[bool] | None, tmp_path: Path
) -> None:
    """Without a pattern every sixth layer has none."""

    def settle(writer: gguf.GGUFWriter) -> None:
        window(writer)
        writer.add_float32(f"gemma3.{spelling}", 300.0)
        if isinstance(pattern, list):
            writer.add_array("gemma3.attention.sliding_window_pattern", pattern)
        elif pattern is not None:
            writer.add_uint32("gemma3.attention.sliding_window_pattern", pattern)

    period = 6 if pattern is None else pattern
    own = [layer % period > 0 for layer in range(1, 8)] if isinstance(period, int) else period
    kinds = ["sliding_attention" if each else "full_attention" for each in own]
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    config = CONFIGS["Gemma3"] | {"rope_parameters": rope, "layer_types": kinds}
    path = save(tmp_path, "Gemma3", settle=settle, query_pre_attn_scalar=256, **config)
    torch.testing.assert_close(logits_of(path), logits_of(tmp_path / "plain"), rtol=0, atol=0)


def test_one_warning_names_the_keys_that_are_not_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def settle(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("llama.new_size", 3)
        writer.add_array("llama.new_sizes", list(range(2000)))
        writer.add_logit_scale(1.0)

    load(save(tmp_path, settle=settle))
    named = [each.message for each in caplog.records if "unknown metadata" in each.message]
    assert [text.rpartition(": ")[2] for text in named] == ["logit_scale, new_size, new_sizes"]


def test_a_text_ends_at_all_end_tokens_of_the_file(tmp_path: Path) -> None:
    def settle(writer: gguf.GGUFWriter) -> None:
        writer.add_eos_token_id(5)
        writer.add_eot_token_id(7)

    assert model_config(save(tmp_path, settle=settle)).eos_token_ids == (5, 7)


def strange_tensor(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))


def strange_type(writer: gguf.GGUFWriter) -> None:
    blocks = np.zeros((64, 66), np.uint8)
    writer.add_tensor("blk.0.strange.weight", blocks, raw_dtype=Type.IQ2_XXS)


@pytest.mark.parametrize(
    ("settle", "reason"),
    [
        (lambda writer: writer.add_type("adapter"), "is a adapter of the architecture 'llama'"),
        (lambda writer: writer.add_uint16("split.count", 3), "is one of 3 parts"),
        (lambda writer: writer.add_logit_scale(2.0), "llama.logit_scale of its metadata"),
        (lambda writer: writer.add_rope_dimension_count(32), "rope.dimension_count is 32; served"),
        (
            lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "rope_type is 'longrope'",
        ),
        (llama3_factors(1.1), "factors of rope_freqs.weight are not those of Llama 3.1"),
        (window, "llama.attention.sliding_window of its metadata is not served"),
        (
            lambda writer: writer.add_rope_freq_base_swa(300.0),
            "llama.rope.freq_base_swa of its metadata is not served",
        ),
        (
            lambda writer: writer.add_rope_scaling_yarn_ext_factor(0.5),
            "llama.rope.scaling.yarn_ext_factor of its metadata is not served",
        ),
        (strange_tensor, "surplus blk.0.attn_sinks.weight"),
        (strange_type, "blk.0.strange.weight has ggml's type 16; served are 0 (F32)"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(
    settle: Settle, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        load(save(tmp_path, settle=settle))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("rope.local.freq_base", 200.0, "rope.local.freq_base is 200.0, and another key says 300"),
        ("attention.sliding_window_pattern", 0.0, "sliding_window_pattern is 0.0; it must be a"),
    ],
)
def test_keys_of_gemma3_that_contradict_others_are_refused(
    key: str, value: float, reason: str, tmp_path: Path
) -> None:
    def settle(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base_swa(300.0)
        writer.add_float32(f"gemma3.{key}", value)

    with pytest.raises(ValueError, match=re.escape(reason)):
        load(save(tmp_path, "Gemma3", settle=settle, **CONFIGS["Gemma3"]))


def test_an_architecture_that_is_not_served_is_refused(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "plain", "Llama", **SIZES)
    path = save_gguf(tmp_path / "a.gguf", "phi3", model.config, model.state_dict())
    with pytest.raises(ValueError, match="architecture 'phi3'; served are models of llama, qwen2"):
        load(path)


def test_a_file_without_a_size_or_a_tensor_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    for stored, reason in (
        (b"llama.block_count", "has no llama.block_count in its metadata"),
        (b"token_embd.weight", "has no tensor token_embd.weight"),
        (b"blk.1.ffn_up.weight", "missing model.layers.1.mlp.up_proj.weight"),
    ):
        other = tmp_path / "other.gguf"
        other.write_bytes(path.read_bytes().replace(stored, stored[:-1] + b"x", 1))
        with pytest.raises(ValueError, match=re.escape(reason)):
            load(other)


def with_value(data: bytes, key: str, packed: bytes) -> bytes:
    """One value more in the metadata. packed: its type and itself."""
    value = struct.pack("<Q", len(key)) + key.encode() + packed
    (num_values,) = struct.unpack_from("<Q", data, 16)
    return data[:16] + struct.pack("<Q", num_values + 1) + value + data[24:]


def without_alignment(data: bytes) -> bytes:
    return with_value(data, "general.alignment", struct.pack("<II", 4, 0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[: len(data) // 2], "ends after the end of the file"),
        (lambda data: data[:100], "is not a readable GGUF file"),
        # A key, a text, an array of texts and one of numbers that no file is large enough for.
        (lambda data: data[:24] + NO_LENGTH + data[32:], PAST_END),
        (lambda data: with_value(data, "x", struct.pack("<I", 8) + NO_LENGTH), PAST_END),
        (lambda data: with_value(data, "x", struct.pack("<IIQ", 9, 8, 1) + NO_LENGTH), PAST_END),
        (lambda data: with_value(data, "x", struct.pack("<II", 9, 4) + NO_LENGTH), PAST_END),
        (lambda data: b"", "is not a readable GGUF file"),
        (without_alignment, "general.alignment is 0"),
        (lambda data: b"GGML" + data[4:], "does not start with GGUF"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "byte order is not little"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "its version is 1"),
    ],
)
def test_a_damaged_file_is_refused(
    change: Callable[[bytes], bytes], reason: str, tmp_path: Path
) -> None:
    path = save(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=reason):
        load(path)


def test_without_the_package_its_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path)
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("pip install 'tllm_spec[gguf]'")):
        registry.resolve_model(path)
