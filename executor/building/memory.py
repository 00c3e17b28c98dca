"""Memory that is allocated in addition to weights, pools and activations, so that the pools leave
room for it."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tllm_spec.attention.choice import workspace_bytes
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.device.device_choice import pick_dtype
from tllm_spec.executor.engine.memory_plan import BYTES_A_GRAPH, GIB, GroupPlan, free_bytes
from tllm_spec.executor.resources.adapter_slots import AdapterSlots
from tllm_spec.executor.sampling.grammar_masks import mask_words
from tllm_spec.executor.speculative.drafting.drafter import When
from tllm_spec.executor.speculative.drafting.heads import draft_folder
from tllm_spec.executor.speculative.drafting.loaded_draft import LoadedDraft, blank_head
from tllm_spec.executor.speculative.drafting.network_drafter import DraftBacklog
from tllm_spec.executor.speculative.modes import text_bytes_of
from tllm_spec.kernels.attention.paged_prefill import PLAN_BYTES
from tllm_spec.kernels.gemm.cublas_lt import WORKSPACE_BYTES
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.registry import blank_model, model_config, weight_bytes
from tllm_spec.zoo.registry import resolve_model


def reserved_bytes(
    plan: BuildPlan,
    draft: LoadedDraft | None,
    groups: Sequence[GroupPlan],
    adapters: AdapterSlots | None = None,
) -> int:
    """Workspaces of attention, GEMMs and adapters, CUDA graphs, and what is kept for every slot:
    recurrent states, their snapshots and what blocks of prompts need; the backlog of a draft
    network on the target's pages; a draft network's distributions for rejection sampling; texts."""
    num_bytes = sum(
        workspace_bytes(plan.attention_of(geometry), geometry, kv_format)
        for group in groups
        for geometry, kv_format in group.pools
    )
    if draft is not None and draft.plan.is_assistant:  # backends of its own over the same pools
        for group, own in zip(groups, draft.model.config.layer_groups(plan.mapping), strict=True):
            num_bytes += workspace_bytes(plan.attention, own.geometry, group.pools[0][1])
    if (recurrent := plan.recurrent) is not None:
        num_bytes += (plan.slots.dummy_slot + 1) * recurrent.slot_bytes(plan.dtype)
        num_bytes += plan.num_snapshots * recurrent.snapshot_bytes(plan.dtype)
        num_bytes += recurrent.prompt_bytes(plan.args.max_num_tokens)
    if plan.device.type == "cuda" and not plan.args.deterministic:
        num_bytes += WORKSPACE_BYTES
    if adapters is not None:
        num_bytes += adapters.sum_bytes(plan.args.max_num_tokens)
    if draft is not None:
        num_bytes += _slot_bytes(plan, draft)
    num_slots = plan.slots.dummy_slot + 1
    num_bytes += text_bytes_of(plan.spec, num_slots, plan.max_len, len(plan.corpus))
    num_bytes += _graph_bytes(plan, draft)
    if plan.context_rows:
        kinds = 1 if plan.args.lora_config is None else 2
        num_bytes += kinds * len(plan.context_rows) * BYTES_A_GRAPH + PLAN_BYTES
    return num_bytes


def check_free_memory(plan: BuildPlan) -> None:
    """Raises ValueError if the weights of the target and of what drafts alone take more than the
    device has. All ranks call this together."""
    target = _blank_model(plan, resolve_model(plan.args.model))
    num_bytes, what = _bytes_with_table(plan, target), ""
    draft = plan.draft_plan
    if draft is not None and not draft.is_head:
        what = " and the draft model's"
        num_bytes += _bytes_with_table(plan, _blank_model(plan, draft_folder(draft)))
    elif draft is not None:
        what = " and the drafter's"
        num_bytes += weight_bytes(blank_head(draft, target, plan.device), plan.device)
    communicator = plan.communicator
    free = communicator.minimum(free_bytes(plan.device) // communicator.ranks_on_device)
    if num_bytes > free:
        raise ValueError(
            f"the weights of {plan.args.model}{what} take {num_bytes / GIB:.1f} GiB "
            f"on {plan.device.type} with dtype = {plan.args.dtype!r} and max_seq_len = "
            f"{plan.max_seq_len}, and {free / GIB:.1f} GiB are free; use a smaller or a quantized "
            "model, a dtype of 16 bits, a lower max_seq_len or a higher tensor_parallel_size"
        )


def _blank_model(plan: BuildPlan, folder: Path) -> CausalLM:
    own = model_config(folder).dtype
    return blank_model(
        folder,
        dtype=pick_dtype(plan.args.dtype, own, plan.device),
        device=plan.device,
        mapping=plan.mapping,
        fp8_activations=plan.args.fp8_activations,
    )


def _bytes_with_table(plan: BuildPlan, model: CausalLM) -> int:
    """Weights, and the rotary tables of all positions."""
    table = plan.max_len * 2 * model.config.rope_dim * model.dtype.itemsize
    return weight_bytes(model, plan.device) + len(model.config.ropes) * table


def _slot_bytes(plan: BuildPlan, draft: LoadedDraft) -> int:
    """Bytes that a draft network keeps for all slots."""
    num_slots, captured = plan.slots.dummy_slot + 1, draft.spec.captured(1) if draft.spec else None
    reads = draft.plan.shares_pages and not draft.plan.is_assistant
    num_bytes = DraftBacklog.num_bytes(num_slots, captured) if reads else 0
    if plan.spec is not None and plan.spec.use_rejection_sampling and not plan.shapes.has_trees:
        num_rows = num_slots * plan.max_draft_len
        num_bytes += num_rows * plan.config.vocab_size * torch.float32.itemsize
    return num_bytes


def _graph_bytes(plan: BuildPlan, draft: LoadedDraft | None) -> int:
    """Graphs of whole rounds, greedy and sampled, unless they are split; of forwards, with their
    hidden states; of tails, with the masks of grammars; of a draft model's steps; of reading a
    backlog."""
    keys, splits_rounds = plan.round_keys(plan.graph_sizes), False
    # Forwards, and whole rounds, have another graph for requests with adapters. What drafts alone
    # has one if the draft head takes them.
    lora = plan.args.lora_config
    kinds = 1 if lora is None else 2
    of_drafts = 1 if lora is None or lora.max_draft_lora_rank is None else 2
    num_graphs = kinds * len({(key.batch_size, key.shape) for key in keys})
    if draft is not None:
        splits_rounds = draft.plan.when is When.TAIL
        if draft.plan.shares_pages:
            num_graphs += of_drafts * len({key.batch_size for key in keys})
        else:
            num_graphs += len([key for key in keys if key.shape.depth])
    is_guided = plan.args.guided_decoding_backend is not None
    num_graphs += len(keys) * (
        kinds * (not splits_rounds) + of_drafts * (splits_rounds or is_guided)
    )
    num_rows = max((key.num_tokens for key in keys), default=0)
    num_bytes = num_rows * plan.config.hidden_size * plan.dtype.itemsize
    if is_guided:
        num_bytes += mask_words(num_rows, plan.config.vocab_size) * torch.int32.itemsize
    return num_graphs * BYTES_A_GRAPH + num_bytes
