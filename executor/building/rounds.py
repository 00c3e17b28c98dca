"""The steps before the first round, in the order in which build.py calls them: GEMMs are tuned,
CUDA graphs captured, kernels warmed up, and rounds timed."""

import logging
from collections.abc import Sequence

from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.building.tiers import EAGER_SIZES, RoundTimer
from tllm_spec.executor.building.warm_up import WarmUp
from tllm_spec.executor.engine.memory_plan import TorchModel
from tllm_spec.executor.graphs.context_graphs import ContextLimits
from tllm_spec.executor.graphs.slot_graphs import GraphKey, GraphPool
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.executor.speculative.draft_length.round_times import RoundTimes
from tllm_spec.models.linear_tuning import tune_linears

logger = logging.getLogger(__name__)


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


def tune_gemms(plan: BuildPlan, models: Sequence[TorchModel], keys: Sequence[GraphKey]) -> None:
    """Tunes the models' GEMMs for the numbers of rows that rounds have."""
    if plan.device.type == "cuda":
        plan.begin("GEMMs")
    if plan.args.deterministic:
        return
    # Rows of all windows, one row per request, full chunks of contexts, and a short prompt.
    row_counts = {rows for key in keys for rows in key.row_counts}
    row_counts |= {plan.args.max_num_tokens, plan.args.max_num_tokens // 8}
    tune_linears(models, row_counts, plan.device, plan.communicator)


def capture_graphs(plan: BuildPlan, runner: RoundRunner, keys: list[GraphKey]) -> None:
    """Captures the graphs of contexts, and those of the rounds in `keys`."""
    if plan.device.type == "cuda":
        plan.begin("CUDA graphs")
    pool = GraphPool(plan.device, plan.communicator.minimum)
    plan.communicator.before_close(pool.release)
    # First, since the graphs of contexts need the most memory.
    runner.capture_contexts(plan.context_rows, plan.slots.dummy_slot, pool)
    if keys:
        assert plan.args.cuda_graph_config is not None
        pads = plan.args.cuda_graph_config.enable_padding
        logger.info("capturing the CUDA graphs of %d kinds of rounds", len(keys))
        runner.capture_graphs(keys, plan.slots.dummy_slot, plan.device, pads=pads, pool=pool)


def warm_up(plan: BuildPlan, runner: RoundRunner, keys: Sequence[GraphKey]) -> None:
    """Runs rounds of dummy requests, which compile and load the kernels of a GPU."""
    if plan.device.type == "cuda":
        rows, dummy_slot = plan.args.max_num_tokens, plan.slots.dummy_slot
        WarmUp(runner, dummy_slot, max_num_tokens=rows, max_len=plan.max_seq_len).run(keys)


def time_rounds(plan: BuildPlan, runner: RoundRunner, sizes: Sequence[int]) -> RoundTimes | None:
    """How long rounds take with each draft length that the controller may ask for; None if it does
    not compare times. sizes: batch sizes of CUDA graphs."""
    controller = plan.controller()
    if not controller.compares_times:
        return None
    plan.begin("round times")
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
    return timer.measure(controller, timed, is_shown=plan.mapping.rank == 0)
