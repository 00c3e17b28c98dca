"""The kernels of a decoding round on one GPU, each in a CUDA graph, with its floor.

    python -m benchmarks.gpu_kernels [attention] [tree_attention] [small_m_gemm] [tuned_gemm]
        [sampling]

attention       query windows of 1 to 8 tokens over a paged KV cache, layer after layer
tree_attention  draft trees of 8 to 64 rows and a draft step of 8 beams, and chains of as many rows
small_m_gemm    our GEMM of up to 8 rows, with what is fused into it, and torch's GEMM and ops
tuned_gemm      all GEMMs of the 8B shape by torch, and by the fastest cuBLASLt algorithms
sampling        choosing tokens of 128,256 logits, with filters

Shapes are an 8B Llama's in bf16. Every call has weights or pools of its own, so that no cache holds
them. The floor reads the bytes once at 4.45 TB/s, or computes at 790 TFLOP/s."""

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from benchmarks.harness.attention_kernels import (
    BF16,
    CUDA,
    LAYERS,
    VOCAB,
    attention,
    attention_table,
    bound,
    read_us,
    tree_attention,
    tree_attention_table,
)
from benchmarks.harness.device_time import call_us
from benchmarks.harness.models import MATMUL_FLOPS
from benchmarks.harness.report import Options, Row, Subject, main, number, numbers, table

GEMMS = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
NORMED, ADDS = ("qkv", "gate_up"), ("o", "down")


def weights_of(in_features: int, out_features: int, count: int = LAYERS) -> list[torch.Tensor]:
    shape = (out_features, in_features)
    scale = in_features**-0.5
    return [torch.randn(shape, device=CUDA, dtype=BF16) * scale for _ in range(count)]


def small_m_gemm(options: Options) -> Iterator[Row]:
    for layer, (in_features, out_features) in GEMMS.items():
        weights = weights_of(in_features, out_features)
        for rows in (1, 8) if options.quick else (1, 4, 8):
            sides = small_m_sides(layer, rows, in_features, out_features)
            found = call_us({name: bound(call, weights) for name, call in sides.items()})
            yield {
                "layer": layer, "rows": rows, "floor": read_us(2 * in_features * out_features)
            } | found  # fmt: skip


def small_m_sides(
    layer: str, rows: int, in_features: int, out_features: int
) -> dict[str, Callable[[torch.Tensor], object]]:
    """qkv and gate_up follow a norm; o and down add to a running sum."""
    from tllm_spec.kernels.rms_norm import rms_norm
    from tllm_spec.kernels.silu_and_mul import silu_and_mul
    from tllm_spec.kernels.small_m_gemm import NormWeight, small_m_gemm

    x = torch.randn(rows, in_features, device=CUDA, dtype=BF16)
    norm = NormWeight(torch.ones(in_features, device=CUDA, dtype=BF16), 1e-5)
    total = torch.zeros(rows, out_features, device=CUDA, dtype=BF16)

    def ours(weight: torch.Tensor) -> object:
        if layer in NORMED:
            return small_m_gemm(x, weight, norm=norm, gated=layer == "gate_up")
        return small_m_gemm(x, weight, add_to=total)

    def product_and_ops(weight: torch.Tensor) -> object:
        if layer not in NORMED:
            return total.addmm_(x, weight.t())
        output = F.linear(rms_norm(x, norm.weight, norm.eps), weight)
        return silu_and_mul(output) if layer == "gate_up" else output

    return {
        "ours": ours,
        "product": lambda weight: F.linear(x, weight),
        "product_and_ops": product_and_ops,
    }


def small_m_table(rows: Sequence[Row]) -> list[str]:
    sizes = list(dict.fromkeys(row["rows"] for row in rows))
    lines = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        own = [row for row in rows if row["layer"] == layer]
        columns = [[row[key] for row in own] for key in ("ours", "product_and_ops", "product")]
        lines.append([layer, *map(numbers, columns), number(own[0]["floor"])])
    by_rows = f"µs, with {' / '.join(map(str, sizes))} rows"
    return table((by_rows, "ours, fused", "torch GEMM and ops", "torch GEMM", "floor"), lines)


