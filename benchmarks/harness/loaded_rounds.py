"""Rounds of models without weights, whose floor is counted from what is loaded: the parameters that
a round reads, and the cached tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from benchmarks.harness.card import card
from benchmarks.harness.dummy_models import (
    GEMMA4_26B,
    GEMMA4_E4B,
    GLM_5,
    QWEN3_5_35B,
    QWEN3_NEXT,
    TINY_GEMMA4,
    TINY_GLM_5,
    TINY_QWEN3_5,
    TINY_QWEN3_NEXT,
    assistant_of,
    dummy_engine,
)
from benchmarks.harness.engine import Rounds, release
from benchmarks.harness.expert_rounds import MTP_RATES, experts_hit
from benchmarks.harness.models import Config
from benchmarks.harness.report import Options, Row
from tllm_spec.attention.geometry import LatentGeometry
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.executor.speculative.drafting.draft_net import HeadNet
from tllm_spec.executor.speculative.drafting.network_drafter import NetworkDrafter
from tllm_spec.models.layers import Embedding
from tllm_spec.models.moe import Experts

Goals = Mapping[int, float]  # times of the floor, by batch size
GOALS: Goals = {1: 1.5, 8: 1.5, 64: 1.3}


@dataclass(frozen=True)
class Shape:
    """has_assistant: whether drafts are of Gemma 4's assistant; otherwise of the model's MTP layer.
    goals: by the draft length, where they are not GOALS. sizes: of batches; prompts: their
    lengths."""

    full: Config
    tiny: Config
    has_assistant: bool = False
    goals: Mapping[int, Goals] = field(default_factory=dict)
    sizes: Sequence[int] = (1, 8, 64)
    prompts: Sequence[int] = (1024,)


NEXT_GOALS: dict[int, Goals] = {0: {1: 2.0, 8: 1.5, 64: 1.4}, 3: {1: 1.6, 8: 1.6, 64: 1.6}}
NEXT = Shape(QWEN3_NEXT, TINY_QWEN3_NEXT, goals=NEXT_GOALS)
QWEN3_5 = Shape(QWEN3_5_35B, TINY_QWEN3_5)
E4B = Shape(GEMMA4_E4B, TINY_GEMMA4, has_assistant=True)
A4B = Shape(GEMMA4_26B, TINY_GEMMA4, has_assistant=True)
# Rows of the longer prompts choose their keys.
SPARSE = Shape(GLM_5, TINY_GLM_5, sizes=(1, 8), prompts=(1024, 32768))


def rounds_of(shape: Shape, draft_len: int) -> Callable[[Options], Iterator[Row]]:
    """The rows of one draft length."""

    goals = shape.goals.get(draft_len, GOALS)

    def run(options: Options) -> Iterator[Row]:
        is_full = options.device == "cuda"
        config = shape.full if is_full else shape.tiny
        sizes, prompts, num_rounds = ((1, 2), (16,), 3)
        if is_full:
            sizes, prompts, num_rounds = shape.sizes, shape.prompts, 40
        engine = dummy_engine(
            config,
            batch_sizes=sizes,
            prompt_len=max(prompts),
            device=options.device,
            attn_backend=options.text("attn_backend", "auto"),
            enable_chunked_prefill=len(prompts) > 1,
            **_drafts(shape, config, draft_len),
        )
        for prompt_len, batch_size in product(prompts, sizes):
            engine.start(batch_size, prompt_len)
            timings = [engine.timed(num_rounds) for _ in range(1 if options.quick else 3)]
            timed = sorted(timings, key=lambda each: each.round_ms)[len(timings) // 2]
            hit = experts_hit(engine, batch_size * (1 + draft_len))
            num_bytes = round_bytes(engine, hit, batch_size, timed.context, draft_len)
            floor = num_bytes / card(options.device).bytes_per_s * 1e3
            what, goal = f"batch {batch_size}, {draft_len} drafts", goals.get(batch_size)
            what += f", prompts of {prompt_len}" if len(prompts) > 1 else ""
            yield {"what": what, "value": timed.round_ms, "floor": floor, "goal": goal, "hit": hit}
        engine.stop()
        for prompt_len, number in () if draft_len else product(prompts, (1, sizes[-1])):
            ms = [engine.prompts_ms(number, prompt_len) for _ in range(3)][-1]
            yield {"what": f"{number} prompts of {prompt_len}", "value": ms, "floor": None}
        del engine
        release()

    return run


def _drafts(shape: Shape, config: Config, draft_len: int) -> dict[str, Any]:
    if not draft_len:
        return {}
    mtp = {"decoding_type": "MTP", "max_draft_len": draft_len}
    mtp |= {"synthetic_acceptance_rates": MTP_RATES[:draft_len]}
    return {"speculation": mtp, "head": assistant_of(config) if shape.has_assistant else None}


def round_bytes(
    engine: Rounds, hit: float, batch_size: int, context: float, draft_len: int
) -> float:
    """Each weight of the target once, and of the drafter once a draft; of the experts those that
    are hit, of embeddings nothing. The target's keys and values once, of latents those that an
    indexer chooses, and its states twice."""
    runner = engine.executor.parts.runner
    num_bytes = _weights(runner.engine.model, hit)
    if draft_len and isinstance(runner.drafter, NetworkDrafter):
        assert isinstance(runner.drafter.net, HeadNet)
        num_bytes += draft_len * _weights(runner.drafter.net.head, hit)
    config, groups = runner.engine.model.config, runner.engine.attention.groups
    for group, layers in zip(groups, config.layer_groups(SINGLE_RANK), strict=True):
        pool, geometry = group.backend.pool, layers.geometry
        seen = context if geometry.span is None else min(context, geometry.span.size)
        if isinstance(geometry, LatentGeometry) and geometry.topk is not None:
            seen = min(context, geometry.topk)
        num_bytes += batch_size * seen * pool.data.nbytes / (pool.num_pages * pool.page_size)
    if (delta := config.delta) is not None:
        heads = delta.heads
        state = 4 * heads.num_value_heads * heads.key_dim * heads.value_dim
        num_bytes += 2 * batch_size * len(delta.layers) * state
    return num_bytes


def _weights(model: torch.nn.Module, hit: float) -> float:
    read: dict[int, float] = {}
    for module in model.modules():
        share = hit / module.shape[0] if isinstance(module, Experts) else 1.0
        share *= not isinstance(module, Embedding)
        for parameter in module.parameters(recurse=False):
            place = parameter.data_ptr()
            read[place] = max(read.get(place, 0.0), share * parameter.nbytes)
    return sum(read.values())
