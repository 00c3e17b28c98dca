"""Which attention backend runs for an `attn_backend`, a device and a dtype; the choice is
logged."""

import logging
from importlib import import_module

import torch

from tllm_spec.attention.batch_invariant import BatchInvariantAttention, BatchInvariantLatent
from tllm_spec.attention.flashinfer import DTYPES, HEAD_DIMS, FlashInferAttention
from tllm_spec.attention.geometry import (
    AttentionGeometry,
    Geometry,
    IndexGeometry,
    KVFormat,
    KVPool,
    LatentGeometry,
)
from tllm_spec.attention.indexed import IndexBackend
from tllm_spec.attention.interface import AttentionBackend, HeadsBackend
from tllm_spec.attention.latent import LatentBackend, TritonLatent, VanillaLatent
from tllm_spec.attention.triton import MAX_SDPA_DIM, TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.kernels.attention.index_select import SCORE_BYTES

logger = logging.getLogger(__name__)

BACKENDS: dict[str, type[HeadsBackend]] = {
    "VANILLA": VanillaAttention,
    "TRITON": TritonAttention,
    "FLASHINFER": FlashInferAttention,
}

# Shapes whose prompts FlashInfer runs at least 3% faster, as (head_dim, whether its layers have
# windows and sinks). For others `auto` takes TRITON, which has nothing to compile for minutes.
FASTER_IN_FLASHINFER = frozenset({(64, False), (128, False)})


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, chunk_size: int | None = None
) -> type[HeadsBackend]:
    """The class for `attn_backend` = `name`. Raises ValueError for 'FLASHINFER' if FlashInfer
    cannot be used.

    chunk_size: of the target's layers that attend within chunks. The class serves the others."""
    if name == "auto" and device.type != "cuda":
        name = "VANILLA"
    elif name in ("auto", "FLASHINFER"):
        reason = _why_no_flashinfer(device, dtype)
        if name == "FLASHINFER":
            _refuse_flashinfer(reason, chunk_size)
        name = "FLASHINFER" if reason is None else "TRITON"
        if reason is not None:
            logger.warning("attention: TRITON; prefill is slower than with FLASHINFER: %s", reason)
            return BACKENDS[name]
    logger.info("attention: %s%s", name, " (plain torch)" if name == "VANILLA" else "")
    return BACKENDS[name]


def kind_of_pool(
    kind: type[HeadsBackend], geometry: Geometry, *, chooses: bool
) -> type[HeadsBackend]:
    """The class for one pool where `choose_backend` returned `kind`. chooses: whether it may be
    another one, as with `auto`."""
    if not chooses or kind is not FlashInferAttention:
        return kind
    if not isinstance(geometry, AttentionGeometry):
        return kind
    has_both = geometry.span is not None and geometry.has_sinks
    is_faster = (geometry.head_dim, has_both) in FASTER_IN_FLASHINFER
    return kind if is_faster or geometry.head_dim not in HEAD_DIMS else TritonAttention


def backend_name(kind: type[HeadsBackend]) -> str:
    """The name of the backend in `attn_backend`."""
    return next(name for name, each in BACKENDS.items() if each is kind)


def create_backend(kind: type[HeadsBackend], geometry: Geometry, pool: KVPool) -> AttentionBackend:
    """The backend for one pool: TRITON, with a warning, if FlashInfer has no kernels for its
    heads.

    kind: what `choose_backend` returned, or BatchInvariantAttention for `deterministic: true`.
    Latents (MLA) run TRITON for FLASHINFER, too."""
    if isinstance(geometry, IndexGeometry):
        return IndexBackend(geometry, pool)
    if isinstance(geometry, LatentGeometry):
        return _latent_kind(kind)(geometry, pool)
    assert isinstance(geometry, AttentionGeometry)
    if kind is FlashInferAttention and _is_chunked(geometry):
        logger.warning(
            "%d layers with a span of keys, %s: TRITON, whose prefill is slower than FLASHINFER",
            geometry.num_layers,
            geometry.span,
        )
    kind = _without_flashinfer(kind, geometry)
    if kind is not FlashInferAttention:
        return kind(geometry, pool)
    dtype = str(pool.kv_format.dtype).removeprefix("torch.")
    reason = f"FlashInfer has no kernels of head_dim {geometry.head_dim} in {dtype}"
    if geometry.head_dim in HEAD_DIMS and pool.kv_format.dtype in DTYPES:
        logger.info(
            "FlashInfer loads kernels of head_dim %d, keys of a row: %s; without prebuilt ones it "
            "compiles them for minutes, once",
            geometry.head_dim,
            "all" if geometry.span is None else geometry.span.size,
        )
        try:
            return FlashInferAttention(geometry, pool)
        except (RuntimeError, OSError, ImportError) as error:
            reason = f"{reason} ready, and they cannot be compiled: {error}"
    logger.warning(
        "the context chunks of %d layers with %d heads use TRITON, which is slower: %s",
        geometry.num_layers,
        geometry.num_heads,
        reason,
    )
    return TritonAttention(geometry, pool)


def workspace_bytes(kind: type[HeadsBackend], geometry: Geometry, kv_format: KVFormat) -> int:
    """What `create_backend` allocates besides the pool, for memory planning."""
    if isinstance(geometry, IndexGeometry):
        return SCORE_BYTES
    if isinstance(geometry, LatentGeometry):
        return _latent_kind(kind).workspace_bytes(geometry, kv_format.dtype)
    assert isinstance(geometry, AttentionGeometry)
    return _without_flashinfer(kind, geometry).workspace_bytes(geometry, kv_format)


def _without_flashinfer(
    kind: type[HeadsBackend], geometry: AttentionGeometry
) -> type[HeadsBackend]:
    """TRITON, which has a kernel of its own for prompts with long heads, for what FlashInfer has no
    kernels for."""
    is_served = not _is_chunked(geometry) and geometry.head_dim <= MAX_SDPA_DIM
    return TritonAttention if kind is FlashInferAttention and not is_served else kind


def _is_chunked(geometry: AttentionGeometry) -> bool:
    """Whether its layers attend within chunks, for which FlashInfer has no kernels."""
    return geometry.span is not None and not geometry.span.slides


def _latent_kind(kind: type[HeadsBackend]) -> type[LatentBackend]:
    own: dict[type[HeadsBackend], type[LatentBackend]] = {
        VanillaAttention: VanillaLatent,
        BatchInvariantAttention: BatchInvariantLatent,
    }
    return own.get(kind, TritonLatent)


def _refuse_flashinfer(why_no_flashinfer: str | None, chunk_size: int | None) -> None:
    """Raises ValueError with all reasons, if there are any."""
    reasons = [] if why_no_flashinfer is None else [why_no_flashinfer]
    if chunk_size is not None:
        reasons.append(
            f"it cannot attend within chunks of {chunk_size} tokens, as layers of this model do "
            "above that max_seq_len"
        )
    if reasons:
        raise ValueError(
            f"attn_backend = 'FLASHINFER': {'; '.join(reasons)}; use 'auto', 'TRITON' or 'VANILLA'"
        )


def _why_no_flashinfer(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, and device is {device.type!r}"
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"it has bfloat16 and float16 kernels, and the model runs in {name}"
    try:
        import_module("flashinfer")
    except (ImportError, RuntimeError, OSError) as error:
        return (
            f"flashinfer cannot be imported ({error}); pip install flashinfer-python, "
            "or tllm_spec[cuda]"
        )
    return None
