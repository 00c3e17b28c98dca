"""Rounds whose requests share their rows: which there are, and what refuses them."""

from collections.abc import Sequence

from tllm_spec.config.adaptive_config import AdaptiveConfig
from tllm_spec.config.draft_shape import MAX_BUDGETS, DraftShape, DraftShapes, chain_of

# Up to this batch size whole windows cost little, since reading the weights takes longer than
# computing the rows. More than this number of rows take any GPU longer than reading the weights.
MAX_WHOLE_BATCH, MAX_WHOLE_ROWS = 16, 512


def with_budgets(max_draft_len: int, draft_lens: Sequence[int]) -> DraftShapes:
    """Chains of every length, and for each of `draft_lens` above 2 a round that verifies the
    likeliest half of the drafts. With 2 drafts that would be hardly better than a chain of 1."""
    lengths = [length for length in draft_lens if length]
    budgeted = [DraftShape(n, n, mean_rows=1 + n / 2) for n in lengths if n > 2]
    chains = [chain_of(length) for length in range(max_draft_len + 1)]
    return DraftShapes(chains, budgeted=budgeted, lengths=lengths)


def may_have(batch_size: int, shape: DraftShape) -> bool:
    """Whether the shape is worth comparing in rounds of so many requests."""
    if not shape.is_ragged:
        return shape.num_nodes < max(MAX_WHOLE_ROWS // batch_size, 2)
    return batch_size > MAX_WHOLE_BATCH


def budget_problem(
    verify_budget: float | None,
    adaptive: AdaptiveConfig | None,
    *,
    is_adaptive: bool,
    num_budgets: int,
    drafts_trees: bool,
    use_rejection_sampling: bool,
    has_schedule: bool,
) -> str | None:
    """What is wrong with the options that let requests share a round's rows; None: nothing.
    adaptive: of `enable_adaptive_verification`; None: that is off. num_budgets: of its
    shapes."""
    if verify_budget is None and adaptive is None:
        return None
    named, reasons = "enable_adaptive_verification = True", []
    if verify_budget is not None:
        named = f"verify_budget = {verify_budget:g}"
        if is_adaptive:
            other = "enable_adaptive_verification" if adaptive else "adaptive"
            reasons.append(f"{other} also says what is verified")
    elif adaptive is not None:
        if not adaptive.is_cost_model:
            reasons.append("it needs adaptive's cost_model, and ema has rounds of equal windows")
        elif num_budgets > MAX_BUDGETS:
            reasons.append(
                f"it compares {MAX_BUDGETS} kinds of rounds at most, and candidate_steps make "
                f"{num_budgets}: give fewer"
            )
        elif adaptive.draft_lens[-1] < 3:
            reasons.append("it needs candidate_steps of 3 or more: shorter drafts gain nothing")
        if has_schedule:
            reasons.append("draft_len_schedule also says what is verified; use adaptive's slots")
    if drafts_trees:
        reasons.append("requests share the rows of chains only, not of draft trees; use a chain")
    if use_rejection_sampling:
        reasons.append(
            "with use_rejection_sampling = True a choice by the drafts' probabilities would change "
            "the distribution of the text"
        )
    return f"{named} is refused: {'; '.join(reasons)}" if reasons else None
