"""Loads models and builds engines around them: KV pools, caches, attention."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch

from tllm_spec.adapters.adapted import AdapterTables
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.choice import backend_name, create_backend
from tllm_spec.attention.geometry import Geometry, IndexGeometry, KVPool
from tllm_spec.attention.interface import AttentionBackend, SpecMetadata, default_capture_layers
from tllm_spec.attention.recurrent import RecurrentMemory
from tllm_spec.draft_network.network import ExternalDraft
from tllm_spec.executor.building.draft_backend import check_pool, load_head_network, load_network
from tllm_spec.executor.building.kv_formats import check_kv_cache, draft_format, target_format
from tllm_spec.executor.building.memory import check_free_memory, reserved_bytes
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.device.device_choice import pick_dtype
from tllm_spec.executor.device.transfer import HostCopies
from tllm_spec.executor.engine.memory_plan import (
    DUMMY_PAGES,
    GroupPlan,
    ServedModel,
    TorchModel,
    draft_group,
    machine_bytes,
    own_groups,
    plan_num_pages,
    with_draft,
)
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.rows import AttentionGroups, PagedGroup, RowBuilder
from tllm_spec.executor.resources.adapter_slots import AdapterSlots
from tllm_spec.executor.resources.host_pages import HostPages
from tllm_spec.executor.resources.interface import BlockTable, PageGroup, Snapshots
from tllm_spec.executor.resources.kv_cache import KVCacheManager, KVGroup
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.executor.sleep import ADAPTERS, DRAFT, KV, TARGET
from tllm_spec.executor.speculative.drafting.draft_net import (
    DraftNet,
    ExternalHeadNet,
    ExternalModelNet,
)
from tllm_spec.executor.speculative.drafting.heads import DraftPlan, draft_folder
from tllm_spec.executor.speculative.drafting.loaded_draft import LoadedDraft, keep_tokens, load_head
from tllm_spec.executor.speculative.drafting.model_drafter import DraftKVManager
from tllm_spec.executor.speculative.drafting.network_drafter import BACKLOG_LEN
from tllm_spec.executor.weight_swap import tensors_of
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.models.draft_head import HeadSource
from tllm_spec.models.eagle3 import Eagle3Head
from tllm_spec.models.gemma4_assistant import Gemma4Assistant
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.mtp import NextnModules
from tllm_spec.models.registry import LoadFormat, load_model, model_config
from tllm_spec.models.token_map import DraftTokens
from tllm_spec.zoo.registry import resolve_model

logger = logging.getLogger(__name__)

Manager = TypeVar("Manager", bound=KVCacheManager)


@dataclass(frozen=True)
class Engines:
    """The target with its cache, and the draft network, if there is one: `net` on the target's
    pages, or on those of `draft_kv`. `models`: all that run in torch. `draft`: the
    draft network as it was loaded. `recorded`: the hidden states that are recorded, the last of
    them after the final norm; None: none are."""

    target: ModelEngine
    kv: KVCacheManager
    net: DraftNet | None
    draft_kv: DraftKVManager | None
    models: list[TorchModel]
    draft: LoadedDraft | None
    recorded: SpecMetadata | None


def build_engines(plan: BuildPlan, tokens: DraftTokens | None) -> Engines:
    """Weights first; then every pool has as many pages as the memory left allows. tokens: that are
    drafted; None: all. Raises ValueError for checkpoints that cannot be served."""
    check_kv_cache(plan)
    check_free_memory(plan)
    start = monotonic()
    plan.begin("weights")
    logger.info("loading weights: %s", plan.args.model)
    target = load_target(plan)
    draft = None
    if plan.draft_plan is not None:
        logger.info("loading weights: the drafter's")
        draft = load_draft(plan, target, plan.draft_plan, tokens)
    adapters = _adapter_slots(plan, target, draft)
    logger.info("weights took %.1f s", monotonic() - start)
    _place(plan, ADAPTERS, adapters and adapters.tables.weights)
    _place(plan, TARGET, target)
    _place(plan, DRAFT, weights_of(draft))
    plan.begin("memory")
    recorded = _recorded_states(plan, target, draft)
    models: list[ServedModel] = [target, *([draft.model] if draft else [])]
    of_target, of_draft = _plan_groups(plan, target, draft)
    groups, number = of_target + of_draft, len(of_target)
    num_pages = plan_num_pages(
        plan.args,
        groups,
        models,
        plan.max_len,
        plan.span_room,
        plan.communicator,
        reserved_bytes(plan, draft, groups, adapters),
    )
    num_pages = [plan.communicator.minimum(pages) for pages in num_pages]
    check_pool(draft, max(num_pages) * plan.page_size)
    for own, pages in zip(of_target, num_pages, strict=False):
        size = own.page_bytes(plan.page_size) // plan.page_size
        logger.info(
            "KV cache: %d pages of %d tokens, %d bytes a token",
            *(pages - DUMMY_PAGES, plan.page_size, size),
        )
    memory = [_memory(plan, own, pages) for own, pages in zip(groups, num_pages, strict=True)]
    num_host_pages = _num_host_pages(plan, groups)
    of_engine = draft, recorded, adapters, num_host_pages
    engine, kv, net = _build_target(plan, target, memory[:number], *of_engine)
    draft_kv = None
    if draft is not None and net is None:
        net = _draft_net(plan, draft, memory[number:])
        options = {"extra_kv_tokens": plan.extra_kv_tokens, "has_draft_layers": True}
        lookahead = net.lookahead
        options["num_host_pages"] = num_host_pages
        draft_kv = _manager(DraftKVManager, plan, memory[number:], lookahead, **options)
    with_heads = (each.head if isinstance(each, ExternalDraft) else each for each in models)
    in_torch = [model for model in with_heads if model is not None]
    return Engines(engine, kv, net, draft_kv, in_torch, draft, recorded)


def load_target(plan: BuildPlan) -> CausalLM:
    args = plan.args
    return _load(
        plan, resolve_model(args.model), args.load_format, batch_invariant=args.deterministic
    )


def load_draft(
    plan: BuildPlan, target: CausalLM, draft: DraftPlan, tokens: DraftTokens | None
) -> LoadedDraft:
    """Never batch-invariant: with `deterministic` drafts may depend on the batch, the text does
    not. Raises ValueError for weights and options that are not served."""
    args, load_format = plan.args, draft.option("load_format") or plan.args.load_format
    folder = resolve_model(args.model) if draft.path is None else draft_folder(draft)
    if not draft.is_head:
        if draft.backend != "torch":
            return LoadedDraft(draft, load_network(plan, draft, folder), None)
        model = _load(plan, folder, load_format)
        keep_tokens(model, tokens, plan.communicator, plan.staged_for)
        return LoadedDraft(draft, model, None).windowed(plan.max_seq_len)
    own = plan.communicator, args.fp8_activations, plan.staged_for
    source = HeadSource(folder, target, load_format, plan.max_len, *own)
    loaded = load_head(draft, source, tokens, args.max_num_tokens)
    if isinstance(loaded.model, (NextnModules, Gemma4Assistant)):  # with the target's windows
        return loaded
    loaded = loaded.windowed(plan.max_seq_len)
    return loaded if draft.backend == "torch" else load_head_network(plan, loaded)


def _adapter_slots(
    plan: BuildPlan, target: CausalLM, draft: LoadedDraft | None
) -> AdapterSlots | None:
    """Reserves the memory of LoRA adapters, and reads those of `lora_dir`. Raises ValueError for
    adapters that cannot be served."""
    if (config := plan.args.lora_config) is None:
        return None
    sizes = config.max_loras, config.max_lora_rank, plan.args.max_num_tokens
    try:
        tables = AdapterTables(target, *sizes, config.lora_target_modules)
        of_draft = _draft_tables(plan, draft)
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(
            f"lora_config: no memory is left for max_loras = {config.max_loras} adapters of "
            f"max_lora_rank = {config.max_lora_rank}; lower one of them, or name fewer layers in "
            "lora_target_modules"
        ) from error
    tables.check_targets()
    num_bytes = tables.num_bytes + (of_draft.num_bytes if of_draft is not None else 0)
    logger.info(
        "LoRA: %d bytes for each of %d adapters up to rank %d",
        *(num_bytes // config.max_loras, config.max_loras, config.max_lora_rank),
    )
    num_slots = plan.slots.dummy_slot + 1
    adapters = AdapterSlots(tables, config, num_slots, plan.device, plan.communicator, of_draft)
    for name, folder in config.lora_dir.items():
        adapters.load_together(name, folder)
    return adapters


def _draft_tables(plan: BuildPlan, draft: LoadedDraft | None) -> AdapterTables | None:
    """Those of the draft head; None: none are asked for. Raises ValueError for drafters that take
    no adapters."""
    config = plan.args.lora_config
    if config is None or (rank := config.max_draft_lora_rank) is None:
        return None
    head = None if draft is None else draft.model
    if draft is None or not isinstance(head, Eagle3Head) or head.masks is not None:
        kind = "there is none" if draft is None else f"this is {_kind_of(draft)}"
        raise ValueError(
            f"lora_config.max_draft_lora_rank = {rank} is refused: adapters of the drafter are "
            f"those of an EAGLE-3 head in torch, and {kind}; accepted: null"
        )
    shape, num_slots = plan.shapes.longest, plan.slots.dummy_slot + 1
    num_rows = max(plan.args.max_num_tokens, BACKLOG_LEN, num_slots * shape.num_beams)
    return AdapterTables(head, config.max_loras, rank, num_rows, None)


def _kind_of(draft: LoadedDraft) -> str:
    if isinstance(head := draft.model, Eagle3Head) and head.masks is not None:
        return "P-EAGLE"
    return f"{draft.kind or 'a draft model'} (draft_backend = {draft.plan.backend!r})"


def _recorded_states(
    plan: BuildPlan, target: CausalLM, draft: LoadedDraft | None
) -> SpecMetadata | None:
    """The layers are those that the draft head reads, or else the default ones. Raises ValueError
    for a target that has too few."""
    if not plan.args.record_hidden_states:
        return None
    config, of_head = target.config, None if draft is None else draft.spec
    layers = () if of_head is None or len(of_head.layers) == 1 else of_head.layers
    try:
        layers = layers or default_capture_layers(config.num_layers)
    except ValueError:
        raise ValueError(
            f"record_hidden_states = {plan.args.record_hidden_states}: {plan.args.model} has "
            f"{config.num_layers} layers, and 7 are needed, or a draft head that says which"
        ) from None
    recorded = SpecMetadata(
        (*layers, config.num_layers),
        config.hidden_size,
        plan.args.max_num_tokens,
        target.dtype,
        target.device,
    )
    if of_head is not None:
        of_head.other = recorded
    return recorded


def _load(
    plan: BuildPlan, folder: Path, load_format: LoadFormat, *, batch_invariant: bool = False
) -> CausalLM:
    config = model_config(folder)
    return load_model(
        folder,
        dtype=pick_dtype(plan.args.dtype, config.dtype, plan.device),
        device=plan.device,
        load_format=load_format,
        max_positions=plan.max_len,
        max_seq_len=plan.max_seq_len,
        communicator=plan.communicator,
        batch_invariant=batch_invariant,
        fp8_activations=plan.args.fp8_activations,
        staged=plan.staged_for is not None,
    )


def _plan_groups(
    plan: BuildPlan, target: CausalLM, draft: LoadedDraft | None
) -> tuple[list[GroupPlan], list[GroupPlan]]:
    """The groups of the target's cache, and those of a draft model's own."""
    kv_format = target_format(plan, target)
    groups = own_groups(target.config.layer_groups(plan.mapping), kv_format)
    if draft is None:
        return groups, []
    if draft.plan.is_assistant:  # it sees two keys more before the next token than the target
        spans = [own.span and replace(own.span, size=own.span.size + 2) for own in groups]
        return [replace(own, span=span) for own, span in zip(groups, spans, strict=True)], []
    layers = draft.model.config.layer_groups(plan.mapping)
    of_draft = draft_group(layers, draft_format(plan, draft, kv_format))
    if not draft.plan.shares_pages:
        return groups, [of_draft]
    return with_draft(groups, of_draft), []


def _num_host_pages(plan: BuildPlan, groups: Sequence[GroupPlan]) -> int:
    """Pages of all groups together that `host_cache_size` has room for, on every rank. Raises
    ValueError where none fits, or pages of a model cannot come back."""
    size = plan.args.kv_cache_config.host_cache_size
    if not size:
        return 0
    if plan.recurrent is not None or any(own.span is not None for own in groups):
        raise ValueError(
            f"host_cache_size = {size} is served only where every layer keeps all keys: this model "
            "has layers with a window, chunks or a recurrent state"
        )
    page_bytes = sum(own.page_bytes(plan.page_size) for own in groups)
    number = plan.communicator.minimum(size // page_bytes)
    if not number:
        raise ValueError(f"host_cache_size = {size} is less than a page, {page_bytes} bytes")
    if size > (most := machine_bytes()):
        raise ValueError(f"host_cache_size = {size}: the machine has {most} bytes")
    logger.info("host memory: %d pages of %d tokens", number, plan.page_size)
    return number


@dataclass(frozen=True)
class _Memory:
    """The memory of one group."""

    pools: list[KVPool]
    rows: RowBuilder
    span: KeySpan | None

    def copy_page(self, source: int, destination: int) -> None:
        for pool in self.pools:
            pool.copy_page(source, destination)


def _memory(plan: BuildPlan, own: GroupPlan, num_pages: int) -> _Memory:
    pools = [
        KVPool(
            geometry,
            num_pages=num_pages,
            page_size=plan.page_size,
            kv_format=kv_format,
            device=plan.device,
            take=partial(plan.memory.take, KV) if plan.memory is not None else None,
        )
        for geometry, kv_format in own.pools
    ]
    table = BlockTable(plan.slots, -(-plan.max_len // plan.page_size), plan.device)
    return _Memory(pools, RowBuilder(table, num_pages, plan.page_size, plan.device), own.span)


def _build_target(
    plan: BuildPlan,
    target: CausalLM,
    memory: list[_Memory],
    draft: LoadedDraft | None,
    recorded: SpecMetadata | None,
    adapters: AdapterSlots | None,
    num_host_pages: int,
) -> tuple[ModelEngine, KVCacheManager, DraftNet | None]:
    """The target with its cache, whose pages `draft` may share."""
    net: DraftNet | None = None
    spec = recorded
    if draft is not None and draft.plan.shares_pages:
        net, spec = _draft_net(plan, draft, memory), draft.spec or recorded
        if adapters is not None and adapters.draft_tables is not None:
            net.adapters = adapters
    states = _recurrent_memory(plan, target)
    kv = _manager(
        KVCacheManager,
        plan,
        memory,
        lookahead=0 if net is None else net.lookahead,
        num_host_pages=num_host_pages,
        extra_kv_tokens=0 if net is None else plan.extra_kv_tokens,
        has_draft_layers=net is not None and net.has_keys,
        states=states,
    )
    groups, places = [], iter(memory)
    for own in target.config.layer_groups(plan.mapping):
        if not isinstance(own.geometry, IndexGeometry):  # whose pool is the place's next one
            place = next(places)
            pools = iter(place.pools)
        groups.append(PagedGroup(_backend(plan, own.geometry, next(pools)), place.rows))
    return ModelEngine(target, AttentionGroups(groups, states), spec, adapters), kv, net


def _backend(plan: BuildPlan, geometry: Geometry, pool: KVPool) -> AttentionBackend:
    if plan.args.deterministic:
        return create_backend(BatchInvariantAttention, geometry, pool)
    kind = plan.attention_of(geometry)
    if kind is not plan.attention:
        logger.info(
            "attention of %d layers: %s, which has nothing to compile for their prompts",
            *(geometry.num_layers, backend_name(kind)),
        )
    return create_backend(kind, geometry, pool)


def _recurrent_memory(plan: BuildPlan, target: CausalLM) -> RecurrentMemory | None:
    if (geometry := plan.recurrent) is None:
        return None
    num_slots = plan.slots.dummy_slot + 1
    logger.info(
        "recurrent states: %d bytes for each of %d slots, %d for each of %d snapshots",
        *(geometry.slot_bytes(target.dtype), num_slots),
        *(geometry.snapshot_bytes(target.dtype), plan.num_snapshots),
    )
    memory = RecurrentMemory(geometry, num_slots, target.dtype, plan.device)
    memory.make_room(plan.num_snapshots)
    _place(plan, KV, memory)
    return memory


def weights_of(draft: LoadedDraft | None) -> object:
    """Those in torch; None: there are none."""
    return None if draft is None or isinstance(draft.model, ExternalDraft) else draft.model


def _place(plan: BuildPlan, tag: str, owner: object) -> None:
    """On CUDA, before graphs are captured: moves the tensors of something to memory that can
    sleep. On a CPU they are moved when it first sleeps."""
    if plan.memory is not None and plan.device.type == "cuda":
        plan.memory.place(tag, tensors_of(owner, set()))


def _draft_net(plan: BuildPlan, draft: LoadedDraft, memory: list[_Memory]) -> DraftNet:
    """A draft network with the last pools of the group that keeps all, whose pages they share, or
    with the target's own ones."""
    place = next(own for own in memory if own.span is None)
    model, vocab_size = draft.model, plan.config.vocab_size
    groups = model.config.layer_groups(plan.mapping)
    if draft.plan.is_assistant:
        paged = [
            PagedGroup(
                create_backend(plan.attention_of(own.geometry), own.geometry, each.pools[0]),
                each.rows,
            )
            for own, each in zip(groups, memory, strict=True)
        ]
        return draft.net(AttentionGroups(paged), vocab_size)
    pools = place.pools[-len(groups) :]
    if isinstance(model, ExternalDraft) and draft.spec is not None:
        return ExternalHeadNet(model, draft.spec, pools[0], place.rows)
    if isinstance(model, ExternalDraft):
        return ExternalModelNet(model, pools[0], place.rows, vocab_size)
    paged = [
        PagedGroup(create_backend(plan.attention_of(own.geometry), own.geometry, pool), place.rows)
        for own, pool in zip(groups, pools, strict=True)
    ]
    return draft.net(AttentionGroups(paged, sees=draft.plan.sees), vocab_size)


def _manager(
    kind: type[Manager],
    plan: BuildPlan,
    memory: list[_Memory],
    lookahead: int,
    num_host_pages: int,
    **options: Any,
) -> Manager:
    """options: those of `KVCacheManager`."""
    reuse, snapshots = plan.args.kv_cache_config, None
    if options.get("states") is not None and plan.num_snapshots:
        snapshots = Snapshots(plan.num_snapshots, reuse.state_snapshot_tokens)
    host = None
    if num_host_pages:
        copies = HostCopies([own.pools for own in memory], num_host_pages)
        host = HostPages(num_host_pages, copies)
    cache = PagedCache(
        [PageGroup(own.pools[0].num_pages, own.copy_page, own.span) for own in memory],
        plan.page_size,
        enable_block_reuse=reuse.enable_block_reuse,
        enable_partial_reuse=reuse.enable_partial_reuse,
        lookahead=lookahead,
        snapshots=snapshots,
        host=host,
    )
    groups = [KVGroup(own.pools, own.rows.table) for own in memory]
    return kind(cache, groups, plan.span_room, **options)
