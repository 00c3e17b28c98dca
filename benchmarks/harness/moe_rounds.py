"""Rounds, prefill and start-up of a model with experts, with the experts that are really hit."""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.harness import models
from benchmarks.harness.engine import Rounds
from benchmarks.harness.models import Config, kv_bytes, prefill_flops, read_ms, streamed_bytes
from benchmarks.harness.report import Options, Row, number, table
from tllm_spec.models.moe import Router

QWEN3_30B: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}
TINY: Config = QWEN3_30B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "torch_dtype": "float32",
}
# Milliseconds, and seconds of start-up: ours at most, and vLLM 0.26.0 on the same kind of machine.
BARS = {"batch 1": 3.4, "batch 8": 7.5, "batch 64": 16.5, "prefill": 850.0, "start-up": 25.0}
PEER = {"batch 1": 4.15, "batch 8": 9.24, "batch 64": 19.3, "prefill": 895.0}
HIT_ROUNDS = 4


def rounds(options: Options) -> Iterator[Row]:
    """The figures, with bars and the peer's at the full size."""
    is_full = options.device == "cuda"
    for row in measured(is_full, options.device):
        limits = {"bar": BARS.get(row["what"]), "peer": PEER.get(row["what"])}
        yield row | (limits if is_full else {})


def measured(is_full: bool, device: str) -> Iterator[Row]:
    config = QWEN3_30B if is_full else TINY
    sizes, prompt_len, number = ((1, 8, 64), 1024, 40) if is_full else ((1, 2), 16, 3)
    kv_cache: dict[str, Any] = {"enable_block_reuse": False}
    kv_cache |= {} if is_full else {"max_tokens": 4096}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        start = time.perf_counter()
        engine = Rounds(
            folder,
            max_batch_size=sizes[-1],
            max_seq_len=prompt_len + 512,
            device=device,
            load_format="dummy",
            kv_cache_config=kv_cache,
            cuda_graph_config={"batch_sizes": sizes} if is_full else None,
        )
        yield {"what": "start-up", "value": time.perf_counter() - start, "floor": None}
    for batch_size in sizes:
        engine.start(batch_size, prompt_len)
        timings = sorted((engine.timed(number) for _ in range(3)), key=lambda each: each.round_ms)
        hit = experts_hit(engine, batch_size)
        floor = read_ms(round_bytes(config, hit, batch_size * timings[1].context))
        what = f"batch {batch_size}"
        yield {"what": what, "value": timings[1].round_ms, "floor": floor, "hit": hit}
    engine.stop()
    engine.prompts_ms(min(8, sizes[-1]), prompt_len)  # compiles
    ms = statistics.median(engine.prompts_ms(sizes[-1], prompt_len) for _ in range(3))
    flops = prefill_flops(sizes[-1], prompt_len, dense(config, config["num_experts_per_tok"]))
    yield {"what": "prefill", "value": ms, "floor": flops / models.MATMUL_FLOPS * 1e3}
    engine.stop()


def experts_hit(engine: Rounds, num_tokens: int) -> float:
    """Mean number of experts per layer that a round of `num_tokens` tokens takes, in rounds without
    graphs."""
    found: list[torch.Tensor] = []
    route = Router.route

    def counted(router: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        experts, weights = route(router, x)
        if len(x) == num_tokens:
            found.append(experts)
        return experts, weights

    with without_graphs(engine), mock.patch.object(Router, "route", counted):
        engine.run(HIT_ROUNDS)
    return statistics.mean(len(experts.unique()) for experts in found)


@contextmanager
def without_graphs(engine: Rounds) -> Iterator[None]:
    with mock.patch.object(engine.executor.parts.runner.decode, "graphs", None):
        yield


def dense(config: Config, num_experts: float) -> Config:
    """The dense model whose MLP has the weights of `num_experts` experts."""
    return {**config, "intermediate_size": num_experts * config["moe_intermediate_size"]}


def round_bytes(config: Config, hit: float, num_tokens: float) -> float:
    """What a round reads at least: attention, the experts hit, lm_head, and `num_tokens` of KV."""
    return streamed_bytes(dense(config, hit)) + kv_bytes(config, num_tokens)


def rounds_table(rows: Sequence[Row]) -> list[str]:
    titles = ("", "measured", "bar", "vLLM 0.26.0", "floor", "of the floor", "experts hit")
    lines = []
    for row in rows:
        what, value, floor = row["what"], row["value"], row["floor"]
        share = f"{value / floor:.2f}x" if floor else ""
        unit = "s" if what == "start-up" else "ms"
        limits = (number(row.get("bar")), number(row.get("peer")), number(floor))
        lines.append([f"{what}, {unit}", number(value), *limits, share, number(row.get("hit"))])
    return table(titles, lines)
