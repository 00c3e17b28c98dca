"""How many KV pages there are, for target and draft together.

Planned once, after the weights are loaded: the pools get what the rounds do not need."""

import gc
import logging
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tllm_spec.attention.geometry import Geometry, IndexGeometry, KVFormat, KVPool, LayerGroup
from tllm_spec.config.draft_shape import NO_DRAFTS
from tllm_spec.config.engine_config import KvCacheConfig
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.draft_network.network import ExternalDraft
from tllm_spec.executor.resources.kv_cache import SpanRoom
from tllm_spec.executor.sampling.grammar_masks import mask_words
from tllm_spec.executor.sampling.logits import BYTES_PER_LOGIT, SAMPLING_BYTES
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.kernels.gemm.scaled_linear import MAX_BYTES as MAX_SLICE_BYTES
from tllm_spec.models.draft_head import DraftHead
from tllm_spec.models.formats.stacked_weight import WIDE_BYTES
from tllm_spec.models.llama import CausalLM

# How much memory a device has before anything is loaded.


GIB = 1 << 30
# Limit and use of a container's memory, of both versions of Linux's control groups.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_bytes(device: torch.device) -> int:
    """What can still be allocated. On a host the pages of files count as free, and a limit of the
    process or of its container counts as the memory's end."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return max(min(_host_limits()), 0)


def machine_bytes() -> int:
    """The host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _host_limits() -> Iterator[int]:
    yield _available()
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft != resource.RLIM_INFINITY:
        yield soft - _mapped()
    for limit, used in _GROUPS:
        most, now = _number(Path(limit)), _number(Path(used))
        if most is not None and now is not None and most < machine_bytes():
            yield most - now + _file_pages(Path(limit).parent / "memory.stat")


def _available() -> int:
    """Linux's estimate; elsewhere all of the machine's memory."""
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return machine_bytes()


def _mapped() -> int:
    """The process's address space in use."""
    first = next(iter(_lines(Path("/proc/self/statm"))), "0")
    return int(first.split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _file_pages(stat: Path) -> int:
    """Bytes of pages of files, which a container gives back when it needs memory."""
    fields = dict(line.split()[:2] for line in _lines(stat))
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))


def _number(file: Path) -> int | None:
    """None: there is no such file, or it has no number, as where there is no limit."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except OSError:
        return []


# Which KV pools a model and its drafter need, and how many pages each gets of the memory.


PoolPlan = tuple[Geometry, KVFormat]  # the pool of one layer group


@dataclass(frozen=True)
class GroupPlan:
    """Pools whose pages have the same numbers. span: the keys that a query sees, where requests let
    go of the pages before them; None: they keep all."""

    pools: tuple[PoolPlan, ...]
    span: KeySpan | None

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page in all pools."""
        return sum(KVPool.page_bytes(own, page_size, each) for own, each in self.pools)


def own_groups(layers: Sequence[LayerGroup], kv_format: KVFormat) -> list[GroupPlan]:
    """The groups of a target: one for each layer group, but keys of an indexer are in the pages of
    the group before. kv_format: of all layers of the model."""
    groups: list[GroupPlan] = []
    for own in layers:
        if isinstance(own.geometry, IndexGeometry):
            keys = own.geometry, replace(kv_format, scales=None)
            groups[-1] = replace(groups[-1], pools=(*groups[-1].pools, keys))
        else:
            pool = own.geometry, kv_format.of_layers(own.layers)
            groups.append(GroupPlan((pool,), own.geometry.span))
    return groups


def draft_group(layers: Sequence[LayerGroup], kv_format: KVFormat) -> GroupPlan:
    """The group of a draft network: all layers have the same pages and keep them, since the network
    may have read much less than the target."""
    groups = own_groups(layers, kv_format)
    return GroupPlan(tuple(pool for own in groups for pool in own.pools), None)


def with_draft(groups: list[GroupPlan], draft: GroupPlan) -> list[GroupPlan]:
    """The target's groups with a draft network on the same pages. Its pools are the last ones of
    the first group that keeps all pages, which is another one at the end if there was none."""
    for number, own in enumerate(groups):
        if own.span is None:
            joined = GroupPlan(own.pools + draft.pools, None)
            return [*groups[:number], joined, *groups[number + 1 :]]
    return [*groups, draft]


