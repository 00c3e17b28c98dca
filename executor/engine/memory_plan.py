"""How many KV pages there are: after the weights are loaded, once, for target and draft
together."""

import gc
import logging
import os
from collections.abc import Sequence

import torch

from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.config import LlmArgs
from tllm_spec.distributed.mapping import Mapping
from tllm_spec.models.causal_lm import CausalLM
from tllm_spec.models.eagle3 import Eagle3Head

logger = logging.getLogger(__name__)

# On a CPU there is no memory set aside for serving; a pool of this size is plenty for the models
# that run there.
CPU_POOL_BYTES = 1 << 30
DUMMY_PAGES = 1
# What the driver and the graph's nodes take, measured; activations of all graphs share one pool and
# count once.
BYTES_A_GRAPH = 16 << 20

ServedModel = CausalLM | Eagle3Head


def plan_num_pages(
    args: LlmArgs, models: Sequence[ServedModel], max_len: int, reserved_bytes: int = 0
) -> int:
    """Pages of each model's pool, the dummy page included: as many as `max_tokens` asks for,
    without it as many as `max_batch_size` requests of `max_len` tokens can fill; but on a GPU never
    more than the share of its free memory holds. reserved_bytes: what will be allocated later
    beside the pools and activations.

    Raises ValueError when not even one page is possible, or on a CPU `max_tokens` exceeds the
    machine's memory."""
    page_size, max_tokens = args.kv_cache_config.tokens_per_block, args.kv_cache_config.max_tokens
    page_bytes = sum(
        KVPool.page_bytes(model.config.attention_geometry(Mapping()), page_size, model.dtype)
        for model in models
    )
    device = models[0].device
    if device.type == "cuda":
        gc.collect()  # an LLM that was shut down may be in a cycle
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        free -= _activation_bytes(args, models) + reserved_bytes
        budget = int(free * args.kv_cache_config.free_gpu_memory_fraction)
    else:
        budget = CPU_POOL_BYTES if max_tokens is None else _machine_bytes()
    wanted = (
        args.max_batch_size * -(-max_len // page_size)
        if max_tokens is None
        else -(-max_tokens // page_size)
    )
    num_pages = min(budget // page_bytes, wanted)
    if max_tokens is not None and num_pages < wanted:
        too_much = f"kv_cache_config.max_tokens = {max_tokens} takes {wanted * page_bytes} bytes"
        if device.type == "cpu":
            raise ValueError(f"{too_much}; the machine has {budget}")
        logger.warning(
            "%s; free_gpu_memory_fraction leaves %d tokens", too_much, num_pages * page_size
        )
    if num_pages < 1:
        raise ValueError(
            f"no memory is left for the KV cache: a page of {page_size} tokens takes {page_bytes} "
            "bytes and "
            f"{max(budget, 0)} are free; lower max_num_tokens or max_batch_size, or use a smaller "
            "model"
        )
    return num_pages + DUMMY_PAGES


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _activation_bytes(args: LlmArgs, models: Sequence[ServedModel]) -> int:
    """A bound on what one forward of `max_num_tokens` rows needs beside weights and KV: per row the
    widest layer's inputs and outputs a few times over, and where rows are sampled float32 logits
    with their sorted copy and its 64-bit weights."""
    rows = args.max_num_tokens
    drafts = args.speculative_config.max_draft_len if args.speculative_config else 0
    sampled_rows = min(rows, args.max_batch_size * (1 + drafts))
    config = models[0].config
    hidden = rows * (8 * config.hidden_size + 4 * config.intermediate_size) * 4
    return int(hidden + 10 * sampled_rows * config.vocab_size * 4)
