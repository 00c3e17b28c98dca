"""Loads models and builds engines around them: KV pools, caches, attention."""

import logging
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch

from tllm_spec.attention.choice import create_backend, create_batch_invariant
from tllm_spec.attention.geometry import Geometry
from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.draft_network.network import DraftNetwork, HeadNetwork
from tllm_spec.executor.building.draft_backend import (
    check_pool,
    load_head_network,
    load_network,
)
from tllm_spec.executor.building.memory import reserved_bytes
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.device_choice import pick_dtype
from tllm_spec.executor.engine.memory_plan import (
    DUMMY_PAGES,
    ServedModel,
    TorchModel,
    plan_num_pages,
)
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.network_engine import NetworkEngine
from tllm_spec.executor.engine.rows import RowBuilder
from tllm_spec.executor.resources.kv_cache import KVCacheManager
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.executor.resources.slot_state import BlockTable
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers
from tllm_spec.executor.speculative.drafting.loaded_draft import (
    LoadedDraft,
    draft_folder,
    keep_tokens,
    load_head,
    load_mtp,
)
from tllm_spec.executor.speculative.drafting.network_layers import NetworkLayers
from tllm_spec.executor.speculative.modes import DraftEngine
from tllm_spec.models.causal_lm import CausalLM
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.registry import LoadFormat, load_model
from tllm_spec.zoo.registry import resolve_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engines:
    """The target with its cache, and the draft weights, if there are any: `layers` on the target's
    pages, or `draft` with its own. `models`: all that run in torch."""

    target: ModelEngine
    kv: KVCacheManager
    draft: DraftEngine | None
    layers: DraftLayers | None
    models: list[TorchModel]


def build_engines(plan: BuildPlan) -> Engines:
    """Weights first; then every pool has as many pages as the memory left allows. Raises ValueError
    for checkpoints that cannot be served."""
    start = monotonic()
    logger.info("loading weights: %s", plan.args.model)
    target = load_target(plan)
    if plan.draft_plan is not None:
        logger.info("loading weights: the drafter's")
    draft = load_draft(plan, target) if plan.draft_plan is not None else None
    logger.info("weights took %.1f s", monotonic() - start)
    models: list[ServedModel] = [target, *([draft.net] if draft else [])]
    num_pages = plan_num_pages(
        plan.args, models, plan.max_len, plan.communicator, reserved_bytes(plan, draft)
    )
    num_pages = plan.communicator.minimum(num_pages)
    check_pool(draft, num_pages * plan.page_size)
    logger.info("KV cache: %d pages of %d tokens", num_pages - DUMMY_PAGES, plan.page_size)
    engine, kv, layers = _build_engine(
        plan,
        target,
        num_pages,
        draft,
        extra_kv_tokens=plan.extra_kv_tokens,
        batch_invariant=plan.args.deterministic,
    )
    own_engine = None
    if draft is not None and layers is None:
        own_engine = _build_draft_engine(plan, draft, num_pages)
    with_heads = (each.head if isinstance(each, HeadNetwork) else each for each in models)
    in_torch = [model for model in with_heads if not isinstance(model, DraftNetwork)]
    return Engines(engine, kv, own_engine, layers, in_torch)


def load_target(plan: BuildPlan) -> CausalLM:
    args = plan.args
    return _load(
        plan, resolve_model(args.model), args.load_format, batch_invariant=args.deterministic
    )


def load_draft(plan: BuildPlan, target: CausalLM) -> LoadedDraft:
    """Never batch-invariant: with `deterministic` drafts may depend on the batch, the text does
    not."""
    draft = plan.draft_plan
    assert draft is not None
    if draft.num_modules:
        return load_mtp(
            draft,
            target,
            resolve_model(plan.args.model) if draft.path is None else draft_folder(draft),
            plan.args.load_format,
            max_num_tokens=plan.args.max_num_tokens,
            communicator=plan.communicator,
            fp8_activations=plan.args.fp8_activations,
        )
    if not draft.is_head:
        folder = draft_folder(draft)
        if draft.backend != "torch":
            return LoadedDraft(draft, load_network(plan, draft, folder), None)
        model = _load(plan, folder, draft.load_format)
        vocab_size = min(model.config.vocab_size, plan.config.vocab_size)
        keep_tokens(draft, model, vocab_size, plan.communicator)
        return LoadedDraft(draft, model, None)
    loaded = load_head(
        draft,
        target,
        max_positions=plan.max_len,
        max_num_tokens=plan.args.max_num_tokens,
        communicator=plan.communicator,
    )
    return loaded if draft.backend == "torch" else load_head_network(plan, loaded)


