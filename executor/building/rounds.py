"""Prepares rounds before the first request: tuned GEMMs, CUDA graphs, and the controller of the
draft length with the measured times of rounds."""

import logging
from collections.abc import Sequence

from tllm_spec.executor.building.draft_lens import EAGER_SIZES, RoundTimer
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.building.warm_up import WarmUp
from tllm_spec.executor.engine.memory_plan import TorchModel
from tllm_spec.executor.graphs.dummy_contexts import ContextLimits
from tllm_spec.executor.graphs.graph_pool import GraphPool
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.round_times import RoundTimes
from tllm_spec.models.linear_tuning import tune_linears

logger = logging.getLogger(__name__)


def build_controller(
    plan: BuildPlan, runner: RoundRunner, models: Sequence[TorchModel]
) -> AdaptiveController:
    """The controller of the draft length. Tunes the models' GEMMs, captures the graphs of all draft
    lengths that the controller may ask for, and times their rounds if it compares times."""
    spec, max_num_tokens = plan.spec, plan.args.max_num_tokens
    controller = plan.controller()
    sizes = graph_sizes(plan, runner)
    keys = plan.round_keys(sizes)
    if not plan.args.deterministic:
        # Rows of all windows, one row per request, full chunks of contexts, and a short prompt.
        row_counts = {rows for key in keys for rows in key.row_counts}
        row_counts |= {max_num_tokens, max_num_tokens // 8}
        tune_linears(models, row_counts, plan.device, plan.communicator)
    pool = GraphPool(plan.device, plan.communicator.minimum)
    plan.communicator.before_close(pool.release)
    # First, since the graphs of contexts need the most memory.
    runner.capture_contexts(plan.context_rows, plan.slots.dummy_slot, pool)
    if sizes:
        assert plan.args.cuda_graph_config is not None
        pads = plan.args.cuda_graph_config.enable_padding
        logger.info("capturing the CUDA graphs of %d kinds of rounds", len(keys))
        runner.capture_graphs(keys, plan.slots.dummy_slot, plan.device, pads=pads, pool=pool)
    if plan.device.type == "cuda":
        dummy_slot, max_len = plan.slots.dummy_slot, plan.max_seq_len
        WarmUp(runner, dummy_slot, max_num_tokens=max_num_tokens, max_len=max_len).run(keys)
    if spec is None or spec.adaptive is None:
        return controller
    times = None
    if controller.compares_times:
        times = _round_times(plan, runner, controller, sizes)
    return plan.controller(sizes, times)


def graph_sizes(plan: BuildPlan, runner: RoundRunner) -> tuple[int, ...]:
    """Batch sizes of CUDA graphs; none where there can be no graphs."""
    if not plan.graph_sizes or plan.device.type != "cuda":
        return ()
    if not runner.engine.attention.supports_graphs:
        logger.warning(
            "no CUDA graphs: attn_backend %s needs lengths on the host", plan.args.attn_backend
        )
        return ()
    return plan.graph_sizes


def _round_times(
    plan: BuildPlan,
    runner: RoundRunner,
    controller: AdaptiveController,
    sizes: tuple[int, ...],
) -> RoundTimes:
    longest = plan.shapes.longest
    room = min(plan.slots.max_batch_size, plan.args.max_num_tokens // longest.window)
    timed = [size for size in sizes or EAGER_SIZES if size <= max(room, 1)]
    timer = RoundTimer(
        runner,
        plan.shapes,
        plan.slots.dummy_slot,
        plan.device,
        ContextLimits(plan.max_seq_len, 1 + plan.overshoot),
    )
    return timer.measure(controller, timed)
