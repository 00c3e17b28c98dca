"""What the arguments and the target's configuration decide before anything is loaded. The only part
of the executor that it makes is the slots."""

import logging
from collections.abc import Callable, Iterable
from copy import copy
from math import gcd

import torch

from tllm_spec.attention.choice import choose_backend, kind_of_pool
from tllm_spec.attention.geometry import Geometry
from tllm_spec.attention.interface import HeadsBackend
from tllm_spec.attention.recurrent import RecurrentGeometry
from tllm_spec.config.draft_shape import DraftShapes, chain_of, draft_len_table
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import DecodingBaseConfig
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.executor.device.device_choice import pick_device, pick_dtype
from tllm_spec.executor.device.sleeping_memory import SleepingMemory
from tllm_spec.executor.graphs.context_graphs import context_rows
from tllm_spec.executor.graphs.slot_graphs import GraphKey, graph_keys
from tllm_spec.executor.resources.interface import SeqSlotManager, rows_of
from tllm_spec.executor.resources.kv_cache import ROUNDS_AHEAD, SpanRoom
from tllm_spec.executor.scheduler import SchedulerLimits
from tllm_spec.executor.speculative.draft_length.adaptive import (
    AdaptiveController,
    controller_for,
    rows_with_contexts,
)
from tllm_spec.executor.speculative.draft_length.round_times import RoundTimes
from tllm_spec.executor.speculative.drafting.suffix_match import read_corpus
from tllm_spec.executor.speculative.modes import draft_plan_of
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.nvrtc import why_unavailable
from tllm_spec.kernels.states.delta_blocks import BLOCK_ROWS
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.registry import model_config
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.zoo.registry import resolve_model

logger = logging.getLogger(__name__)

