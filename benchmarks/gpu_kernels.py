"""The kernels of a decoding round on one GPU, each in a CUDA graph, with its floor.

    python -m benchmarks.gpu_kernels [attention] [tree_attention] [small_m_gemm] [tuned_gemm]
        [sampling] [prompt_attention]

attention       query windows of 1 to 8 tokens over a paged KV cache, layer after layer
tree_attention  draft trees of 8 to 64 rows and a draft step of 8 beams, and chains of as many rows
small_m_gemm    our GEMM of up to 8 rows, with what is fused into it, and torch's GEMM and ops
tuned_gemm      all GEMMs of the 8B shape by torch, and by the fastest cuBLASLt algorithms
sampling        choosing tokens of 128,256 logits, with filters
prompt_attention  a layer's attention of whole prompts as TRITON and FLASHINFER run it, by head_dim
        and query heads of a KV head; FlashInfer compiles what was not built ahead, for minutes

Shapes are an 8B Llama's in bf16. Every call has weights or pools of its own, so that no cache holds
them. The floor reads the bytes once at 4.45 TB/s, or computes at 790 TFLOP/s."""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from benchmarks.harness.device_time import call_us
from benchmarks.harness.models import MATMUL_FLOPS, READ_BYTES_PER_S
from benchmarks.harness.report import Options, Row, Subject, crossed, main, number, numbers, table

if TYPE_CHECKING:
    from tllm_spec.attention.interface import HeadsBackend
    from tllm_spec.kernels.attention.visible_keys import TreeMask

LAYERS, VOCAB, CUDA, BF16 = 32, 128256, "cuda", torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 32
CASES = ((1, 1050), (8, 1050), (64, 1050), (1, 8192), (32, 1050), (64, 1250), (96, 1050),
         (16, 4096), (32, 4200), (64, 4200))  # fmt: skip
WINDOWS = (1, 4, 8)
# Rows, and earlier keys of the tree's region.
TREES = ((8, 0), (16, 0), (32, 0), (64, 0), (8, 24))
TREE_CASES = tuple((batch, context) for context in (1024, 8192) for batch in (1, 8, 32))
MAX_TREE_RATIO = 1.15
PROMPT_DIMS, PROMPT_GROUPS, PROMPT_LAYERS = (64, 128, 256), (4, 8), 4
PROMPTS = ((1, 512), (1, 2048), (1, 8192), (16, 512))
GEMMS = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
NORMED, ADDS = ("qkv", "gate_up"), ("o", "down")


def read_us(num_bytes: float) -> float:
    return num_bytes / READ_BYTES_PER_S * 1e6


def bound(
    call: Callable[[torch.Tensor], object], inputs: Sequence[torch.Tensor]
) -> list[Callable[[], object]]:
    return [lambda value=value: call(value) for value in inputs]


def attention(options: Options) -> Iterator[Row]:
    for batch_size, context in CASES[: 4 if options.quick else None]:
        pools, tables = paged_cache(batch_size, context)
        floor = read_us(batch_size * context * 2 * KV_HEADS * HEAD_DIM * 2)
        for window in WINDOWS:
            us = call_us({"ours": window_calls(pools, tables, context, window)})["ours"]
            yield {
                "batch_size": batch_size, "context": context, "window": window, "us": us,
                "floor": floor,
            }  # fmt: skip


