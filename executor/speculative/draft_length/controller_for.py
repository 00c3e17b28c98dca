"""The draft-length controller that a speculative configuration asks for."""

from collections.abc import Iterable

from tllm_spec.config.draft_len_schedule import draft_len_limits
from tllm_spec.config.speculative_config import DecodingBaseConfig
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.draft_len_limits import (
    NO_LIMIT,
    AcceptanceGate,
    DraftLenLimits,
)
from tllm_spec.executor.speculative.draft_length.round_times import RoundTimes


def controller_for(
    spec: DecodingBaseConfig | None,
    *,
    graph_batch_sizes: Iterable[int] | None = None,
    round_times: RoundTimes | None = None,
    max_num_tokens: int = NO_LIMIT,
    max_batch_size: int = 0,
    initial_steps: int | None = None,
) -> AdaptiveController:
    """None: plain decoding. initial_steps: as `AdaptiveController.from_config`."""
    if spec is None:
        return AdaptiveController.fixed(0)
    gate = None
    if spec.acceptance_rate_threshold is not None and spec.acceptance_rate_window_size is not None:
        gate = AcceptanceGate(spec.acceptance_rate_threshold, spec.acceptance_rate_window_size)
    limits = DraftLenLimits(
        draft_len_limits(spec.draft_len_schedule, spec.max_concurrency),
        gate=gate,
        max_num_tokens=max_num_tokens,
        max_batch_size=max_batch_size,
        tier_within=spec.shapes.tier_within,
    )
    if spec.adaptive is None:
        return AdaptiveController.fixed(spec.max_draft_len, limits=limits)
    return AdaptiveController.from_config(
        spec.adaptive,
        graph_batch_sizes=graph_batch_sizes,
        initial_steps=initial_steps,
        round_times=round_times,
        limits=limits,
        shapes=spec.shapes,
    )
