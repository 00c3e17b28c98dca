"""The composition root: from arguments to an executor.

Order: weights of target and draft, then KV pools of the size that the memory plan leaves, then the
rest. The larger steps have a module each in `building/`."""

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tllm_spec.attention.choice import backend_name
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.executor.building.draft_backend import check_draft_backend
from tllm_spec.executor.building.engines import Engines, build_engines
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.building.replaceable import (
    replaceable_target,
    replaceable_weights,
    sleep_of,
)
from tllm_spec.executor.building.rounds import (
    capture_graphs,
    graph_sizes,
    time_rounds,
    tune_gemms,
    warm_up,
)
from tllm_spec.executor.device.device_choice import cpu_threads, on_device, on_threads
from tllm_spec.executor.engine.memory_plan import TorchModel
from tllm_spec.executor.engine.replayed_engine import ReplayedEngine, ReplayedSampler
from tllm_spec.executor.py_executor import ExecutorParts, PyExecutor
from tllm_spec.executor.ranks import agreed, queue_of
from tllm_spec.executor.request import LlmRequest, Response
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.kv_cache import KVCacheManager
from tllm_spec.executor.resources.kv_events import KVEventPublisher, KVEvents
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.executor.sampling.acceptance_rules import RelaxedAcceptance
from tllm_spec.executor.sampling.row_group import SamplingState
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.sampling.sharded_sampler import sampler_of
from tllm_spec.executor.scheduler import Scheduler
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.hindsight import hindsight_of
from tllm_spec.executor.speculative.drafting.loaded_draft import check_draft
from tllm_spec.executor.speculative.drafting.state_recorder import StateRecorder
from tllm_spec.executor.speculative.modes import Surroundings, build_drafter, check_code
from tllm_spec.executor.totals import DraftWatch, IterationStats, RoundLog
from tllm_spec.executor.traffic_recorder import TrafficRecorder
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.token_map import DraftTokens
from tllm_spec.progress import progress
from tllm_spec.recording.traffic_folder import TrafficFolder
from tllm_spec.recording.traffic_record import header_of
from tllm_spec.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltExecutor:
    """The executor and what the front end checks requests against."""

    executor: PyExecutor
    queue: RequestQueue
    model_config: ModelConfig
    limits: RequestLimits
    kv_events: KVEvents | None  # with kv_events_config, on rank 0


def build_executor(
    args: LlmArgs,
    tokenizer: Tokenizer | None,
    respond: Callable[[list[Response]], None],
    communicator: Communicator = SINGLE,
    texts: Mapping[int, Sequence[int]] | None = None,
) -> BuiltExecutor:
    """Loads the models and connects everything. texts: as in `ReplayedSampler`, for replays. Raises
    ValueError for arguments that cannot be honoured."""
    plan = BuildPlan(args, communicator, tokenizer)
    communicator.join(plan.device)
    is_first = communicator.mapping.rank == 0
    with progress("start", _num_steps(plan), is_shown=is_first) as bar, on_device(plan.device):
        plan.begin = bar.begin
        return _build(plan, tokenizer, respond, texts)


def _num_steps(plan: BuildPlan) -> int:
    """Weights and memory; on a GPU tuning and graphs; the times of rounds."""
    return 2 + 2 * (plan.device.type == "cuda") + plan.controller().compares_times