def paged_cache(batch_size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The layers' pools, and block tables with room for 16 pages more."""
    pages = -(-context // PAGE_SIZE)
    num_pages = batch_size * pages + 1
    shape = (LAYERS, 2, num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    pools = torch.empty(shape, dtype=BF16, device=CUDA).normal_()
    tables = torch.zeros(batch_size, pages + 16, dtype=torch.int32, device=CUDA)
    order = torch.randperm(num_pages - 1, device=CUDA) + 1
    tables[:, :pages] = order.view(batch_size, pages).to(torch.int32)
    return pools, tables


def window_calls(
    pools: torch.Tensor,
    tables: torch.Tensor,
    context: int,
    window: int,
    tree: "TreeMask | None" = None,
) -> list[Callable[[], object]]:
    """One call for each layer: norm and rotary embedding, the KV write, and attention."""
    from tllm_spec.kernels.attention.window_attention import (
        WindowCall,
        WindowTables,
        window_attention,
    )
    from tllm_spec.kernels.attention.window_splits import WindowWorkspace
    from tllm_spec.kernels.slots.round_rows import RoundRows

    batch_size = tables.shape[0]
    rows = RoundRows.rectangle(batch_size, window)
    shape = (batch_size * window, HEADS + 2 * KV_HEADS, HEAD_DIM)
    qkv = torch.randn(shape, device=CUDA).to(BF16)
    cos_sin = torch.randn(batch_size * window, 2, 1, HEAD_DIM, device=CUDA).to(BF16)
    positions = context - window + torch.arange(window, device=CUDA)
    slots = tables[:, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    lengths = torch.full((batch_size,), context, dtype=torch.int32, device=CUDA)
    places = WindowTables(rows, tables, lengths, slots.flatten(), tree=tree)
    workspace = WindowWorkspace.allocate(HEAD_DIM, torch.device(CUDA))

    def call(pool: torch.Tensor) -> Callable[[], object]:
        own = WindowCall(qkv, cos_sin, pool, places, HEAD_DIM**-0.5, workspace)
        return lambda: window_attention(own)

    return [call(pool) for pool in pools]


def tree_attention(options: Options) -> Iterator[Row]:
    from tllm_spec.kernels.attention.visible_keys import TreeMask

    for batch_size, context in TREE_CASES[: 2 if options.quick else None]:
        pools, tables = paged_cache(batch_size, context)
        for window, offset in TREES:
            bits = torch.tensor(random_bits(offset + window)[offset:], device=CUDA)
            mask = TreeMask(bits.repeat(batch_size, 1), offset + window)
            sides = {
                "chain": window_calls(pools, tables, context, window),
                "tree": window_calls(pools, tables, context, window, mask),
            }
            case = {"batch_size": batch_size, "context": context, "rows": window}
            yield case | {"offset": offset} | call_us(sides)


def random_bits(num_nodes: int) -> list[int]:
    """A mask of each node of a random tree: itself and its ancestors, as an int64."""
    bits: list[int] = []
    for node in range(num_nodes):
        parent = bits[int(torch.randint(node, ()))] if node else 0
        bits.append(parent + ((1 << node) if node < 63 else -(1 << 63)))
    return bits


def case_of(row: Row) -> str:
    return f"{row['batch_size']} x {row['context']:,}"


def tree_attention_table(rows: Sequence[Row]) -> list[str]:
    def line(row: Row) -> str:
        step = f" after {row['offset']} keys of earlier steps" if row["offset"] else ""
        return f"{row['rows']} rows{step}"

    cells = [(line(row), case_of(row), numbers((row["tree"], row["chain"]))) for row in rows]
    worst = f"{max(row['tree'] / row['chain'] for row in rows):.3f} (goal {MAX_TREE_RATIO})"
    last = ("worst ratio", case_of(rows[0]), worst)
    return crossed("µs tree / chain, by requests x context", [*cells, last])


def attention_table(rows: Sequence[Row]) -> list[str]:
    us = [(f"window of {row['window']}", case_of(row), number(row["us"])) for row in rows]
    floors = [("floor", case_of(row), number(row["floor"])) for row in rows]
    return crossed("µs, by requests x context", us + floors)


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
    from tllm_spec.kernels.gemm.norms import NormWeight, rms_norm, silu_and_mul
    from tllm_spec.kernels.gemm.small_m_gemm import small_m_gemm

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
    from tllm_spec.kernels.gemm.cublas_lt import CublasLt, shared_library
    from tllm_spec.kernels.gemm.tuned_linear import (
        GemmGroup,
        LinearTable,
        TunedGemms,
        plain_tuned_linear,
        tune_missing,
        tuned_linear,
    )

    library = shared_library()
    if library is None:
        sys.exit("tuned_gemm needs libcublasLt")
    tuned = TunedGemms(CublasLt(library, torch.device(CUDA)), LinearTable())
    weights = {layer: weights_of(*shape) for layer, shape in GEMMS.items()}
    weights["lm_head"] = weights_of(4096, VOCAB, 1)
    counts = (16, 64) if options.quick else (16, 32, 64, 128, 256, 448, 1024, 8192)
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
    keys = ("torch", "tuned", "floor")
    cells = ((key, f"{row['rows']:,}", number(row[key])) for key in keys for row in rows)
    return crossed("ms of the model's GEMMs, by rows", cells)


def sampling(options: Options) -> Iterator[Row]:
    for rows in (1, 64) if options.quick else (1, 4, 32, 64, 256):
        count = max(2, min(20, (200 << 20) // (rows * VOCAB * 2)))  # more than the L2 cache holds
        inputs = [(torch.randn(rows, VOCAB, device=CUDA) * 3).to(BF16) for _ in range(count)]
        sides = {way: bound(choose, inputs) for way, choose in choices(rows).items()}
        for way, us in call_us(sides).items():
            yield {"way": way, "rows": rows, "us": us, "floor": read_us(rows * VOCAB * 2)}


def choices(rows: int) -> dict[str, Callable[[torch.Tensor], object]]:
    """Ways of choosing a token in each row of logits `[R, V]`."""
    from tllm_spec.kernels.sampling.choose_token import choose_best, choose_token
    from tllm_spec.kernels.sampling.logit_filters import filter_cut

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
    us = [(row["way"], str(row["rows"]), number(row["us"])) for row in rows]
    return crossed(
        "µs, by rows", us + [("floor", str(r["rows"]), number(r["floor"])) for r in rows]
    )


def prompt_attention(options: Options) -> Iterator[Row]:
    from tllm_spec.attention.choice import BACKENDS
    from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool

    shapes = product(PROMPT_DIMS[: 2 if options.quick else None], PROMPT_GROUPS)
    for (head_dim, group), (count, length) in product(shapes, PROMPTS):
        heads = HEADS * HEAD_DIM // head_dim
        geometry = AttentionGeometry(PROMPT_LAYERS, heads, heads // group, head_dim, 0.1)
        num_pages = 1 + count * length // PAGE_SIZE
        pool = KVPool(
            geometry,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            kv_format=KVFormat(BF16),
            device=torch.device(CUDA),
        )
        us = call_us(
            {
                name: prompt_calls(BACKENDS[name](geometry, pool), count, length)
                for name in ("TRITON", "FLASHINFER")
            }
        )
        yield {"head_dim": head_dim, "group": group, "prompts": f"{count} x {length:,}"} | us


def prompt_calls(backend: "HeadsBackend", count: int, length: int) -> list[Callable[[], object]]:
    """One call for each layer: rotary embedding, the KV write, and attention of the prompts."""
    from tllm_spec.attention.interface import AttentionMetadata, HeadsInputs
    from tllm_spec.kernels.attention.rotary_write import Rotary
    from tllm_spec.kernels.slots.round_rows import RoundRows

    geometry, rows = backend.geometry, count * length
    lens = (length,) * count
    tables = torch.arange(1, 1 + rows // PAGE_SIZE, dtype=torch.int32, device=CUDA)
    positions = torch.arange(length, device=CUDA).repeat(count)
    plan = backend.plan(
        AttentionMetadata(
            context_lens=lens,
            context_kv_lens=lens,
            rows=RoundRows.rectangle(0, 1),
            block_tables=tables.view(count, -1),
            kv_lens=torch.full((count,), length, dtype=torch.int32, device=CUDA),
            positions=positions,
            kv_slots=PAGE_SIZE + torch.arange(rows, device=CUDA),
            max_kv_len=0,
        )
    )
    num_heads = geometry.num_heads + 2 * geometry.num_kv_heads
    table = torch.randn(length, 2, 1, geometry.head_dim, device=CUDA).to(BF16)

    def call(layer: int) -> Callable[[], object]:
        qkv = torch.randn(rows, num_heads, geometry.head_dim, device=CUDA).to(BF16)
        return lambda: backend.run(layer, HeadsInputs(qkv), Rotary(table, positions), plan)

    return [call(layer) for layer in range(geometry.num_layers)]


def prompt_table(rows: Sequence[Row]) -> list[str]:
    titles = ("head_dim", "query heads of a KV head", "prompts", "TRITON, µs", "FLASHINFER, µs",
              "ratio")  # fmt: skip
    lines = []
    for row in rows:
        us = row["TRITON"], row["FLASHINFER"]
        case = (str(row["head_dim"]), str(row["group"]), row["prompts"])
        lines.append([*case, *map(number, us), f"{us[0] / us[1]:.2f}"])
    return table(titles, lines)


SUBJECTS = tuple(
    Subject(*parts, needs_cuda=True)
    for parts in (
        ("attention", "Attention of query windows", attention, attention_table),
        ("tree_attention", "Attention of draft trees", tree_attention, tree_attention_table),
        ("small_m_gemm", "GEMMs of up to 8 rows", small_m_gemm, small_m_table),
        ("tuned_gemm", "GEMMs of more rows", tuned_gemm, tuned_table),
        ("sampling", "Choosing tokens of 128,256 logits", sampling, sampling_table),
        ("prompt_attention", "Attention of prompts", prompt_attention, prompt_table),
    )
)

if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(SUBJECTS, __doc__))
