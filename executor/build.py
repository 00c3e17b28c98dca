"""The composition root: from arguments to an executor. Nobody else constructs collaborators.

Order: weights of target and draft, then the KV pools take what the memory plan leaves them, then the rest.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tllm_spec.attention.choice import choose_backend, create_backend
from tllm_spec.attention.geometry import AttentionGeometry
from tllm_spec.attention.interface import AttentionBackend
from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.attention.row_invariant import RowInvariantAttention
from tllm_spec.config import LlmArgs
from tllm_spec.distributed.mapping import Mapping
from tllm_spec.executor.cuda_graphs import graph_keys
from tllm_spec.executor.device_choice import cpu_threads, pick_device, pick_dtype
from tllm_spec.executor.draft_lens import (
    EAGER_SIZES,
    controller_for,
    draft_lens_of_rounds,
    measure_round_times,
    watch_unverified,
)
from tllm_spec.executor.engine.memory_plan import BYTES_A_GRAPH, ServedModel, plan_num_pages
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.rows import RowBuilder
from tllm_spec.executor.py_executor import ExecutorParts, PyExecutor
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.resources.kv_cache import KVCacheManager
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.executor.resources.seq_slots import SeqSlotManager
from tllm_spec.executor.resources.slot_state import BlockTable, SlotState
from tllm_spec.executor.response import Response
from tllm_spec.executor.round_runner import RoundRunner
from tllm_spec.executor.sampling.row_group import RowGroups
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.sampling.state import SamplingState
from tllm_spec.executor.scheduler import Scheduler, SchedulerLimits
from tllm_spec.executor.speculative.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_backlog import DraftBacklog
from tllm_spec.executor.speculative.draft_layers import DraftLayers
from tllm_spec.executor.speculative.loaded_draft import LoadedDraft, draft_folder, load_head
from tllm_spec.executor.speculative.modes import (
    DraftEngine,
    Speculation,
    Surroundings,
    build_speculation,
    draft_model_of,
)
from tllm_spec.executor.speculative.request_mark import RequestMark
from tllm_spec.kernels.cublas_lt import WORKSPACE_BYTES
from tllm_spec.kernels.few_row_linear import why_unavailable
from tllm_spec.kernels.triton_support import has_kernels
from tllm_spec.models.causal_lm import CausalLM
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.linear_tuning import tune_linears
from tllm_spec.models.registry import LoadFormat, load_model
from tllm_spec.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer
from tllm_spec.zoo.registry import resolve_model

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


def _max_seq_len(args: LlmArgs, config: ModelConfig) -> int:
    if args.max_seq_len is None:
        return config.max_position_embeddings
    if args.max_seq_len > config.max_position_embeddings:
        raise ValueError(
            f"max_seq_len = {args.max_seq_len} exceeds the model's max_position_embeddings, "
            f"{config.max_position_embeddings}"
        )
    return args.max_seq_len


class _Builder:
    """What the steps of one build share."""

    def __init__(self, args: LlmArgs) -> None:
        self.args = args
        self.spec = args.speculative_config
        self.device = pick_device(args.device)
        if args.deterministic and not has_kernels(self.device):
            raise ValueError(
                f"deterministic = true needs CUDA and Triton; on {self.device.type!r} the libraries' sums depend on "
                "the number of rows"
            )
        self.mapping = Mapping()
        self.config = ModelConfig.from_pretrained(resolve_model(args.model))
        self.max_seq_len = _max_seq_len(args, self.config)
        self.max_draft_len = self.spec.max_draft_len if self.spec else 0
        if self.max_draft_len >= self.max_seq_len:
            raise ValueError(
                f"max_draft_len = {self.max_draft_len} must be less than max_seq_len = {self.max_seq_len}"
            )
        self.draft_plan = draft_model_of(self.spec)
        dtype = pick_dtype(args.dtype, self.config.dtype, self.device)
        self.attention = choose_backend(args.attn_backend, self.device, dtype)
        if args.deterministic:
            logger.info("deterministic: attention and products of the target run as row-invariant kernels")
        if self.device.type == "cuda" and (reason := why_unavailable(self.device.index or 0)):
            logger.info("linear layers of few rows run as torch's products, which is slower: %s", reason)
        self.why_no_overlap = args.why_no_overlap
        if self.why_no_overlap:
            logger.info("rounds do not overlap: %s", self.why_no_overlap)
        self.page_size = args.kv_cache_config.tokens_per_block
        # Every generating request has at least one row in every round.
        self.slots = SeqSlotManager(min(args.max_batch_size, args.max_num_tokens))

    @property
    def extra_kv_tokens(self) -> int:
        """Where drafts after the first one stand in the pages: behind the window that was verified."""
        plan = self.draft_plan
        if plan is None or not plan.shares_pages:
            return 0
        return self.max_draft_len - 1 if plan.is_head else self.max_draft_len

    @property
    def may_be_plain(self) -> bool:
        """Whether rounds may have draft length 0 in a batch of some size."""
        controller = controller_for(self.spec, max_num_tokens=self.args.max_num_tokens)
        return any(0 in controller.draft_lens_at(1 + size) for size in range(self.slots.max_batch_size))

    @property
    def overshoot(self) -> int:
        """How far behind its last token a request may write: drafts, and with overlap a whole round too many."""
        rounds = 1 if self.why_no_overlap else 2
        return rounds * (self.max_draft_len + 1) - 1 + self.extra_kv_tokens

    @property
    def max_len(self) -> int:
        return self.max_seq_len + self.overshoot + 1

    def limits(self, kv: KVCacheManager) -> SchedulerLimits:
        scheduling = self.args.scheduler_config
        return SchedulerLimits(
            max_num_tokens=self.args.max_num_tokens,
            overshoot=self.overshoot,
            extra_kv_tokens=kv.extra_kv_tokens,
            chunked_prefill=self.args.enable_chunked_prefill,
            may_preempt=scheduling.capacity_scheduler_policy == "MAX_UTILIZATION",
            by_priority=scheduling.waiting_queue_policy == "priority",
        )

    def controller(
        self, runner: RoundRunner, speculation: Speculation, models: Sequence[ServedModel]
    ) -> AdaptiveController:
        """Of the draft length. Captures the graphs that it may ask for, once the models' products are the fastest for
        them, and times their rounds if it compares them."""
        spec, device, dummy_slot = self.spec, self.device, self.slots.dummy_slot
        max_num_tokens = self.args.max_num_tokens
        controller = controller_for(spec, max_num_tokens=max_num_tokens)
        drafter = speculation.graph_drafter
        sizes = self.graph_sizes(runner, speculation)
        keys = graph_keys(sizes, draft_lens_of_rounds(controller, spec, speculation))
        keys = [key for key in keys if key.num_tokens <= max_num_tokens]
        if not self.args.deterministic:
            # Windows of all requests, a row of each of them, full chunks of contexts, and a prompt of some length.
            row_counts = {rows for key in keys for rows in (key.num_tokens, key.batch_size)}
            tune_linears(models, row_counts | {max_num_tokens, max_num_tokens // 8}, device)
        if sizes:
            assert self.args.cuda_graph_config is not None
            runner.capture_graphs(keys, dummy_slot, device, pads=self.args.cuda_graph_config.enable_padding)
            if drafter is not None and runner.graphs is not None:
                asked = graph_keys(sizes, controller.draft_lens_at)
                drafter.capture_graphs(runner.graphs, drafter.keys(keys, asked))
        if spec is None or spec.adaptive is None:
            return controller
        times = None
        if controller.compares_times:
            in_forward = speculation.round_end is not None and speculation.round_end.in_graph
            draft_cost = (
                0.0 if in_forward or self.draft_plan is None else spec.adaptive.times.assumed_draft_cost
            )
            room = min(self.slots.max_batch_size, max_num_tokens // (1 + self.max_draft_len))
            timed = [size for size in sizes or EAGER_SIZES if size <= max(room, 1)]
            times = measure_round_times(runner, controller, timed, dummy_slot, device, draft_cost, drafter)
        return controller_for(spec, graph_batch_sizes=sizes, round_times=times, max_num_tokens=max_num_tokens)

    def graph_sizes(self, runner: RoundRunner, speculation: Speculation) -> tuple[int, ...]:
        """Batch sizes of CUDA graphs; none where there can be no graphs."""
        graphs = self.args.cuda_graph_config
        if graphs is None or self.device.type != "cuda":
            return ()
        if not runner.engine.backend.supports_graphs:
            logger.warning(
                "no CUDA graphs: attn_backend %s needs lengths on the host", self.args.attn_backend
            )
            return ()
        if self.spec is not None and self.spec.use_rejection_sampling and speculation.round_end is None:
            logger.info("no CUDA graphs: rejection sampling needs what a separate draft model drew from")
            return ()
        # Where a limit changes the draft length, a graph ends: batches below it need no padding beyond.
        schedule = self.spec.draft_len_schedule if self.spec else None
        also = [size - 1 for size in schedule or () if size > 1]
        also.append((self.spec.max_concurrency if self.spec else None) or 0)
        also.append(self.args.max_num_tokens // (1 + self.max_draft_len))  # the largest that fits a round
        return graphs.sizes(self.slots.max_batch_size, also)

    def sampler(self, slots: SlotState, state: SamplingState) -> Sampler:
        rejection, rates = False, None
        if self.spec is not None:
            rejection, rates = self.spec.use_rejection_sampling, self.spec.synthetic_acceptance_rates
        if rates is not None:
            logger.warning(
                "synthetic_acceptance_rates is set: drafts are accepted by chance, the text means nothing"
            )
        return Sampler(slots, state, RowGroups(state), rejection=rejection, synthetic_rates=rates)

    def load(self, folder: Path, load_format: LoadFormat, *, row_invariant: bool = False) -> CausalLM:
        config = ModelConfig.from_pretrained(folder)
        return load_model(
            folder,
            dtype=pick_dtype(self.args.dtype, config.dtype, self.device),
            device=self.device,
            load_format=load_format,
            max_positions=self.max_len,
            mapping=self.mapping,
            row_invariant=row_invariant,
        )

    def reserved_bytes(self, draft: LoadedDraft | None) -> int:
        """Of the workspaces of attention and of products, of CUDA graphs, and of what is kept for every slot: the
        distributions of rejection sampling on the target's pages, and what a draft inside the forward puts off."""
        num_slots, num_graphs = self.slots.dummy_slot + 1, 2 * (1 + self.max_draft_len)
        configs = [self.config, *([draft.net.config] if draft else [])]
        geometries = [config.attention_geometry(self.mapping) for config in configs]
        num_bytes = sum(map(self.attention.workspace_bytes, geometries))
        if self.device.type == "cuda" and not self.args.deterministic:
            num_bytes += WORKSPACE_BYTES
        if draft is not None and not draft.plan.drafts_before_the_forward and self.may_be_plain:
            num_bytes += DraftBacklog.num_bytes(num_slots, draft.spec.captured(1) if draft.spec else None)
            num_graphs += 1
        if self.args.cuda_graph_config is not None:
            sizes = self.args.cuda_graph_config.sizes(self.slots.max_batch_size)
            if draft is not None and draft.plan.drafts_before_the_forward:
                controller = controller_for(self.spec, max_num_tokens=self.args.max_num_tokens)
                num_graphs += 2 * len({0, *controller.draft_lens})
            num_bytes += len(sizes) * num_graphs * BYTES_A_GRAPH
        if draft is not None and draft.plan.shares_pages and self.spec and self.spec.use_rejection_sampling:
            rows = num_slots * self.max_draft_len
            num_bytes += rows * self.config.vocab_size * torch.float32.itemsize
        return num_bytes

    def load_draft(self, target: CausalLM) -> LoadedDraft:
        plan = self.draft_plan
        assert plan is not None
        if not plan.is_head:
            return LoadedDraft(plan, self.load(draft_folder(plan), plan.load_format), None)
        return load_head(plan, target, max_positions=self.max_len, max_num_tokens=self.args.max_num_tokens)

    def pool(self, geometry: AttentionGeometry, dtype: torch.dtype, num_pages: int) -> KVPool:
        return KVPool(
            geometry, num_pages=num_pages, page_size=self.page_size, dtype=dtype, device=self.device
        )

    def backend(self, geometry: AttentionGeometry, pool: KVPool) -> AttentionBackend:
        return create_backend(self.attention, geometry, pool)

    def rows(self) -> RowBuilder:
        table = BlockTable(self.slots, -(-self.max_len // self.page_size), self.device)
        return RowBuilder(table, self.page_size, self.device)

    def engine(
        self,
        model: CausalLM,
        num_pages: int,
        draft: LoadedDraft | None = None,
        *,
        row_invariant: bool = False,
    ) -> tuple[ModelEngine, KVCacheManager, DraftLayers | None]:
        """A model with a cache of `num_pages` pages; `draft` is what shares them."""
        geometry = model.config.attention_geometry(self.mapping)
        pools = [self.pool(geometry, model.dtype, num_pages)]
        rows = self.rows()
        layers, spec = None, None
        if draft is not None and draft.plan.shares_pages:
            own = draft.net.config.attention_geometry(self.mapping)
            pools.append(self.pool(own, draft.net.dtype, num_pages))
            layers = draft.layers(self.backend(own, pools[-1]), rows, self.config.vocab_size)
            spec = draft.spec

        def copy_page(source: int, destination: int) -> None:
            for pool in pools:
                pool.copy_page(source, destination)

        reuse = self.args.kv_cache_config
        cache = PagedCache(
            num_pages,
            self.page_size,
            copy_page=copy_page,
            enable_block_reuse=reuse.enable_block_reuse,
            enable_partial_reuse=reuse.enable_partial_reuse,
            lookahead=int(spec is not None),
        )
        kv = KVCacheManager(
            cache,
            pools[0],
            rows.table,
            extra_kv_tokens=self.extra_kv_tokens if layers else 0,
            waits_for_draft=draft is not None and draft.plan.follows_a_round_later,
        )
        if row_invariant:
            backend: AttentionBackend = RowInvariantAttention(geometry, pools[0])
        else:
            backend = self.backend(geometry, pools[0])
        return ModelEngine(model, backend, rows, self.config.vocab_size, spec), kv, layers


def build_executor(
    args: LlmArgs, tokenizer: Tokenizer | None, respond: Callable[[list[Response]], None]
) -> BuiltExecutor:
    """Loads the models and connects everything. Raises ValueError for what the arguments cannot have."""
    builder = _Builder(args)
    plan = builder.draft_plan
    if plan is not None and tokenizer is not None and not plan.is_head:
        check_same_vocabulary(tokenizer, load_tokenizer(str(draft_folder(plan))))
    # Drafts only propose: they may depend on the batch, the text does not.
    target = builder.load(resolve_model(args.model), args.load_format, row_invariant=args.deterministic)
    draft = builder.load_draft(target) if plan is not None else None
    models = [target, *([draft.net] if draft else [])]
    num_pages = plan_num_pages(args, models, builder.max_len, builder.reserved_bytes(draft))

    engine, kv, layers = builder.engine(target, num_pages, draft, row_invariant=args.deterministic)
    slots = SlotState(builder.slots, builder.max_draft_len, builder.device)
    state = SamplingState(builder.slots, builder.config.vocab_size, builder.device)
    sampler = builder.sampler(slots, state)
    draft_engine = None
    if draft is not None and layers is None:
        assert isinstance(draft.net, CausalLM)
        draft_engine = DraftEngine(*builder.engine(draft.net, num_pages)[:2])
    dummy_slot = builder.slots.dummy_slot
    around = Surroundings(
        slots, sampler, args.max_num_tokens, dummy_slot, draft_engine, layers, builder.may_be_plain
    )
    speculation = build_speculation(builder.spec, around)

    def blame() -> list[LlmRequest] | None:
        culprits = sampler.host_edits.blame()
        return speculation.blame() if culprits is None else culprits

    runner = RoundRunner(engine, sampler, speculation.round_end, speculation.backlog)
    with torch.inference_mode():
        controller = builder.controller(runner, speculation, models)
    watch_unverified(controller, builder.spec, speculation)
    queue, resources = RequestQueue(), [*speculation.resources, kv, builder.slots]
    parts = ExecutorParts(
        queue=queue,
        scheduler=Scheduler(builder.limits(kv), builder.slots, kv, resources),
        kv=kv,
        resources=resources,
        slots=slots,
        runner=runner,
        drafter=speculation.drafter,
        sampler=sampler,
        controller=controller,
        draft_len_for=controller.steps_for,
        blame=blame,
        max_in_flight=0 if builder.why_no_overlap else 1,
        cpu_threads=cpu_threads(target),
        stream_interval=args.stream_interval,
    )
    executor = PyExecutor(parts, respond)
    return BuiltExecutor(
        executor, queue, builder.config, builder.max_seq_len, builder.max_draft_len, controller.new_mark
    )
