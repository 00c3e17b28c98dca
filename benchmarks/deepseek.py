"""A DeepSeek-V3-style model on one GPU: plain rounds, MTP rounds and prefill, with their floors.

    python -m benchmarks.deepseek [plain] [mtp1] [mtp3] [attention] [tiles] [projections]

plain      rounds of batch 1, 8 and 64, prefill of 64 prompts, start-up
mtp1       rounds with one draft of the MTP module, synthetic acceptance .8
mtp3       rounds with three, synthetic acceptance .8 .6 .45
attention  the window kernel alone, by batch, window and context
tiles      the window kernel with other tiles than `latent_attention.py` chooses
projections  queries to latents and latents to values by head_gemm, and by torch's batched GEMM

Random bf16 weights. Each case is measured with a correction bias by which all tokens take the same
experts, as with vLLM's dummy weights, and without one. The floor reads the weights and the experts
that are really hit, and the cache, once at 4.45 TB/s. `--device cpu` takes a tiny shape."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.harness.device_time import call_us
from benchmarks.harness.engine import Rounds, release
from benchmarks.harness.models import READ_BYTES_PER_S, WEIGHT_BYTES, Config, read_ms
from benchmarks.harness.moe_rounds import experts_hit, rounds_table
from benchmarks.harness.report import Options, Row, Subject, main, number, table
from tllm_spec.executor.speculative.drafting.draft_net import NextnNet
from tllm_spec.executor.speculative.drafting.network_proposer import NetworkProposer
from tllm_spec.executor.speculative.drafting.worker import DraftWorker
from tllm_spec.kernels import latent_attention as latent
from tllm_spec.kernels.head_gemm import head_gemm
from tllm_spec.kernels.latent_attention import (
    LatentTables,
    LatentWorkspace,
    TileShape,
    latent_attention,
)
from tllm_spec.kernels.round_rows import RoundRows
from tllm_spec.models.moe import Router

V3_STYLE: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}
TINY: Config = V3_STYLE | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "torch_dtype": "float32",
}
BF16, ENTRY = torch.bfloat16, 512 + 64
# Query rows, keys of a step, warps and stages of the window kernel.
TILES = ((16, 64, 4, 3), (16, 64, 8, 3), (32, 32, 4, 3), (64, 64, 8, 2))
RATES = (0.8, 0.6, 0.45)
# Milliseconds by draft length and batch, seconds of start-up: ours at most, and vLLM 0.26.0 on the
# same kind of machine.
BARS = {
    0: {"batch 1": 2.8, "batch 8": 3.2, "batch 64": 4.7, "prefill": 740.0, "start-up": 25.0},
    1: {"batch 1": 3.6, "batch 8": 4.0, "batch 64": 5.8},
    3: {"batch 1": 4.6, "batch 8": 5.8, "batch 64": 10.0},
}
PEER = {
    0: {"batch 1": 3.26, "batch 8": 3.66, "batch 64": 5.20, "prefill": 787.0},
    1: {"batch 1": 4.73, "batch 8": 4.48, "batch 64": 6.43},
    3: {"batch 1": 6.03, "batch 8": 7.28, "batch 64": 11.9},
}
SAME, SPREAD = "same experts", "spread"


def rounds(draft_len: int) -> Callable[[Options], Iterator[Row]]:
    """The rows of one draft length, with bars and the peer's at the full size."""

    def run(options: Options) -> Iterator[Row]:
        is_full = options.device == "cuda"
        for row in measured(draft_len, is_full, options):
            what = row["what"].partition(", ")[0]
            limits = {"bar": BARS[draft_len].get(what), "peer": PEER[draft_len].get(what)}
            yield row | (limits if is_full and SPREAD not in row["what"] else {})
        release()

    return run


