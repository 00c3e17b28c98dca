"""`verify_budget`: what it cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tllm_spec.config.speculative_base import DecodingBaseConfig


def budget_problem(config: DecodingBaseConfig) -> str | None:
    """What is wrong with the options that let requests share a round's rows; None: nothing."""
    if config.verify_budget is None:
        return None
    named = f"verify_budget = {config.verify_budget:g}"
    if config.drafts_trees:
        return f"{named} needs chains: the drafts of a tree have rows of their own"
    if config.use_rejection_sampling:
        return (
            f"{named} and use_rejection_sampling = True are exclusive: drafts that are chosen by "
            "their probability would change the distribution of the text"
        )
    if config.adaptive is not None:
        return f"{named} and adaptive are exclusive: each says what is verified"
    return None
