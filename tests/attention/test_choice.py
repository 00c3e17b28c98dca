"""Which attention backend is chosen, and that the reason is logged."""

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tllm_spec.attention.choice import choose_backend, create_backend, kind_of_pool, workspace_bytes
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.attention.geometry import (
    MAX_TOKENS,
    AttentionGeometry,
    KVFormat,
    KVPool,
    LatentGeometry,
)
from tllm_spec.attention.interface import HeadsBackend
from tllm_spec.attention.latent import TritonLatent
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.build import build_executor
from tllm_spec.executor.building.memory import reserved_bytes
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.engine.memory_plan import own_groups
from tllm_spec.kernels.attention.kv_codes import UNSCALED
from tllm_spec.kernels.attention.paged_prefill import NUM_PLANS, PLAN_BYTES, PagedPrefill
from tllm_spec.kernels.attention.visible_keys import KeySpan

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer can be imported."""
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))


@pytest.fixture
def no_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize(
    ("name", "device", "dtype", "kind"),
    [
        ("auto", CPU, torch.float32, VanillaAttention),
        ("auto", CPU, torch.bfloat16, VanillaAttention),
        ("auto", CUDA, torch.bfloat16, FlashInferAttention),
        ("auto", CUDA, torch.float16, FlashInferAttention),
        ("auto", CUDA, torch.float32, TritonAttention),
        ("FLASHINFER", CUDA, torch.bfloat16, FlashInferAttention),
        ("TRITON", CUDA, torch.bfloat16, TritonAttention),
        ("TRITON", CPU, torch.float32, TritonAttention),
        ("VANILLA", CUDA, torch.bfloat16, VanillaAttention),
    ],
)
def test_name_device_and_dtype_choose_the_backend_and_one_line_is_logged(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    kind: type[HeadsBackend],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_backend(name, device, dtype) is kind
    (line,) = caplog.messages
    assert line.startswith(f"attention: {kind.__name__.removesuffix('Attention').upper()}")
    assert ("plain torch" in line) == ("VANILLA" in line)


@pytest.mark.usefixtures("no_flashinfer")
def test_without_flashinfer_a_warning_says_so_and_how_to_install_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert choose_backend("auto", CUDA, torch.bfloat16) is TritonAttention
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in (
        "TRITON",
        "prefill is slower",
        "flashinfer cannot be imported",
        "pip install flashinfer-python",
    ):
        assert part in record.getMessage()


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        (CPU, torch.bfloat16, "it needs a CUDA device, and device is 'cpu'"),
        (CUDA, torch.float32, "the model runs in float32"),
    ],
)
def test_flashinfer_by_name_is_refused_with_the_reason(
    device: torch.device, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(ValueError, match=r"attn_backend = 'FLASHINFER': .*; use 'auto'") as refusal:
        choose_backend("FLASHINFER", device, dtype)
    assert reason in str(refusal.value)


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_flashinfer_by_name_is_refused_for_chunks_with_all_reasons(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"'FLASHINFER': .*chunks of 16 tokens") as refusal:
        choose_backend("FLASHINFER", CUDA, dtype, chunk_size=16)
    assert ("the model runs in float32; it cannot" in str(refusal.value)) == (
        dtype == torch.float32
    )
    for name in ("auto", "TRITON", "VANILLA"):
        assert choose_backend(name, CUDA, dtype, 16) is choose_backend(name, CUDA, dtype)


@pytest.mark.usefixtures("no_flashinfer")
def test_flashinfer_by_name_is_refused_if_it_is_not_installed() -> None:
    with pytest.raises(
        ValueError, match=r"'FLASHINFER': flashinfer cannot be imported .* pip install"
    ):
        choose_backend("FLASHINFER", CUDA, torch.bfloat16)


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """A model without weights."""
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 8,'
        ' "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,'
        ' "max_position_embeddings": 64}'
    )
    return tmp_path


def test_an_engine_refuses_a_backend_before_it_loads_weights(shape: Path) -> None:
    args = LlmArgs.from_kwargs(shape, device="cpu", attn_backend="FLASHINFER")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        build_executor(args, None, lambda responses: None)


def test_memory_planning_counts_the_workspace(shape: Path) -> None:
    plans = [
        BuildPlan(LlmArgs.from_kwargs(shape, device="cpu", attn_backend=name))
        for name in ("VANILLA", "TRITON")
    ]
    wide, codes = KVFormat(torch.bfloat16), KVFormat(torch.bfloat16, (UNSCALED,))
    groups = own_groups(plans[0].config.layer_groups(plans[0].mapping), wide)
    planned = [reserved_bytes(plan, None, groups) for plan in plans]
    geometry = AttentionGeometry(1, 1, 1, 8, 1.0)
    triton, flashinfer = TritonAttention.workspace_bytes, FlashInferAttention.workspace_bytes
    assert planned[1] - planned[0] == triton(geometry, wide) == triton(geometry, codes) > 0
    assert flashinfer(geometry, wide) - triton(geometry, wide) == NUM_PLANS * PLAN_BYTES
    copied = 2 * MAX_TOKENS * geometry.head_dim * 2
    assert flashinfer(geometry, codes) - flashinfer(geometry, wide) == copied


@pytest.mark.parametrize(
    ("head_dim", "dtype", "error", "reason"),
    [
        (32, torch.bfloat16, None, "no kernels of head_dim 32 in bfloat16"),
        (64, torch.float32, None, "no kernels of head_dim 64 in float32"),
        (
            64,
            torch.bfloat16,
            RuntimeError("Could not find nvcc"),
            "cannot be compiled: Could not find nvcc",
        ),
        (64, torch.bfloat16, FileNotFoundError("ninja"), "cannot be compiled: ninja"),
    ],
)
def test_a_pool_without_flashinfer_kernels_runs_triton_with_a_warning(
    head_dim: int,
    dtype: torch.dtype,
    error: Exception | None,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> None:
        assert error is not None, "FlashInfer must not be called"
        raise error

    monkeypatch.setattr(PagedPrefill, "__init__", fail)
    geometry = AttentionGeometry(2, 4, 2, head_dim, 0.1)
    pool = KVPool(geometry, num_pages=2, page_size=4, kv_format=KVFormat(dtype), device=CPU)
    assert type(create_backend(FlashInferAttention, geometry, pool)) is TritonAttention
    (message,) = caplog.messages
    assert reason in message and "2 layers with 4 heads" in message


@pytest.mark.parametrize("kind", [VanillaAttention, TritonAttention, FlashInferAttention])
@pytest.mark.parametrize("slides", [False, True], ids=["chunks", "sliding"])
def test_layers_with_chunks_run_triton_where_flashinfer_was_chosen(
    slides: bool,
    kind: type[HeadsBackend],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(PagedPrefill, "__init__", lambda *arguments: None)
    geometry = AttentionGeometry(4, 4, 2, 64, 0.1, KeySpan(16, slides=slides))
    kv_format = KVFormat(torch.bfloat16)
    pool = KVPool(geometry, num_pages=2, page_size=4, kv_format=kv_format, device=CPU)
    is_replaced = kind is FlashInferAttention and not slides
    own_kind = TritonAttention if is_replaced else kind
    assert type(create_backend(kind, geometry, pool)) is own_kind
    assert len(caplog.messages) == is_replaced
    num_bytes = workspace_bytes(kind, geometry, kv_format)
    assert num_bytes == own_kind.workspace_bytes(geometry, kv_format)


SLIDING = KeySpan(16, slides=True)


@pytest.mark.parametrize(
    ("head_dim", "span", "has_sinks", "kind"),
    [
        (128, None, False, FlashInferAttention),
        (64, None, True, FlashInferAttention),
        (64, SLIDING, False, FlashInferAttention),
        (64, SLIDING, True, TritonAttention),
        (256, None, False, TritonAttention),
        (256, SLIDING, False, TritonAttention),
        (96, None, False, FlashInferAttention),  # `create_backend` says that it has no kernels
    ],
)
def test_auto_takes_triton_for_shapes_whose_prompts_are_as_fast(
    head_dim: int, span: KeySpan | None, has_sinks: bool, kind: type[HeadsBackend]
) -> None:
    geometry = AttentionGeometry(2, 4, 2, head_dim, 0.1, span, has_sinks)
    for chosen in (VanillaAttention, TritonAttention):
        assert kind_of_pool(chosen, geometry, chooses=True) is chosen
    assert kind_of_pool(FlashInferAttention, geometry, chooses=False) is FlashInferAttention
    assert kind_of_pool(FlashInferAttention, geometry, chooses=True) is kind


@pytest.mark.parametrize("kind", [FlashInferAttention, TritonAttention])
def test_latent_attention_runs_triton_for_flashinfer_too(kind: type[HeadsBackend]) -> None:
    geometry = LatentGeometry(1, 2, 32, 16, 16, 16, 0.2)
    kv_format = KVFormat(torch.bfloat16)
    pool = KVPool(geometry, num_pages=2, page_size=4, kv_format=kv_format, device=CPU)
    assert type(create_backend(kind, geometry, pool)) is TritonLatent
    expected = TritonLatent.workspace_bytes(geometry, torch.bfloat16)
    assert workspace_bytes(kind, geometry, kv_format) == expected
