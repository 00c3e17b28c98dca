"""Which draft weights of an engine can be replaced while it runs."""

from __future__ import annotations

from typing import Any

from tllm_spec.executor.building.engines import Engines, load_draft
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.device.device_choice import on_device
from tllm_spec.executor.draft_weights import DraftWeights
from tllm_spec.executor.speculative.drafting.loaded_draft import check_draft
from tllm_spec.text.tokenizer import Tokenizer


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
        new = of_draft.from_folder(folder)
        tokens = check_draft(new, tokenizer, plan.config)
        with on_device(plan.device):
            return load_draft(plan, target, new, tokens).model

    manager = engines.draft_kv or engines.kv
    return DraftWeights(load, draft.model, manager.cache, draft.plan.path, plan.communicator)
