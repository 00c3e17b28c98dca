"""What will be allocated beside weights, pools and activations, so that the pools leave room for it."""

import torch

from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.engine.memory_plan import BYTES_A_GRAPH
from tllm_spec.executor.speculative.draft_backlog import DraftBacklog
from tllm_spec.executor.speculative.loaded_draft import LoadedDraft
from tllm_spec.kernels.cublas_lt import WORKSPACE_BYTES
from tllm_spec.kernels.paged_prefill import PLAN_BYTES


def reserved_bytes(plan: BuildPlan, draft: LoadedDraft | None) -> int:
    """Of the workspaces of attention and of products, of CUDA graphs, and of what is kept for every slot: the
    distributions of rejection sampling on the target's pages, and what a draft inside the forward puts off."""
    args, num_slots = plan.args, plan.slots.dummy_slot + 1
    configs = [plan.config, *([draft.net.config] if draft else [])]
    geometries = [config.attention_geometry(plan.mapping) for config in configs]
    num_bytes = sum(map(plan.attention.workspace_bytes, geometries))
    if plan.device.type == "cuda" and not args.deterministic:
        num_bytes += WORKSPACE_BYTES
    if draft is not None and _keeps_backlog(plan, draft):
        num_bytes += DraftBacklog.num_bytes(num_slots, draft.spec.captured(1) if draft.spec else None)
    if args.cuda_graph_config is not None:
        sizes = args.cuda_graph_config.sizes(plan.slots.max_batch_size)
        num_bytes += len(sizes) * _graphs_a_size(plan, draft) * BYTES_A_GRAPH
    if plan.context_rows:
        num_bytes += len(plan.context_rows) * BYTES_A_GRAPH + PLAN_BYTES
    if draft is not None and draft.plan.shares_pages and plan.spec and plan.spec.use_rejection_sampling:
        rows = num_slots * plan.max_draft_len
        num_bytes += rows * plan.config.vocab_size * torch.float32.itemsize
    return num_bytes


def _keeps_backlog(plan: BuildPlan, draft: LoadedDraft) -> bool:
    return draft.plan.shares_pages and plan.may_be_plain


def _graphs_a_size(plan: BuildPlan, draft: LoadedDraft | None) -> int:
    """Greedy, sampled and the forward alone, of every draft length; of what is drafted before the forward; of reading a
    backlog."""
    num_graphs = 3 * (1 + plan.max_draft_len)
    if draft is None:
        return num_graphs
    if draft.plan.drafts_before_the_forward:
        controller = plan.controller()
        num_graphs += 2 * len({0, *controller.draft_lens})
    return num_graphs + _keeps_backlog(plan, draft)