def measured(draft_len: int, is_full: bool, options: Options) -> Iterator[Row]:
    config = V3_STYLE if is_full else TINY
    sizes, prompt_len, number_of = ((1, 8, 64), 1024, 40) if is_full else ((1, 2), 16, 3)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        start = time.perf_counter()
        engine = built(folder, draft_len, sizes, prompt_len, options.device)
        seconds = time.perf_counter() - start
    if not draft_len:
        yield {"what": "start-up", "value": seconds, "floor": None}
    for case in (SAME, SPREAD):
        set_bias(engine, case)
        for batch_size in sizes:
            engine.start(batch_size, prompt_len)
            timings = [engine.timed(number_of) for _ in range(1 if options.quick else 3)]
            timed = sorted(timings, key=lambda each: each.round_ms)[len(timings) // 2]
            hit = experts_hit(engine, batch_size * (1 + draft_len))
            num_bytes = round_bytes(config, hit, batch_size * timed.context, draft_len)
            what = f"batch {batch_size}, {case}"
            yield {"what": what, "value": timed.round_ms, "floor": read_ms(num_bytes), "hit": hit}
        engine.stop()
        if not draft_len:
            engine.prompts_ms(min(8, sizes[-1]), prompt_len)  # compiles
            ms = statistics.median(engine.prompts_ms(sizes[-1], prompt_len) for _ in range(3))
            yield {"what": f"prefill, {case}", "value": ms, "floor": None}


def built(
    folder: str, draft_len: int, sizes: tuple[int, ...], prompt_len: int, device: str
) -> Rounds:
    is_full = device == "cuda"
    kv_cache: dict[str, Any] = {"enable_block_reuse": False}
    mtp = {"decoding_type": "MTP", "max_draft_len": draft_len}
    mtp["synthetic_acceptance_rates"] = RATES[:draft_len]
    return Rounds(
        folder,
        max_batch_size=sizes[-1],
        max_seq_len=prompt_len + 512 * (1 + draft_len),
        device=device,
        load_format="dummy",
        kv_cache_config=kv_cache | ({} if is_full else {"max_tokens": 8192}),
        cuda_graph_config={"batch_sizes": sizes} if is_full else None,
        speculative_config=mtp if draft_len else None,
    )


def set_bias(engine: Rounds, case: str) -> None:
    """Of the target's routers and the MTP module's. Graphs read it where it lies."""
    runner = engine.executor.parts.runner
    models: list[torch.nn.Module] = [runner.engine.model]
    if isinstance(runner.round_end, DraftWorker):
        proposer = runner.round_end.proposer
        assert isinstance(proposer, NetworkProposer) and isinstance(proposer.net, NextnNet)
        models.append(proposer.net.modules)
    modules = [module for model in models for module in model.modules()]
    for router in (module for module in modules if isinstance(module, Router)):
        bias = router.e_score_correction_bias
        assert bias is not None
        bias.zero_()
        if case == SAME:
            bias[: router.rule.top_k] = 100.0


def layer_bytes(config: Config, hit: float) -> float:
    """Of a layer with `hit` experts: projections, experts hit, the shared one and the router."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
    rope, nope, value = (
        config[key] for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    attention = hidden * (rank + latent + rope) + heads * value * hidden
    attention += heads * (rank * (nope + rope) + latent * (nope + value))
    experts = 3 * (hit + config["n_shared_experts"]) * config["moe_intermediate_size"]
    return float(WEIGHT_BYTES * (attention + hidden * (experts + config["n_routed_experts"])))


def round_bytes(config: Config, hit: float, num_tokens: float, draft_len: int) -> float:
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


def attention(options: Options) -> Iterator[Row]:
    for batch, context in ((1, 1024), (8, 1024), (64, 1024), (1, 16384), (64, 8192)):
        for window in (1, 2, 4):
            calls = attention_calls(batch, context, window, options.device)
            floor = batch * context * ENTRY * WEIGHT_BYTES / READ_BYTES_PER_S * 1e6
            row = {"batch": batch, "context": context, "window": window, "floor": floor}
            yield row | call_us({"us": calls})


def attention_calls(
    batch: int, context: int, window: int, device: str
) -> list[Callable[[], torch.Tensor]]:
    """Of three layers of the V3-style shape."""
    heads, rank, nope, page, on_device = 16, 512, 128, 32, {"device": device, "dtype": BF16}
    pages = -(-context // page)
    workspace = LatentWorkspace.allocate(rank, torch.device(device))
    tables = torch.randperm(batch * pages, device=device).view(batch, -1).int()
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    given = LatentTables(RoundRows.rectangle(len(lens), window), tables, lens)
    q_latent = torch.randn(heads, batch * window, rank, **on_device)
    q = torch.randn(batch * window, heads, nope + ENTRY - rank, **on_device)
    layers = [torch.randn(batch * pages, page, ENTRY, **on_device) for _ in range(3)]
    return [
        partial(latent_attention, q_latent, q, layer, given, 0.1, workspace) for layer in layers
    ]


def tiles(options: Options) -> Iterator[Row]:
    for batch, window in product((1, 8, 64), (1, 2, 4)):
        chosen = latent._tile_shape(16 * window, batch, 132, 2)
        for sizes in TILES:
            shape = TileShape(*sizes)
            with mock.patch.object(latent, "_tile_shape", lambda *_, shape=shape: shape):
                found = call_us({"us": attention_calls(batch, 1024, window, options.device)})
            row = {"batch": batch, "window": window, "tile": str(sizes)}
            yield row | {"chosen": shape == chosen} | found


def tiles_table(rows: Sequence[Row]) -> list[str]:
    """The fastest first."""
    lines = [
        [number(row["batch"]), number(row["window"]), row["tile"],
         "yes" if row["chosen"] else "", number(row["us"])]
        for row in sorted(rows, key=lambda row: (row["batch"], row["window"], row["us"]))
    ]  # fmt: skip
    return table(("batch", "window", "rows, keys, warps, stages", "chosen", "µs"), lines)


def attention_table(rows: Sequence[Row]) -> list[str]:
    keys = ("batch", "context", "window")
    lines = [
        [*(number(row[key]) for key in keys), number(row["us"]), number(row["floor"])]
        for row in rows
    ]
    return table((*keys, "µs", "floor"), lines)


def projections(options: Options) -> Iterator[Row]:
    heads, rank, nope, value = 16, 512, 128, 128
    on_device = {"device": options.device, "dtype": torch.bfloat16}
    ups = [torch.randn(heads, nope + value, rank, **on_device) for _ in range(27)]
    for rows in (1, 4, 8, 16, 32, 64):
        q = torch.randn(rows, heads, nope + 64, **on_device)[..., :nope]
        latents = torch.randn(heads, rows, rank, **on_device).transpose(0, 1)
        absorbed = torch.empty_like(latents)
        mixed = torch.empty(rows, heads, value, **on_device)
        row: Row = {"rows": rows}
        for name, gemm in (("kernel", head_gemm), ("torch", head_gemm.reference)):
            calls = [
                call
                for up in ups
                for call in (
                    partial(gemm, q, up[:, :nope], absorbed),
                    partial(gemm, latents, up[:, nope:].mT, mixed),
                )
            ]
            row |= call_us({name: calls})
        yield row


def projections_table(rows: Sequence[Row]) -> list[str]:
    lines = [[number(row[key]) for key in ("rows", "kernel", "torch")] for row in rows]
    return table(("rows", "head_gemm, µs", "torch.bmm, µs"), lines)


SUBJECTS = (
    Subject("plain", "V3-style, plain", rounds(0), rounds_table),
    Subject("mtp1", "V3-style, MTP with 1 draft", rounds(1), rounds_table),
    Subject("mtp3", "V3-style, MTP with 3 drafts", rounds(3), rounds_table),
    Subject("attention", "Latent attention", attention, attention_table, needs_cuda=True),
    Subject("tiles", "Tiles of the window kernel", tiles, tiles_table, needs_cuda=True),
    Subject("projections", "Projections by head", projections, projections_table, needs_cuda=True),
)

if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(SUBJECTS, __doc__))