def divide(
    budget: int,
    page_bytes: Sequence[int],
    needed: Sequence[int],
    in_context: Sequence[int],
    wanted: int,
) -> list[int]:
    """Pages of each group from `budget` bytes, at most `wanted`: all if they fit, otherwise for as
    many requests of the greatest length as possible. One needs `needed` pages, and, all prompts
    together, `in_context` more."""
    if wanted * sum(page_bytes) <= budget:
        return [wanted] * len(page_bytes)

    def total(pages: Sequence[int]) -> int:
        return sum(size * number for size, number in zip(page_bytes, pages, strict=True))

    rest = budget - total(in_context)
    if rest < total(needed):  # not even one: the pools have the same share of what it needs
        needed = [sum(own) for own in zip(needed, in_context, strict=True)]
        in_context, rest = [0] * len(needed), budget
    shares = [rest * pages // total(needed) for pages in needed]
    return [min(wanted, sum(own)) for own in zip(shares, in_context, strict=True)]


logger = logging.getLogger(__name__)

# A CPU has no memory set aside for serving; this is plenty for the models that run there.
CPU_POOL_BYTES = 1 << 30
DUMMY_PAGES = 1
# The driver and a graph's nodes take this, measured. All graphs' activations share one pool.
BYTES_A_GRAPH = 16 << 20

TorchModel = CausalLM | DraftHead
ServedModel = TorchModel | ExternalDraft


def plan_num_pages(
    args: LlmArgs,
    groups: Sequence[GroupPlan],
    models: Sequence[ServedModel],
    max_len: int,
    room: SpanRoom,
    communicator: Communicator = SINGLE,
    reserved_bytes: int = 0,
) -> list[int]:
    """Pages of each group, of target and draft, the dummy page included.

    As many as `max_tokens` asks for; without it, as many as `max_batch_size` requests of `max_len`
    tokens can fill. On a GPU never more than the configured share of memory, nor than what is left
    after `round_bytes` and `reserved_bytes` (whatever else will be allocated later). Ranks that
    share a device have equal parts of its memory. All ranks call this together.

    Raises ValueError when not even one page is possible, or on a CPU when `max_tokens` exceeds the
    machine's memory."""
    page_size, max_tokens = args.kv_cache_config.tokens_per_block, args.kv_cache_config.max_tokens
    page_bytes = [group.page_bytes(page_size) for group in groups]
    device, num_sharing = models[0].device, communicator.ranks_on_device
    if device.type == "cuda":
        free, total = (each // num_sharing for each in _free_and_total(device, communicator))
        later = round_bytes(args, models) + reserved_bytes
        own = torch.cuda.memory_reserved(device)
        budget = _budget(args.kv_cache_config, free, total, own, later)
    elif max_tokens is None:
        budget = min(CPU_POOL_BYTES, free_bytes(device) // num_sharing)
    else:
        budget = machine_bytes() // num_sharing
    longest = -(-max_len // page_size)
    wanted = args.max_batch_size * longest if max_tokens is None else -(-max_tokens // page_size)
    needed, at_first = (
        [
            min(longest, room.most_pages(own.span, generates=generates)) if own.span else longest
            for own in groups
        ]
        for generates in (True, False)
    )
    in_context = [most - least for most, least in zip(at_first, needed, strict=True)]
    num_pages = divide(budget, page_bytes, needed, in_context, wanted)
    if max_tokens is not None and min(num_pages) < wanted:
        size = wanted * sum(page_bytes) / GIB
        too_much = f"kv_cache_config.max_tokens = {max_tokens} takes {size:.1f} GiB"
        if device.type == "cpu":
            each = f" for each of {num_sharing} ranks" if num_sharing > 1 else ""
            raise ValueError(f"{too_much}; the machine has {budget / GIB:.1f} GiB{each}")
        logger.warning(
            "%s; the share of memory leaves %d tokens", too_much, min(num_pages) * page_size
        )
    if min(num_pages) < 1:
        raise ValueError(
            f"no memory is left for the KV cache: a page of {page_size} tokens takes "
            f"{sum(page_bytes) / GIB:.3f} GiB and {max(budget, 0) / GIB:.3f} GiB are free; lower "
            "max_num_tokens or max_batch_size, raise the share of memory, or use a smaller model"
        )
    return [number + DUMMY_PAGES for number in num_pages]


def _budget(cache: KvCacheConfig, free: int, total: int, own: int, later: int) -> int:
    """Bytes of pages. own: what this process has of the device's `total`, which are the weights.
    later: what else it will allocate."""
    room, rest = free - later, total - own
    if (share := cache.gpu_memory_utilization) is not None:
        return min(room, rest - later - int((1 - share) * total))
    if (share := cache.mem_fraction_static) is not None:
        return min(room, rest - int((1 - share) * total))
    return int(room * cache.free_gpu_memory_fraction)


def _free_and_total(device: torch.device, communicator: Communicator) -> tuple[int, int]:
    """Bytes of the device once all ranks have loaded weights and freed what they can."""
    gc.collect()  # an LLM that was shut down may be in a cycle
    torch.cuda.empty_cache()
    communicator.gather(None)  # waits for the other ranks
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def round_bytes(args: LlmArgs, models: Sequence[ServedModel]) -> int:
    """A bound on what one round allocates on a GPU next to weights and KV.

    * Activations of `max_num_tokens` rows in the model's dtype. An attention block holds six
      hidden states (residual, normed, query, key, value, attended), an MLP three and three
      intermediate ones (gate, up, product), a layer of experts an intermediate one and an output
      for each expert of a token. Target and draft run one after the other.
    * Logits of every sampled row in the model's dtype, the target's and the draft's, each once
      more where only some rows are sampled. They become float32 in the kernels' registers.
    * What else sampling allocates, which is cut into parts of `SAMPLING_BYTES`
      (`sampling/working_memory.py`), and the token counts of penalised requests (5 bytes a token
      of the vocabulary, twice while they grow).
    * A slice of a quantised weight in 16 bits, and its sums (`kernels/gemm/scaled_linear.py`),
      once more in the graphs' pool.
    * Exact 4-bit weights of a layer's experts in 16 bits, of long prompts
      (`models/formats/stacked_weight.py`).
    * Bitmasks of the sampled rows, where requests may have grammars.
    * With rejection sampling, the distributions that drafts are drawn from, and those of all
      drafts in float32, gathered and then spread over the target's vocabulary."""
    spec, num_requests = args.speculative_config, min(args.max_batch_size, args.max_num_tokens)
    longest = spec.shapes.longest if spec else NO_DRAFTS
    num_rows = min(args.max_num_tokens, num_requests * longest.window)
    target, vocab_size = models[0], models[0].config.vocab_size
    num_bytes = max(_activation_bytes(args.max_num_tokens, model) for model in models)
    num_bytes += 2 * num_rows * vocab_size * target.dtype.itemsize
    num_bytes += min(SAMPLING_BYTES, args.max_num_tokens * vocab_size * BYTES_PER_LOGIT)
    num_bytes += 2 * 5 * num_requests * vocab_size
    if any(not model.config.quantisation.is_plain for model in models):
        num_bytes += 2 * 2 * MAX_SLICE_BYTES
    if any(_widens_experts(model) for model in models):
        num_bytes += WIDE_BYTES
    if args.guided_decoding_backend is not None:
        num_bytes += mask_words(num_rows, vocab_size) * torch.int32.itemsize
    for draft in models[1:]:
        num_logits = num_requests * longest.num_beams * draft.num_logits
        num_bytes += 2 * num_logits * draft.dtype.itemsize
        if spec is not None and spec.use_rejection_sampling:
            num_bytes += num_logits * BYTES_PER_LOGIT
            num_bytes += 2 * num_requests * longest.depth * vocab_size * torch.float32.itemsize
    return num_bytes


def _widens_experts(model: ServedModel) -> bool:
    groups = model.config.quantisation.four_bit
    return groups is not None and groups.has_exponents and model.config.moe is not None


def _activation_bytes(num_rows: int, model: ServedModel) -> int:
    config, index = model.config, model.config.indexer
    elements = 8 * config.hidden_size + config.mlp_row_elements
    if index is None:
        return num_rows * elements * model.dtype.itemsize
    elements += 2 * index.num_heads * index.head_dim  # and the chosen keys
    return num_rows * (elements * model.dtype.itemsize + index.topk * torch.int32.itemsize)
