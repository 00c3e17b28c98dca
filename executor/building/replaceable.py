"""Which weights of an engine can be replaced while it runs, and what of its memory can sleep."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from tllm_spec.executor.building.engines import Engines, load_draft, load_target, weights_of
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.device.device_choice import on_device
from tllm_spec.executor.draft_weights import DraftWeights
from tllm_spec.executor.sleep import ADAPTERS, DRAFT, KV, TARGET, Sleep
from tllm_spec.executor.speculative.drafting.loaded_draft import check_draft
from tllm_spec.executor.target_weights import TargetWeights
from tllm_spec.executor.weight_swap import Part
from tllm_spec.models.checkpoint import checkpoint_names
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.token_map import DraftTokens
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.zoo.registry import resolve_model

logger = logging.getLogger(__name__)

SHARED = "embed_tokens", "lm_head"  # MTP modules use the target's unless they have others
OTHER_SHARES = (
    "the MTP modules of {folder} share the embedding and the output layer with the target where "
    "the engine's have their own, or the reverse: graphs read where they were at the start; "
    "accepted are modules for the present target (part: draft), or both together (part: all)"
)


def replaceable_weights(
    plan: BuildPlan, engines: Engines, tokenizer: Tokenizer | None
) -> DraftWeights | None:
    """tokenizer: the target's. Returns None where the weights cannot be replaced: there are none,
    they are the target's, or they are outside torch."""
    draft, target = engines.draft, engines.target.model
    if draft is None or draft.plan.path is None or draft.plan.backend != "torch":
        return None
    of_draft = draft.plan

    def load(folder: str) -> Any:
        own = of_draft.config.model_copy(update={"speculative_model": folder})
        new = replace(of_draft, config=own)
        tokens = check_draft(new, tokenizer, plan.config)
        with on_device(plan.device):
            return load_draft(plan.staged(), target, new, tokens).model

    manager = engines.draft_kv or engines.kv
    return DraftWeights(load, draft.model, manager.cache, draft.plan.path, plan.communicator)


def replaceable_target(
    plan: BuildPlan, engines: Engines, tokens: DraftTokens | None
) -> TargetWeights | None:
    """tokens: that are drafted; None: all. MTP modules of the target's checkpoint are replaced with
    it. Other heads keep their weights, and what they borrow is replaced in place. None where a head
    has copies of the target's tensors."""
    draft, target = engines.draft, engines.target.model
    head = draft if draft is not None and draft.plan.is_head else None
    has_modules = head is not None and head.plan.path is None
    if head is not None and (
        head.plan.backend != "torch" or (tokens is not None and not has_modules)
    ):
        return None
    models: list[Any] = [target, head.model] if head is not None and has_modules else [target]
    shares = [getattr(models[-1], name) is None for name in SHARED] if has_modules else []

    def load(folder: str, part: Part) -> list[Any]:
        updated = plan.staged(folder)
        with on_device(plan.device):
            new = target if part == "draft" else load_target(updated)
            if head is None or not has_modules:
                return [new]
            if part == "target" and not _writes_modules(folder, new):
                return [new, head.model]
            modules = load_draft(updated, new, head.plan, tokens).model
            if [getattr(modules, name) is None for name in SHARED] != shares:
                raise ValueError(OTHER_SHARES.format(folder=folder))
            return [new, modules]

    caches = [engines.kv.cache, *([engines.draft_kv.cache] if engines.draft_kv else [])]
    logger.info(
        "an update of the weights takes %d MiB of host memory while it is staged",
        sum(each.nbytes for model in models for each in model.parameters()) >> 20,
    )
    return TargetWeights(load, models, caches, plan.args.model, plan.communicator)


def sleep_of(plan: BuildPlan, engines: Engines) -> Sleep:
    target = engines.target
    placed = {
        ADAPTERS: target.adapters and target.adapters.tables.weights,
        TARGET: target.model,
        DRAFT: weights_of(engines.draft),
        KV: target.attention.memory,
    }
    caches = [engines.kv.cache, *([engines.draft_kv.cache] if engines.draft_kv else [])]
    return Sleep(plan.memory, placed, caches)


def _writes_modules(folder: str, target: CausalLM) -> bool:
    """Whether the checkpoint has MTP modules: those that train a target may write none."""
    prefix = target.nextn_prefix(target.config.num_layers)
    if any(name.startswith(prefix) for name in checkpoint_names(resolve_model(folder))):
        return True
    logger.warning("%s has no MTP modules: those of the checkpoint before stay", folder)
    return False