def tuned_gemm(options: Options) -> Iterator[Row]:
    """The GEMMs of 32 layers and lm_head one after the other, all tuned at the beginning as at an
    engine's first start. From 1,024 rows on without lm_head, which only runs for a few rows."""
    from tllm_spec.kernels.cublas_lt import CublasLt, shared_library
    from tllm_spec.kernels.linear_table import LinearTable
    from tllm_spec.kernels.linear_tuner import GemmGroup, tune_missing
    from tllm_spec.kernels.tuned_linear import TunedGemms, plain_tuned_linear, tuned_linear

    library = shared_library()
    if library is None:
        sys.exit("tuned_gemm needs libcublasLt")
    tuned = TunedGemms(CublasLt(library, torch.device(CUDA)), LinearTable())
    weights = {layer: weights_of(*shape) for layer, shape in GEMMS.items()}
    weights["lm_head"] = weights_of(4096, VOCAB, 1)
    counts = (16, 64) if options.quick else (16, 32, 64, 128, 256, 1024, 8192)
    groups = [GemmGroup(each, layer in ADDS) for layer, each in weights.items()]
    tune_missing(tuned.table, tuned.lt, groups, counts)

    def model(rows: int, linear: Callable[..., object]) -> list[Callable[[], object]]:
        calls: dict[str, list[Callable[[], object]]] = {}
        for layer, own in weights.items():
            x = torch.randn(rows, own[0].shape[1], device=CUDA, dtype=BF16)
            shape = (rows, own[0].shape[0])
            total = torch.zeros(shape, device=CUDA, dtype=BF16) if layer in ADDS else None
            calls[layer] = bound(lambda w, x=x, total=total: linear(x, w, add_to=total), own)
        last = calls.pop("lm_head")
        layers = [call for of_a_layer in zip(*calls.values(), strict=True) for call in of_a_layer]
        return layers + (last if rows < 1024 else [])

    for rows in counts:
        calls = {
            "torch": model(rows, plain_tuned_linear),
            "tuned": model(rows, lambda x, w, add_to: tuned_linear(x, w, tuned, add_to=add_to)),
        }
        found = {name: us * len(calls[name]) / 1e3 for name, us in call_us(calls).items()}
        size = sum(w.numel() for layer, each in weights.items() for w in each
                   if rows < 1024 or layer != "lm_head")  # fmt: skip
        floor = max(read_us(2 * size), 2 * size * rows / MATMUL_FLOPS * 1e6) / 1e3
        yield {"rows": rows, "floor": floor} | found


def tuned_table(rows: Sequence[Row]) -> list[str]:
    rows = sorted(rows, key=lambda row: row["rows"])
    titles = ("ms of the model's GEMMs, by rows", *(f"{row['rows']:,}" for row in rows))
    keys = ("torch", "tuned", "floor")
    return table(titles, [[key, *(number(row[key]) for row in rows)] for key in keys])


def sampling(options: Options) -> Iterator[Row]:
    for rows in (1, 64) if options.quick else (1, 4, 32, 64, 256):
        count = max(2, min(20, (200 << 20) // (rows * VOCAB * 2)))  # more than the L2 cache holds
        inputs = [(torch.randn(rows, VOCAB, device=CUDA) * 3).to(BF16) for _ in range(count)]
        sides = {way: bound(choose, inputs) for way, choose in choices(rows).items()}
        for way, us in call_us(sides).items():
            yield {"way": way, "rows": rows, "us": us, "floor": read_us(rows * VOCAB * 2)}


def choices(rows: int) -> dict[str, Callable[[torch.Tensor], object]]:
    """Ways of choosing a token in each row of logits `[R, V]`."""
    from tllm_spec.kernels.choose_token import choose_best, choose_token
    from tllm_spec.kernels.filter_cut import filter_cut

    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=CUDA)

    seeds, min_p, temperature, top_p = (
        torch.arange(rows, device=CUDA),
        full(0),
        full(0.8),
        full(0.9),
    )

    def filtered(top_k: int) -> Callable[[torch.Tensor], object]:
        ks = full(top_k, torch.int64)

        def choose(logits: torch.Tensor) -> object:
            cut = filter_cut(logits, temperature, ks, top_p, min_p)
            return choose_token(logits, temperature, seeds, seeds, cut=cut)

        return choose

    return {
        "greedy": choose_best,
        "sampled": lambda logits: choose_token(logits, temperature, seeds, seeds),
        "top_k 50, top_p 0.9": filtered(50),
        "top_p 0.9": filtered(VOCAB),
    }


def sampling_table(rows: Sequence[Row]) -> list[str]:
    sizes = list(dict.fromkeys(row["rows"] for row in rows))
    lines: dict[str, list[str]] = {}
    for row in rows:
        lines.setdefault(row["way"], [row["way"]]).append(number(row["us"]))
    floors = {row["rows"]: row["floor"] for row in rows}
    last = ["floor", *(number(floors[size]) for size in sizes)]
    return table(("µs, by rows", *map(str, sizes)), [*lines.values(), last])


SUBJECTS = tuple(
    Subject(*parts, needs_cuda=True)
    for parts in (
        ("attention", "Attention of query windows", attention, attention_table),
        ("tree_attention", "Attention of draft trees", tree_attention, tree_attention_table),
        ("small_m_gemm", "GEMMs of up to 8 rows", small_m_gemm, small_m_table),
        ("tuned_gemm", "GEMMs of more rows", tuned_gemm, tuned_table),
        ("sampling", "Choosing tokens of 128,256 logits", sampling, sampling_table),
    )
)

if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(SUBJECTS, __doc__))