STATE_DTYPES = {
    "auto": torch.float32,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class BuildPlan:
    """What the steps of one build share. tokenizer: reads a corpus of texts, if there is one.
    Raises ValueError for options that cannot be honoured."""

    def __init__(
        self, args: LlmArgs, communicator: Communicator = SINGLE, tokenizer: Tokenizer | None = None
    ) -> None:
        self.args = args
        self.begin: Callable[[str], None] = lambda step: None  # called with the name of each step
        self.staged_for: torch.device | None = None  # of weights, as of `HeadSource`
        self.communicator, self.mapping = communicator, communicator.mapping
        self.spec = args.speculative_config
        self.device = pick_device(args.device, self.mapping.rank, args.gpus_per_node)
        self.config = model_config(resolve_model(args.model))
        if self.config.text_part.images and not args.language_model_only:
            raise ValueError(
                f"{args.model} is a {self.config.architecture}, which also sees images, and only "
                "text is served; set language_model_only: true to serve its text part"
            )
        if args.deterministic and not has_kernels(self.device):
            raise ValueError(
                f"deterministic = true needs CUDA and Triton; on {self.device.type!r} the "
                "libraries' results depend on the number of rows"
            )
        self.max_seq_len = _max_seq_len(args, self.config)
        self.max_draft_len = self.spec.max_draft_len if self.spec else 0
        if self.max_draft_len >= self.max_seq_len:
            raise ValueError(
                f"max_draft_len = {self.max_draft_len} must be less than max_seq_len = "
                f"{self.max_seq_len}"
            )
        self.shapes = self.spec.shapes if self.spec else DraftShapes.chains(0)
        self.draft_plan = draft_plan_of(self.spec)
        # Every generating request has at least one row in every round.
        self.slots = SeqSlotManager(min(args.max_batch_size, args.max_num_tokens))
        search = self.spec.text_search(self.slots.max_batch_size) if self.spec else None
        self._looks_in_texts = search is not None
        # Rounds launched before the oldest is read.
        self.max_in_flight = int(not args.disable_overlap_scheduler)
        # Whether only the device knows how many drafts a round verifies.
        self.counts_drafts = self.shapes.are_ragged
        # Rejected rounds after which a request pauses; None where drafts are part of the round.
        self.pause_patience = None
        if self.spec is not None:
            self.counts_drafts |= self.spec.counts_on_device
            self.pause_patience = self.spec.max_rejected_rounds if self.spec.may_pause else None
        # Of weights and KV pools, where the engine can sleep.
        can_sleep = args.enable_sleep_mode or self.device.type == "cpu"
        self.memory = SleepingMemory(self.device) if can_sleep else None
        self.dtype = pick_dtype(args.dtype, self.config.dtype, self.device)
        self.config = self.config.within(self.max_len)
        self.attention = choose_backend(
            args.attn_backend, self.device, self.dtype, self.config.chunk_size
        )
        self.why_no_overlap = args.why_no_overlap
        self.page_size = args.kv_cache_config.tokens_per_block
        self.state_dtype = _state_dtype(args, self.config)
        corpus = search.corpus if search is not None else None
        self.corpus = rows_of(read_corpus(corpus, tokenizer, self.config.vocab_size))
        self._log()

    def _log(self) -> None:
        """Consequences of the options that a user may not expect."""
        if self.args.deterministic:
            logger.info(
                "deterministic: attention and GEMMs of the target run as batch-invariant kernels"
            )
        if self.device.type == "cuda" and (reason := why_unavailable(self.device.index or 0)):
            logger.info(
                "linear layers of few rows run as torch's GEMMs, which is slower: %s", reason
            )
        if self.args.attn_backend == "FLASHINFER" and self.config.mla is not None:
            logger.info("layers with latent attention (MLA) run TRITON, as with attn_backend: auto")
        if self.why_no_overlap:
            logger.info("rounds do not overlap: %s", self.why_no_overlap)

    def attention_of(self, geometry: Geometry) -> type[HeadsBackend]:
        """The backend of one pool."""
        chooses = self.args.attn_backend == "auto" and not self.args.deterministic
        return kind_of_pool(self.attention, geometry, chooses=chooses)

    def staged(self, folder: str | None = None) -> "BuildPlan":
        """The same, whose weights are loaded to host memory. folder: of the checkpoint, in any
        float type; None: the same."""
        other = copy(self)
        other.staged_for = self.device
        if folder is not None:
            own = {"model": folder, "load_format": "auto"}
            own["dtype"] = str(self.dtype).removeprefix("torch.")
            other.args = self.args.model_copy(update=own)
        return other

    @property
    def recurrent(self) -> RecurrentGeometry | None:
        """This rank's share of the target's layers with a recurrent state, if it has any."""
        if (delta := self.config.delta) is None:
            return None
        window, reuse = self.shapes.longest.window, self.args.kv_cache_config
        share = max(self.args.max_num_tokens // 4, 1)
        # A prompt waits for a whole block's room in a forward. Its size, and so a sum's order, does
        # not depend on the draft length, but on these options. With `deterministic` nothing may.
        block = min(BLOCK_ROWS, 1 << share.bit_length() - 1)
        if reuse.enable_block_reuse:
            block = gcd(block, reuse.state_snapshot_tokens)
        if self.args.deterministic:
            block = 0
        own = delta.shape(self.mapping), window, block, self.state_dtype
        return RecurrentGeometry(len(delta.layers), *own)

    @property
    def num_snapshots(self) -> int:
        """Copies of recurrent states for prefixes: as many as slots."""
        reuses = self.args.kv_cache_config.enable_block_reuse
        return self.slots.max_batch_size if reuses and self.recurrent is not None else 0

    @property
    def extra_kv_tokens(self) -> int:
        """KV entries of a request after those of its tokens that a draft network takes to draft
        (see docs/drafting.md): on the target's pages, of drafts after the first one (of beams,
        those of every step), or on pages of its own, where accepted tokens may be others than it
        has drafted."""
        plan, longest = self.draft_plan, self.shapes.longest
        if plan is None or plan.is_assistant:
            return 0
        if plan.shares_pages:
            return longest.num_read + plan.rows_before
        if plan.drafts_at_once:
            return 2 * longest.depth - 1  # the longest run, and mask rows
        if self.shapes.has_trees or self._looks_in_texts:
            return max(longest.num_read, longest.path) + 1
        return 0

    def controller(
        self, graph_batch_sizes: Iterable[int] | None = None, round_times: RoundTimes | None = None
    ) -> AdaptiveController:
        """A new controller of the draft length; round_times: None before they are measured."""
        return controller_for(
            self.spec,
            graph_batch_sizes=graph_batch_sizes,
            round_times=round_times,
            max_num_tokens=self.args.max_num_tokens,
            max_batch_size=self.slots.max_batch_size,
        )

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batch sizes that CUDA graphs of rounds are wanted for."""
        graphs, spec = self.args.cuda_graph_config, self.spec
        if graphs is None or not self.communicator.captures:
            return ()
        # The largest batch before a limit changes the draft length: no batch is padded beyond.
        options = (spec.draft_len_schedule, spec.max_concurrency) if spec else (None, None)
        also = [size - 1 for size in draft_len_table(None, *options) if size > 1]
        # The largest batches that fit, with contexts and alone.
        max_num_tokens = self.args.max_num_tokens
        rows = rows_with_contexts(max_num_tokens), max_num_tokens
        also += [number // self.shapes.longest.window for number in rows]
        return graphs.sizes(self.slots.max_batch_size, also)

    def round_keys(self, sizes: Iterable[int]) -> list[GraphKey]:
        """Graphs of these batch sizes for every round that there can be."""
        tiers = tiers_of_rounds(self.controller(), self.spec)
        keys = graph_keys(sizes, tiers, self.shapes.of)
        if self.shapes.narrows:
            keys += graph_keys(sizes, lambda size: tiers(size) - {0}, chain_of)
        return [key for key in keys if key.num_tokens <= self.args.max_num_tokens]

    @property
    def context_rows(self) -> tuple[int, ...]:
        """Numbers of context rows that CUDA graphs are wanted for, if attention can be captured."""
        args = self.args
        wanted = args.cuda_graph_config is not None and args.prefill_cuda_graph_backend == "auto"
        if not wanted or self.device.type != "cuda" or not self.communicator.captures:
            return ()
        return context_rows(args.max_num_tokens, self.max_len)

    @property
    def overshoot(self) -> int:
        """How many positions after its last token a request may take pages for: drafts, and one
        more whole round where a round is scheduled before the previous one is read."""
        longest = self.shapes.longest
        in_flight = longest.path if self.max_in_flight else 0
        shares_pages = self.draft_plan is not None and self.draft_plan.shares_pages
        extra = self.extra_kv_tokens + (longest.depth if shares_pages else 0)
        return in_flight + max(longest.num_nodes, extra)

    @property
    def span_room(self) -> SpanRoom:
        """While a round is in flight, another one is scheduled, and with it a request's next
        chunk."""
        ahead = self.overshoot + (ROUNDS_AHEAD + 1) * self.shapes.longest.path + 1
        return SpanRoom(self.page_size, ahead, 2 * self.args.max_num_tokens)

    @property
    def max_len(self) -> int:
        return self.max_seq_len + self.overshoot + 1

    @property
    def limits(self) -> SchedulerLimits:
        scheduling = self.args.scheduler_config
        return SchedulerLimits(
            max_num_tokens=self.args.max_num_tokens,
            overshoot=self.overshoot,
            chunked_prefill=self.args.enable_chunked_prefill,
            may_preempt=scheduling.capacity_scheduler_policy == "MAX_UTILIZATION",
            by_priority=scheduling.waiting_queue_policy == "priority",
            fair_preemption=scheduling.fair_preemption,
        )


def tiers_of_rounds(
    controller: AdaptiveController, spec: DecodingBaseConfig | None
) -> Callable[[int], set[int]]:
    """Tiers that rounds of a batch size can have: 0 where no request wants drafts, and any shorter
    length where a drafter on the host may propose fewer than it was asked for."""
    if spec is None or spec.why_no_overlap is None:
        return lambda batch_size: {0} | controller.tiers_at(batch_size)
    return lambda batch_size: set(range(max(controller.tiers_at(batch_size)) + 1))


def _state_dtype(args: LlmArgs, config: ModelConfig) -> torch.dtype:
    """The type of recurrent states. Raises ValueError for options of states that the model does not
    have, or whose copies do not end with pages."""
    cache = args.kv_cache_config
    every, page_size = cache.state_snapshot_tokens, cache.tokens_per_block
    if config.delta is not None and every % page_size:
        raise ValueError(
            f"kv_cache_config.state_snapshot_tokens = {every} must be a multiple of "
            f"tokens_per_block, which is {page_size}"
        )
    dtype = STATE_DTYPES[cache.mamba_ssm_cache_dtype]
    if config.delta is None and dtype != torch.float32:
        raise ValueError(
            f"kv_cache_config.mamba_ssm_cache_dtype = {cache.mamba_ssm_cache_dtype!r} is for "
            f"models with recurrent states, and {args.model} is a {config.architecture}, which "
            "has none; leave it at 'auto'"
        )
    return dtype


def _max_seq_len(args: LlmArgs, config: ModelConfig) -> int:
    if args.max_seq_len is None:
        return config.max_positions
    if args.max_seq_len > config.max_positions:
        raise ValueError(
            f"max_seq_len = {args.max_seq_len} exceeds the model's {config.max_positions} "
            "positions: max_position_embeddings of its config.json, or with rope_type 'yarn' or "
            "'linear' the factor times the original length"
        )
    return args.max_seq_len