def _build(
    plan: BuildPlan,
    tokenizer: Tokenizer | None,
    respond: Callable[[list[Response]], None],
    texts: Mapping[int, Sequence[int]] | None,
) -> BuiltExecutor:
    args, communicator = plan.args, plan.communicator
    tokens = _check(plan, tokenizer)
    engines = _replayed(plan, build_engines(plan, tokens), texts)
    slots = SlotState(plan.slots, plan.shapes, plan.device, counts_drafts=plan.counts_drafts)
    sampler = _sampler(plan, slots, engines, texts)
    own = args.max_num_tokens, plan.max_len, engines.net, engines.draft_kv, plan.corpus
    drafter = build_drafter(plan.spec, Surroundings(slots, sampler, *own))
    recorder, of_states = _recorder(args, communicator, engines), None
    if recorder is not None and engines.recorded is not None:
        of_states = StateRecorder(engines.recorded, slots)
    runner = RoundRunner(engines.target, sampler, drafter, of_states)
    num_threads = cpu_threads(engines.target.model)
    with torch.inference_mode(), on_threads(num_threads):
        controller = prepare_rounds(plan, runner, engines.models)

    def blame() -> list[LlmRequest] | None:
        culprits = sampler.host_edits.blame()
        return drafter.blame() if culprits is None else culprits

    queue, kv = queue_of(communicator), engines.kv
    events, adapters = _kv_events(plan, kv), engines.target.adapters
    resources: list[ResourceManager] = [*drafter.resources, kv, plan.slots]
    resources += [m for m in (engines.target, adapters, events) if isinstance(m, ResourceManager)]
    scheduler = Scheduler(plan.limits, plan.slots, kv, resources, adapters)
    stats = IterationStats(args.max_stats_len, scheduler, kv.cache)
    parts = ExecutorParts(
        queue=queue,
        scheduler=scheduler,
        kv=kv,
        resources=resources,
        slots=slots,
        runner=runner,
        drafter=drafter,
        sampler=sampler,
        controller=controller,
        tier_for=agreed(communicator, controller.tier_for, may_differ=controller.compares_times),
        blame=blame,
        draft_watch=DraftWatch(drafter.causes),
        max_in_flight=plan.max_in_flight,
        overlaps=plan.why_no_overlap is None,
        cpu_threads=num_threads,
        stream_interval=args.stream_interval,
        iteration_stats=stats if args.enable_iter_perf_stats else None,
        round_log=RoundLog(scheduler) if args.print_iter_log and not plan.mapping.rank else None,
        draft_weights=replaceable_weights(plan, engines, tokenizer),
        target_weights=replaceable_target(plan, engines, tokens),
        sleep=sleep_of(plan, engines),
        adapters=adapters,
        recorder=recorder,
        hindsight=hindsight_of(None if plan.mapping.rank else plan.spec, controller.tiers),
        ranks=_ranks(plan, engines),
    )
    limits = _limits(plan, tokenizer, _longest_sequence(plan, engines))
    return BuiltExecutor(PyExecutor(parts, respond), queue, plan.config, limits, events)


def _replayed(
    plan: BuildPlan, engines: Engines, texts: Mapping[int, Sequence[int]] | None
) -> Engines:
    """The engines of a replay for a head: the target only looks up hidden states, except where
    round times are measured."""
    target, spec = engines.target, plan.spec
    if texts is None or target.spec is None or spec is None or spec.adaptive is not None:
        return engines
    num_slots, longest = plan.slots.dummy_slot + 1, max(map(len, texts.values()), default=0)
    return replace(engines, target=ReplayedEngine(target, num_slots, longest))


def _check(plan: BuildPlan, tokenizer: Tokenizer | None) -> DraftTokens | None:
    """Checks what needs no weights. Returns the tokens that are drafted; None: all."""
    if plan.spec is not None:
        check_code(plan.spec)
    tokens = check_draft(plan.draft_plan, tokenizer, plan.config)
    check_draft_backend(plan)
    return tokens


def prepare_rounds(
    plan: BuildPlan, runner: RoundRunner, models: Sequence[TorchModel]
) -> AdaptiveController:
    """Everything that comes before the first round. Returns the controller of the draft length,
    which knows how long rounds take if it compares times."""
    sizes = graph_sizes(plan, runner)
    keys = plan.round_keys(sizes)
    tune_gemms(plan, models, keys)
    capture_graphs(plan, runner, keys)
    warm_up(plan, runner, keys)
    return plan.controller(sizes, time_rounds(plan, runner, sizes))


def _kv_events(plan: BuildPlan, kv: KVCacheManager) -> KVEvents | None:
    config = plan.args.kv_cache_config.kv_events_config
    if config is None or not config.enable_kv_cache_events or plan.mapping.rank:
        return None
    if plan.recurrent is not None:
        if config.publisher == "null":
            return None
        raise ValueError(
            "kv_events_config is not served for layers with a recurrent state: a prefix is reused "
            "up to a snapshot only, which the events cannot say"
        )
    events = KVEvents(kv.cache.log_events(), config.data_parallel_rank)
    if config.publisher == "zmq":
        events.add_sink(KVEventPublisher(config).publish)
    return events


