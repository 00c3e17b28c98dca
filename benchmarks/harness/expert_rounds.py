"""Rounds, prefill and start-up of models without weights, with the experts that are really hit."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from benchmarks.harness import models
from benchmarks.harness.card import card
from benchmarks.harness.dummy_models import (
    GEMMA3_12B,
    GPT_OSS_20B,
    QWEN3_30B,
    TINY_GEMMA3,
    TINY_GPT_OSS,
    TINY_QWEN3,
    TINY_V3,
    V3_STYLE,
    dummy_engine,
)
from benchmarks.harness.engine import Rounds, release
from benchmarks.harness.models import WEIGHT_BYTES, Config
from benchmarks.harness.report import Options, Row, number, table
from tllm_spec.executor.speculative.drafting.draft_net import HeadNet
from tllm_spec.executor.speculative.drafting.network_drafter import NetworkDrafter
from tllm_spec.kernels.experts.permute import ExpertRows
from tllm_spec.models.moe import Experts, Router

SAME, SPREAD = "same experts", "spread"
MTP_RATES = (0.8, 0.6, 0.45)
HIT_ROUNDS = 4
MXFP4_BYTES = 0.5 + 1 / 32  # of a weight, with its share of a scale


@dataclass(frozen=True)
class Rival:
    """Milliseconds, and seconds of start-up: ours at most, and vLLM 0.26.0's on the same kind of
    machine. By batch size, then `prefill` and `start-up`."""

    goals: Mapping[str, float]
    peer: Mapping[str, float]


def _rival(goals: Sequence[float], peer: Sequence[float]) -> Rival:
    names = ("batch 1", "batch 8", "batch 64", "prefill", "start-up")
    return Rival(dict(zip(names, goals, strict=False)), dict(zip(names, peer, strict=False)))


QWEN3_RIVAL = _rival((3.4, 7.5, 16.5, 850.0, 25.0), (4.15, 9.24, 19.3, 895.0))
GEMMA3_RIVAL = _rival((6.7, 7.4, 13.0, 2150.0), (8.32, 9.05, 15.6, 2309.0, 76.0))
GPT_OSS_RIVAL = _rival((2.3, 2.9, 4.7, 720.0), (3.00, 3.41, 5.14, 750.0, 83.0))
V3_RIVALS = {
    0: _rival((2.8, 3.2, 4.7, 740.0, 25.0), (3.26, 3.66, 5.20, 787.0)),
    1: _rival((3.6, 4.0, 5.8), (4.73, 4.48, 6.43)),
    3: _rival((4.6, 5.8, 10.0), (6.03, 7.28, 11.9)),
}


def qwen3(options: Options) -> Iterator[Row]:
    is_full = options.device == "cuda"
    config = QWEN3_30B if is_full else TINY_QWEN3
    for row in measured(config, options, 0, (None,), qwen3_bytes):
        if row["what"] == "prefill" and is_full:
            active = dense(config, config["num_experts_per_tok"])
            row["floor"] = models.prefill_flops(64, 1024, active) / models.MATMUL_FLOPS * 1e3
        yield row | (limits(QWEN3_RIVAL, row) if is_full else {})


def gpt_oss(options: Options) -> Iterator[Row]:
    is_full = options.device == "cuda"
    config = GPT_OSS_20B if is_full else TINY_GPT_OSS
    for row in measured(config, options, 0, (None,), gpt_oss_bytes):
        if row["what"] == "prefill" and is_full:
            taken = config["num_experts_per_tok"] * config["intermediate_size"]
            active = {**config, "intermediate_size": taken}
            row["floor"] = models.prefill_flops(64, 1024, active) / models.MATMUL_FLOPS * 1e3
        yield multiples(GPT_OSS_RIVAL, row) if is_full else row


def gemma3(options: Options) -> Iterator[Row]:
    is_full = options.device == "cuda"
    config = GEMMA3_12B if is_full else TINY_GEMMA3
    for row in measured(config, options, 0, (None,), dense_bytes):
        if row["what"] == "prefill" and is_full:
            row["floor"] = models.prefill_flops(64, 1024, config) / models.MATMUL_FLOPS * 1e3
        yield multiples(GEMMA3_RIVAL, row) if is_full else row


def v3(draft_len: int) -> Callable[[Options], Iterator[Row]]:
    """The rows of one draft length of the MTP module."""

    def run(options: Options) -> Iterator[Row]:
        is_full = options.device == "cuda"
        config = V3_STYLE if is_full else TINY_V3
        for row in measured(config, options, draft_len, (SAME, SPREAD), v3_bytes):
            is_compared = is_full and SPREAD not in row["what"]
            yield row | (limits(V3_RIVALS[draft_len], row) if is_compared else {})
        release()

    return run


def limits(rival: Rival, row: Row) -> Row:
    what = row["what"].partition(", ")[0]
    return {"goal": rival.goals.get(what), "peer": rival.peer.get(what)}


def multiples(rival: Rival, row: Row) -> Row:
    """The row with the floor of the GPU at hand instead of an H200's, and the limits, which are an
    H200's milliseconds, as multiples of that GPU's floor."""
    if not (floor := row["floor"]):
        return row
    found = {key: value and value / floor for key, value in limits(rival, row).items()}
    return row | found | {"floor": floor * slowness(is_prefill=row["what"] == "prefill")}


def slowness(*, is_prefill: bool = False) -> float:
    """How many times as long as an H200 the GPU at hand reads or computes."""
    own = card("cuda" if torch.cuda.is_available() else "cpu")
    if is_prefill:
        return models.MATMUL_FLOPS / own.flops
    return models.READ_BYTES_PER_S / own.bytes_per_s


def measured(
    config: Config,
    options: Options,
    draft_len: int,
    cases: Sequence[str | None],
    round_bytes: Callable[[Config, float, float, int], float],
) -> Iterator[Row]:
    """cases: of `set_bias`; None: as the weights are. round_bytes: what a round reads at least, by
    the experts hit in a layer, the tokens of KV and the draft length."""
    is_full = options.device == "cuda"
    sizes, prompt_len, num_rounds = ((1, 8, 64), 1024, 40) if is_full else ((1, 2), 16, 3)
    rates = {"synthetic_acceptance_rates": MTP_RATES[:draft_len]}
    mtp = {"decoding_type": "MTP", "max_draft_len": draft_len} | rates
    start = time.perf_counter()
    engine = dummy_engine(
        config,
        batch_sizes=sizes,
        prompt_len=prompt_len,
        device=options.device,
        speculation=mtp if draft_len else None,
        attn_backend=options.text("attn_backend", "auto"),
    )
    if not draft_len:
        yield {"what": "start-up", "value": time.perf_counter() - start, "floor": None}
    for case in cases:
        suffix = "" if case is None else f", {case}"
        if case is not None:
            set_bias(engine, case)
        for batch_size in sizes:
            engine.start(batch_size, prompt_len)
            timings = [engine.timed(num_rounds) for _ in range(1 if options.quick else 3)]
            timed = sorted(timings, key=lambda each: each.round_ms)[len(timings) // 2]
            hit = experts_hit(engine, batch_size * (1 + draft_len))
            floor = models.read_ms(round_bytes(config, hit, batch_size * timed.context, draft_len))
            what = f"batch {batch_size}{suffix}"
            yield {"what": what, "value": timed.round_ms, "floor": floor, "hit": hit}
        engine.stop()
        if not draft_len:
            engine.prompts_ms(min(8, sizes[-1]), prompt_len)  # compiles
            ms = statistics.median(engine.prompts_ms(sizes[-1], prompt_len) for _ in range(3))
            yield {"what": f"prefill{suffix}", "value": ms, "floor": None}
    engine.stop()


def set_bias(engine: Rounds, case: str) -> None:
    """Sets the bias of the routers of target and MTP module. Graphs read it where it lies."""
    runner = engine.executor.parts.runner
    parts: list[torch.nn.Module] = [runner.engine.model]
    if isinstance(runner.drafter, NetworkDrafter):
        assert isinstance(runner.drafter.net, HeadNet)
        parts.append(runner.drafter.net.head)
    modules = [module for part in parts for module in part.modules()]
    for router in (module for module in modules if isinstance(module, Router)):
        bias = router.e_score_correction_bias
        assert bias is not None
        bias.zero_()
        if case == SAME:
            bias[: router.rule.top_k] = 100.0


def experts_hit(engine: Rounds, num_tokens: int) -> float:
    """Mean number of experts per layer that a round of `num_tokens` tokens takes, in rounds without
    graphs. 0: the model has none."""
    found: list[torch.Tensor] = []
    forward = Experts.forward

    def counted(experts: Experts, x: torch.Tensor, rows: ExpertRows, *own: Any) -> torch.Tensor:
        if len(x) == num_tokens:
            found.append(rows.experts.clone())
        return forward(experts, x, rows, *own)

    with without_graphs(engine), mock.patch.object(Experts, "forward", counted):
        engine.run(HIT_ROUNDS)
    return statistics.mean([len(experts.unique()) for experts in found] or [0])


@contextmanager
def without_graphs(engine: Rounds) -> Iterator[None]:
    with mock.patch.object(engine.executor.parts.runner.decode, "graphs", None):
        yield


def dense(config: Config, num_experts: float) -> Config:
    """The dense model whose MLP has the weights of `num_experts` experts."""
    return {**config, "intermediate_size": num_experts * config["moe_intermediate_size"]}


def qwen3_bytes(config: Config, hit: float, num_tokens: float, draft_len: int) -> float:
    """Attention, the experts hit, lm_head, and `num_tokens` of KV."""
    return models.streamed_bytes(dense(config, hit)) + models.kv_bytes(config, num_tokens)


def dense_bytes(config: Config, hit: float, num_tokens: float, draft_len: int) -> float:
    """All weights, and `num_tokens` of KV: in prompts of 1,024 tokens, a window sees nearly all."""
    return models.streamed_bytes(config) + models.kv_bytes(config, num_tokens)


def gpt_oss_bytes(config: Config, hit: float, num_tokens: float, draft_len: int) -> float:
    """Attention, the experts hit in MXFP4, lm_head, and `num_tokens` of KV in every second layer.
    Those in windows are left out: they are few."""
    experts = 3 * hit * config["intermediate_size"] * config["hidden_size"]
    num_bytes = models.streamed_bytes({**config, "intermediate_size": 0})
    num_bytes += config["num_hidden_layers"] * experts * MXFP4_BYTES
    return num_bytes + models.kv_bytes(config, num_tokens) / 2


def layer_bytes(config: Config, hit: float) -> float:
    """Bytes of a layer with `hit` experts: projections, experts, the shared one and the router."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
    rope, nope, value = (
        config[key] for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    attention = hidden * (rank + latent + rope) + heads * value * hidden
    attention += heads * (rank * (nope + rope) + latent * (nope + value))
    experts = 3 * (hit + config["n_shared_experts"]) * config["moe_intermediate_size"]
    return float(WEIGHT_BYTES * (attention + hidden * (experts + config["n_routed_experts"])))


def v3_bytes(config: Config, hit: float, num_tokens: float, draft_len: int) -> float:
    """What a round reads at least. The module of MTP is read once for each draft."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    dense = 3 * config["intermediate_size"] * hidden * WEIGHT_BYTES
    lm_head = config["vocab_size"] * hidden * WEIGHT_BYTES
    entry = WEIGHT_BYTES * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    num_bytes = layers * layer_bytes(config, hit) - 3 * hidden * WEIGHT_BYTES * (
        (hit + config["n_shared_experts"]) * config["moe_intermediate_size"]
    )
    module = layer_bytes(config, hit) + 2 * hidden * hidden * WEIGHT_BYTES + lm_head
    module += num_tokens * entry
    return num_bytes + dense + lm_head + layers * num_tokens * entry + draft_len * module


def multiples_table(rows: Sequence[Row]) -> list[str]:
    titles = ("", "measured", "floor", "of the floor", "at most", "vLLM 0.26.0", "experts hit")
    lines = []
    for row in rows:
        what, floor = row["what"], row["floor"]
        shares = row["value"] / floor if floor else None, row.get("goal"), row.get("peer")
        times = [f"{share:.2f}x" if share else "" for share in shares]
        unit = "s" if what == "start-up" else "ms"
        figures = number(row["value"]), number(floor), *times, number(row.get("hit") or None)
        lines.append([f"{what}, {unit}", *figures])
    return table(titles, lines)


def rounds_table(rows: Sequence[Row]) -> list[str]:
    titles = ("", "measured", "goal", "vLLM 0.26.0", "floor", "of the floor", "experts hit")
    lines = []
    for row in rows:
        what, value, floor = row["what"], row["value"], row["floor"]
        share = f"{value / floor:.2f}x" if floor else ""
        unit = "s" if what == "start-up" else "ms"
        limits = (number(row.get("goal")), number(row.get("peer")), number(floor))
        lines.append([f"{what}, {unit}", number(value), *limits, share, number(row.get("hit"))])
    return table(titles, lines)
