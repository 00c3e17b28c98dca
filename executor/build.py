"""The composition root: from arguments to an executor. Nobody else constructs collaborators.

Order: weights of target and draft, then the KV pools take what the memory plan leaves them, then
the rest. The larger steps have a module each in `building/`."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tllm_spec.config import LlmArgs
from tllm_spec.executor.building.engines import build_engine, load_draft, load_target
from tllm_spec.executor.building.memory import reserved_bytes
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.building.rounds import build_controller
from tllm_spec.executor.device_choice import cpu_threads, on_threads
from tllm_spec.executor.draft_lens import watch_unverified
from tllm_spec.executor.engine.memory_plan import plan_num_pages
from tllm_spec.executor.iteration_stats import IterationStats
from tllm_spec.executor.py_executor import ExecutorParts, PyExecutor
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.resources.kv_cache import KVCacheManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.response import Response
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.executor.sampling.row_group import RowGroups
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.sampling.state import SamplingState
from tllm_spec.executor.scheduler import Scheduler
from tllm_spec.executor.speculative.draft_length.request_mark import RequestMark
from tllm_spec.executor.speculative.drafting.draft_checks import check_draft
from tllm_spec.executor.speculative.modes import DraftEngine, Surroundings, build_speculation
from tllm_spec.models.causal_lm import CausalLM
from tllm_spec.models.config import ModelConfig
from tllm_spec.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltExecutor:
    """The executor and what the front end checks requests against."""

    executor: PyExecutor
    queue: RequestQueue
    model_config: ModelConfig
    max_seq_len: int
    max_draft_len: int
    new_mark: Callable[[], RequestMark]


def build_executor(
    args: LlmArgs, tokenizer: Tokenizer | None, respond: Callable[[list[Response]], None]
) -> BuiltExecutor:
    """Loads the models and connects everything. Raises ValueError for what the arguments cannot
    have."""
    plan = BuildPlan(args)
    if plan.draft_plan is not None:
        check_draft(plan.draft_plan, tokenizer)
    target = load_target(plan)
    draft = load_draft(plan, target) if plan.draft_plan is not None else None
    models = [target, *([draft.net] if draft else [])]
    num_pages = plan_num_pages(args, models, plan.max_len, reserved_bytes(plan, draft))

    engine, kv, layers = build_engine(
        plan, target, num_pages, draft, batch_invariant=args.deterministic
    )
    draft_engine = None
    if draft is not None and layers is None:
        assert isinstance(draft.net, CausalLM)
        draft_engine = DraftEngine(*build_engine(plan, draft.net, num_pages)[:2])
    slots = SlotState(plan.slots, plan.max_draft_len, plan.device)
    sampler = _sampler(plan, slots)
    around = Surroundings(
        slots,
        sampler,
        args.max_num_tokens,
        plan.slots.dummy_slot,
        draft_engine,
        layers,
    )
    speculation = build_speculation(plan.spec, around)

    def blame() -> list[LlmRequest] | None:
        culprits = sampler.host_edits.blame()
        return speculation.blame() if culprits is None else culprits

    runner = RoundRunner(engine, sampler, speculation.round_end, speculation.backlog)
    num_threads = cpu_threads(target)
    with torch.inference_mode(), on_threads(num_threads):
        controller = build_controller(plan, runner, speculation, models)
    watch_unverified(controller, plan.spec, speculation)
    queue, resources = RequestQueue(), [*speculation.resources, kv, plan.slots]
    scheduler = Scheduler(plan.limits(kv), plan.slots, kv, resources)
    parts = ExecutorParts(
        queue=queue,
        scheduler=scheduler,
        kv=kv,
        resources=resources,
        slots=slots,
        runner=runner,
        drafter=speculation.drafter,
        sampler=sampler,
        controller=controller,
        draft_len_for=controller.steps_for,
        blame=blame,
        max_in_flight=plan.max_in_flight,
        drafts_in_flight=plan.why_no_overlap is None,
        cpu_threads=num_threads,
        stream_interval=args.stream_interval,
        iteration_stats=_iteration_stats(args, scheduler, kv),
    )
    executor = PyExecutor(parts, respond)
    return BuiltExecutor(
        executor, queue, plan.config, plan.max_seq_len, plan.max_draft_len, controller.new_mark
    )


def _iteration_stats(
    args: LlmArgs, scheduler: Scheduler, kv: KVCacheManager
) -> IterationStats | None:
    if not args.enable_iter_perf_stats:
        return None
    return IterationStats(args.max_stats_len, scheduler, kv.cache)


def _sampler(plan: BuildPlan, slots: SlotState) -> Sampler:
    state = SamplingState(plan.slots, plan.config.vocab_size, plan.device)
    rejection, rates = False, None
    if plan.spec is not None:
        rejection, rates = plan.spec.use_rejection_sampling, plan.spec.synthetic_acceptance_rates
    if rates is not None:
        logger.warning(
            "synthetic_acceptance_rates is set: drafts are accepted by chance, the text means "
            "nothing"
        )
    return Sampler(slots, state, RowGroups(state), rejection=rejection, synthetic_rates=rates)