def _ranks(plan: BuildPlan, engines: Engines) -> list[Any]:
    """All ranks as `/server_info` shows them. Memory in bytes; on CUDA `device_bytes` is all that
    torch has allocated there."""
    weights = [each for model in engines.models for each in model.parameters()]
    facts = {
        "rank": plan.mapping.rank,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "device": str(plan.device),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "attn_backend": backend_name(plan.attention),
        "weight_bytes": sum(each.numel() * each.element_size() for each in weights),
    }
    if plan.device.type == "cuda":
        facts["device_bytes"] = torch.cuda.memory_allocated(plan.device)
    return plan.communicator.gather(facts)


def _limits(plan: BuildPlan, tokenizer: Tokenizer | None, max_seq_len: int) -> RequestLimits:
    own = None if tokenizer is None else tokenizer.eos_token_id
    named = {*plan.config.eos_token_ids, *(() if own is None else (own,))}
    if unknown := sorted(each for each in named if not 0 <= each < plan.config.vocab_size):
        logger.warning(
            "the files of the model name the end tokens %s, and its vocabulary has ids 0 to %d: "
            "they are left out%s",
            unknown,
            plan.config.vocab_size - 1,
            "" if named - set(unknown) else ", and no text ends by itself",
        )
    return RequestLimits(
        vocab_size=plan.config.vocab_size,
        end_ids=tuple(plan.config.eos_token_ids),
        max_seq_len=max_seq_len,
        max_draft_len=plan.max_draft_len,
        pause_patience=plan.pause_patience,
    )


def _longest_sequence(plan: BuildPlan, engines: Engines) -> int:
    """Tokens of prompt and output that a request may have: of the context, as many as each cache
    has room for. Raises ValueError for a cache that has no room for one of each."""
    args, longest = plan.args, plan.max_seq_len
    for kv in (engines.kv, engines.draft_kv):
        if kv is not None and (in_cache := kv.longest_request) is not None:
            longest = min(longest, in_cache - plan.overshoot)
    context = plan.max_seq_len
    size = "kv_cache_config.max_tokens"
    if args.kv_cache_config.max_tokens is None:
        size = "kv_cache_config.free_gpu_memory_fraction, or lower max_batch_size"
    if longest < 2:
        raise ValueError(
            f"the KV cache has no room for a request: {plan.overshoot} tokens of it are kept "
            f"for drafts and rounds in flight; raise {size}"
        )
    if longest < context:
        logger.warning(
            "a request may have %d tokens, prompt and output together: the KV cache has no room "
            "for the context of %d; raise %s",
            *(longest, context, size),
        )
    if not args.enable_chunked_prefill and args.max_num_tokens < longest - 1:
        logger.info(
            "a prompt may have %d tokens, which is max_num_tokens; enable_chunked_prefill: true "
            "serves longer ones, up to %d",
            *(args.max_num_tokens, longest - 1),
        )
    return longest


def _recorder(
    args: LlmArgs, communicator: Communicator, engines: Engines
) -> TrafficRecorder | None:
    if args.record_traffic is None or communicator.mapping.rank:
        return None
    path = Path(args.record_traffic)
    folder = TrafficFolder(path, header_of(args), args.record_traffic_mib << 20)
    logger.warning(
        "record_traffic: prompts and outputs are written to %s, except for requests with store: "
        "false; those with a cache_salt, or of a server with several API keys, need store: true",
        path,
    )
    return TrafficRecorder(folder, engines.recorded, args.record_hidden_states)


def _sampler(
    plan: BuildPlan, slots: SlotState, engines: Engines, texts: Mapping[int, Sequence[int]] | None
) -> Sampler:
    state = SamplingState(plan.slots, plan.config.vocab_size, plan.device)
    rejection, rates, thresholds, relaxed = False, None, (1.0, 1.0), None
    if (spec := plan.spec) is not None:
        rejection, rates = spec.use_rejection_sampling, spec.synthetic_acceptance_rates
        thresholds = spec.threshold_single, spec.threshold_acc
        if spec.relaxed_rule is not None:
            relaxed = RelaxedAcceptance(spec.relaxed_rule, slots, state)
    if rates is not None:
        logger.warning(
            "synthetic_acceptance_rates is set: drafts are accepted by chance, the text means "
            "nothing"
        )
    make = Sampler if texts is None else partial(ReplayedSampler, texts, plan.max_len)
    return sampler_of(
        engines.target.model.lm_head.shard,
        slots,
        state,
        make,
        rejection=rejection,
        thresholds=thresholds,
        synthetic_rates=rates,
        relaxed=relaxed,
        serves_grammars=plan.args.guided_decoding_backend is not None,
    )
