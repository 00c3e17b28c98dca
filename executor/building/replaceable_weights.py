"""Which draft weights of an engine can be replaced while it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tllm_spec.executor.building.engines import Engines, load_draft
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.device.device_choice import on_device
from tllm_spec.executor.draft_weights import DraftWeights


def replaceable_weights(plan: BuildPlan, engines: Engines) -> DraftWeights | None:
    """None where the weights cannot be replaced: there are none, they are the target's or outside
    torch, or there are several ranks."""
    draft, target = engines.draft, engines.target.model
    if draft is None or draft.plan.path is None or draft.plan.backend != "torch":
        return None
    if plan.communicator.mapping.tp_size > 1:
        return None
    of_draft = draft.plan

    def load(folder: str) -> Any:
        with on_device(plan.device):
            return load_draft(plan, target, replace(of_draft, path=folder)).model

    manager = engines.draft_kv or engines.kv
    return DraftWeights(load, draft.model, manager.cache, draft.plan.path)
