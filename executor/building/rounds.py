"""Rounds made ready before the first request: the fastest products, CUDA graphs, and the controller
of the draft length with the times of those rounds."""

import logging
from collections.abc import Sequence

from tllm_spec.executor.building.layer_stack import LayerStack
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.building.warm_up import WarmUp
from tllm_spec.executor.draft_lens import EAGER_SIZES, measure_round_times
from tllm_spec.executor.engine.memory_plan import ServedModel
from tllm_spec.executor.graphs.dummy_contexts import ContextLimits
from tllm_spec.executor.graphs.graph_pool import GraphPool
from tllm_spec.executor.graphs.slot_graphs import GraphKey, graph_keys
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.round_times import RoundTimes
from tllm_spec.executor.speculative.modes import Speculation
from tllm_spec.models.linear_tuning import tune_linears

logger = logging.getLogger(__name__)


def build_controller(
    plan: BuildPlan, runner: RoundRunner, speculation: Speculation, models: Sequence[ServedModel]
) -> AdaptiveController:
    """Of the draft length. Captures the graphs that it may ask for, once the models' products are
    the fastest for them, and times their rounds if it compares them."""
    spec, max_num_tokens = plan.spec, plan.args.max_num_tokens
    controller = plan.controller()
    sizes = graph_sizes(plan, runner, speculation)
    keys = plan.round_keys(sizes)
    if not plan.args.deterministic:
        # Windows of all requests, a row of each of them, full chunks of contexts, and a prompt of
        # some length.
        row_counts = {rows for key in keys for rows in (key.num_tokens, key.batch_size)}
        stack = (
            LayerStack(runner.engine, keys, plan.slots.dummy_slot, plan.device) if keys else None
        )
        tune_linears(models, row_counts | {max_num_tokens, max_num_tokens // 8}, plan.device, stack)
    pool = GraphPool(plan.device)
    runner.capture_contexts(
        plan.context_rows, plan.slots.dummy_slot, pool
    )  # first, as they need most
    if sizes:
        _capture(plan, runner, speculation, keys, graph_keys(sizes, controller.draft_lens_at), pool)
    if plan.device.type == "cuda":
        dummy_slot, max_len = plan.slots.dummy_slot, plan.max_seq_len
        WarmUp(runner, dummy_slot, max_num_tokens=max_num_tokens, max_len=max_len).run(keys)
    if spec is None or spec.adaptive is None:
        return controller
    times = (
        _round_times(plan, runner, speculation, controller, sizes)
        if controller.compares_times
        else None
    )
    return plan.controller(sizes, times)


def graph_sizes(plan: BuildPlan, runner: RoundRunner, speculation: Speculation) -> tuple[int, ...]:
    """Batch sizes of CUDA graphs; none where there can be no graphs."""
    spec = plan.spec
    if not plan.graph_sizes or plan.device.type != "cuda":
        return ()
    if not runner.engine.backend.supports_graphs:
        logger.warning(
            "no CUDA graphs: attn_backend %s needs lengths on the host", plan.args.attn_backend
        )
        return ()
    if spec is not None and spec.use_rejection_sampling and speculation.round_end is None:
        logger.info(
            "no CUDA graphs: rejection sampling needs what a separate draft model drew from"
        )
        return ()
    return plan.graph_sizes


def _capture(
    plan: BuildPlan,
    runner: RoundRunner,
    speculation: Speculation,
    keys: list[GraphKey],
    asked: list[GraphKey],
    pool: GraphPool,
) -> None:
    """keys: of rounds. asked: the part of them, but for limits of tokens, that the controller may
    ask for."""
    assert plan.args.cuda_graph_config is not None
    pads = plan.args.cuda_graph_config.enable_padding
    runner.capture_graphs(keys, plan.slots.dummy_slot, plan.device, pads=pads, pool=pool)
    drafter = speculation.graph_drafter
    if drafter is not None and runner.graphs is not None:
        drafter.capture_graphs(runner.graphs, drafter.keys(keys, asked))


def _round_times(
    plan: BuildPlan,
    runner: RoundRunner,
    speculation: Speculation,
    controller: AdaptiveController,
    sizes: tuple[int, ...],
) -> RoundTimes:
    room = min(plan.slots.max_batch_size, plan.args.max_num_tokens // (1 + plan.max_draft_len))
    timed = [size for size in sizes or EAGER_SIZES if size <= max(room, 1)]
    return measure_round_times(
        runner,
        controller,
        timed,
        plan.slots.dummy_slot,
        plan.device,
        speculation.graph_drafter,
        ContextLimits(plan.max_seq_len, 1 + plan.overshoot),
    )