def _load(
    plan: BuildPlan, folder: Path, load_format: LoadFormat, *, batch_invariant: bool = False
) -> CausalLM:
    config = ModelConfig.from_pretrained(folder)
    return load_model(
        folder,
        dtype=pick_dtype(plan.args.dtype, config.dtype, plan.device),
        device=plan.device,
        load_format=load_format,
        max_positions=plan.max_len,
        communicator=plan.communicator,
        batch_invariant=batch_invariant,
        fp8_activations=plan.args.fp8_activations,
    )


def _build_draft_engine(plan: BuildPlan, draft: LoadedDraft, num_pages: int) -> DraftEngine:
    """A draft model with a cache of its own."""
    extra_kv_tokens = plan.draft_kv_tokens
    if isinstance(draft.net, CausalLM):
        own = _build_engine(plan, draft.net, num_pages, extra_kv_tokens=extra_kv_tokens)
        return DraftEngine(*own[:2])
    assert isinstance(draft.net, DraftNetwork)
    geometry = draft.net.config.attention_geometry(plan.mapping)
    pool = _pool(plan, geometry, draft.net.dtype, num_pages)
    rows = _rows(plan, num_pages)
    kv = KVCacheManager(
        _cache(plan, [pool], lookahead=0), pool, rows.table, extra_kv_tokens=extra_kv_tokens
    )
    return DraftEngine(NetworkEngine(draft.net, pool, rows, plan.config.vocab_size), kv)


def _build_engine(
    plan: BuildPlan,
    model: CausalLM,
    num_pages: int,
    draft: LoadedDraft | None = None,
    *,
    extra_kv_tokens: int,
    batch_invariant: bool = False,
) -> tuple[ModelEngine, KVCacheManager, DraftLayers | None]:
    """A model with a cache of `num_pages` pages, which `draft` may share."""
    geometry = model.config.attention_geometry(plan.mapping)
    pools = [_pool(plan, geometry, model.dtype, num_pages)]
    rows = _rows(plan, num_pages)
    layers: DraftLayers | None = None
    spec = None
    if draft is not None and draft.plan.shares_pages:
        own = draft.net.config.attention_geometry(plan.mapping)
        pools.append(_pool(plan, own, draft.net.dtype, num_pages))
        layers, spec = _draft_layers(plan, draft, own, pools[-1], rows), draft.spec
    kv = KVCacheManager(
        _cache(plan, pools, lookahead=int(spec is not None)),
        pools[0],
        rows.table,
        extra_kv_tokens=extra_kv_tokens,
    )
    if batch_invariant:
        attention = create_batch_invariant(geometry, pools[0])
    else:
        attention = create_backend(
            plan.attention, geometry, pools[0], plans_latents=plan.plans_latents
        )
    return ModelEngine(model, attention, rows, plan.config.vocab_size, spec), kv, layers


def _draft_layers(
    plan: BuildPlan, draft: LoadedDraft, geometry: Geometry, pool: KVPool, rows: RowBuilder
) -> DraftLayers:
    """A draft network on the target's pages; `pool` has its entries."""
    if isinstance(draft.net, HeadNetwork):
        assert draft.spec is not None
        return NetworkLayers(draft.net, draft.spec, pool, rows)
    backend = create_backend(plan.attention, geometry, pool, plans_latents=plan.plans_latents)
    return draft.layers(backend, rows, plan.config.vocab_size)


def _rows(plan: BuildPlan, num_pages: int) -> RowBuilder:
    table = BlockTable(plan.slots, -(-plan.max_len // plan.page_size), plan.device)
    return RowBuilder(table, num_pages, plan.page_size, plan.device)


def _pool(plan: BuildPlan, geometry: Geometry, dtype: torch.dtype, num_pages: int) -> KVPool:
    return KVPool(
        geometry, num_pages=num_pages, page_size=plan.page_size, dtype=dtype, device=plan.device
    )


def _cache(plan: BuildPlan, pools: list[KVPool], lookahead: int) -> PagedCache:
    """One cache for pools that share their page numbers."""

    def copy_page(source: int, destination: int) -> None:
        for pool in pools:
            pool.copy_page(source, destination)

    reuse = plan.args.kv_cache_config
    return PagedCache(
        pools[0].num_pages,
        plan.page_size,
        copy_page=copy_page,
        enable_block_reuse=reuse.enable_block_reuse,
        enable_partial_reuse=reuse.enable_partial_reuse,
        lookahead=lookahead,
    )
