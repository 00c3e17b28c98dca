"""The small-M GEMM: the reference against the formula, layouts and compilation, and on a CUDA
device (`-m gpu`) the kernel."""

import ctypes
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tllm_spec.kernels import nvrtc
from tllm_spec.kernels.gemm import small_m_gemm as module
from tllm_spec.kernels.gemm import small_m_gemm as small_m_plan
from tllm_spec.kernels.gemm.int4_weights import (
    GROUPS,
    exponent_words,
    group_words,
    int4_dequantised,
    packed,
)
from tllm_spec.kernels.gemm.norms import NormWeight
from tllm_spec.kernels.gemm.scaled_linear import BLOCK
from tllm_spec.kernels.gemm.small_m_gemm import (
    FP8,
    MAX_ROWS,
    WIDE,
    Ring,
    Stored,
    plain_small_m_gemm,
    serves,
    small_m_gemm,
)

EPS = 1e-5
# norm, gated, adds, bias
FORMS = [
    pytest.param(*form, id=name)
    for name, form in {
        "plain": (False, False, False, False),
        "norm and bias": (True, False, False, True),
        "sum": (False, False, True, False),
        "norm and gate": (True, True, False, False),
        "gate and bias": (False, True, False, True),
        "everything": (True, True, True, True),
    }.items()
]
# What a call may have besides, with the rest of its form.
FURTHER = {
    "GELU": (True, True, True, True),
    "given ups": (True, False, False, False),
    "a norm in float32": (True, True, False, False),
}
SILU = ("", "a norm in float32")
on_each_further = pytest.mark.parametrize("further", FURTHER)
SCALED = Stored(8, BLOCK)
CODES = (*(Stored(4, group) for group in GROUPS[1:]), Stored(4, 32, is_e2m1=True))
on_each_form = pytest.mark.parametrize(("norm", "gated", "adds", "has_bias"), FORMS)


class Case:
    """Operands of one call, and the formula in float64."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        form: tuple[bool, bool, bool, bool],
        dtype: torch.dtype,
        device: str,
        stored: Stored = WIDE,
        further: str = "",
    ) -> None:
        """further: one of FURTHER."""
        (rows, in_features, out_features), (norm, gated, adds, has_bias) = sizes, form
        generator = torch.Generator().manual_seed(rows + in_features + out_features)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.x = random(rows, 2 * in_features)[:, in_features:]
        self.weight = random(out_features, in_features) / in_features**0.5
        self.scales, self.group = None, stored.group if stored.bits == 4 else 0
        numbers = self.weight
        if stored.group:
            # A scale that were another row's or block's would show.
            scales = torch.randn(out_features, -(-in_features // stored.group), generator=generator)
            self.scales = scales.abs().to(device) / (8 * in_features**0.5)
            if stored.is_e2m1:
                self.scales = self.scales.log2().round().exp2()
        if stored.bits == 8:
            self.weight = (random(out_features, in_features) * 8).to(FP8)
            by_input = self.scales.double().repeat_interleave(BLOCK, 1)
            numbers = self.weight.double() * by_input[:, :in_features]
        elif stored.bits == 4:
            codes, zeros = (
                torch.randint(0, 16, size, generator=generator, dtype=torch.uint8).to(device)
                for size in ((out_features, in_features), scales.shape)
            )
            is_e2m1 = stored.is_e2m1
            words = exponent_words(self.scales) if is_e2m1 else group_words(self.scales, zeros)
            self.weight, self.scales = packed(codes), words
            numbers = int4_dequantised(codes, self.scales, self.group, torch.float64)
        self.numbers = numbers.double()
        self.bias = random(out_features) if has_bias else None
        weight = random(in_features)
        weight = weight.float() * 1.001 if further == "a norm in float32" else weight
        self.norm = NormWeight(weight, EPS) if norm else None
        self.gated, self.activation = gated, "silu" if further in SILU else "gelu_pytorch_tanh"
        features = out_features // 2 if gated else out_features
        self.ups = None
        if further == "given ups":
            self.ups = random(rows, 3 * features)[:, features : 2 * features]
        self.total = random(rows, 3 * features)[:, features : 2 * features] if adds else None

    def expected(self) -> torch.Tensor:
        x = self.x.double()
        if self.norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.norm.weight.double()
        output = F.linear(x, self.numbers, None if self.bias is None else self.bias.double())
        if self.gated or self.ups is not None:
            gate, up = output.chunk(2, -1) if self.gated else (output, self.ups.double())
            gate = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
            output = gate * up
        return output if self.total is None else output + self.total.double()

    def run(self, function: object = small_m_gemm) -> torch.Tensor:
        assert callable(function)
        options = {"bias": self.bias, "norm": self.norm, "gated": self.gated, "add_to": self.total}
        options |= {"scales": self.scales, "group": self.group}
        options |= {"activation": self.activation, "ups": self.ups}
        output = function(self.x, self.weight, **options)
        assert isinstance(output, torch.Tensor)
        assert self.total is None or output is self.total
        return output


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output.double() - expected).norm() / expected.norm())


@pytest.mark.covering
@on_each_form
@pytest.mark.parametrize("stored", [WIDE, SCALED, CODES[0]], ids=str)
@pytest.mark.parametrize("sizes", [(1, 64, 48), (3, 192, 1000), (8, 320, 36)], ids=str)
def test_the_reference_equals_the_formula_and_adds_in_place(
    sizes: tuple[int, int, int], stored: Stored, norm: bool, gated: bool, adds: bool, has_bias: bool
) -> None:
    case = Case(sizes, (norm, gated, adds, has_bias), torch.float32, "cpu", stored)
    expected = case.expected()
    assert not serves(case.x, case.weight, case.scales, case.group)
    assert relative_error(case.run(plain_small_m_gemm), expected) < 1e-6


@on_each_further
def test_the_reference_gates_with_gelu_and_what_is_given(further: str) -> None:
    case = Case((3, 192, 1000), FURTHER[further], torch.float32, "cpu", further=further)
    expected = case.expected()
    assert relative_error(case.run(plain_small_m_gemm), expected) < 1e-6


@pytest.mark.thinned(13)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "ring",
    [
        *(
            Ring(5, 128),
            Ring(small_m_plan.MIN_DEPTH, 64),
            Ring(4, 256, SCALED),
            Ring(5, 128, SCALED),
        ),
        *(Ring(3, columns, codes) for codes in CODES for columns in (512, 256)),
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.usefixtures("own_cache")
def test_the_source_compiles(dtype: torch.dtype, ring: Ring, architecture: str) -> None:
    macros = small_m_plan.definitions(dtype, ring, adapts=ring.depth == 5)
    assert nvrtc.compile_source("small_m_gemm.cu", architecture, macros).startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("name", "structure"), [("Gemm", module._Arguments), ("Expansion", module._Expansion)]
)
def test_the_kernels_argument_has_the_same_fields_in_python_and_cuda(
    name: str, structure: type[ctypes.Structure]
) -> None:
    source = Path(small_m_plan.__file__).with_name("small_m_gemm.cu").read_text(encoding="utf-8")
    (declared,) = re.findall(rf"struct {name} {{\n(.*?)\n\n", source, re.DOTALL)
    types = {
        "const u16 *": ctypes.c_void_p,
        "const void*": ctypes.c_void_p,
        "const int *": ctypes.c_void_p,
        "const Weight*": ctypes.c_void_p,
        "const Scale*": ctypes.c_void_p,
        "u16*": ctypes.c_void_p,
        "int": ctypes.c_int,
        "float": ctypes.c_float,
        "const float*": ctypes.c_void_p,
        "long long": ctypes.c_longlong,
    }
    fields, kinds = [], "|".join(map(re.escape, types))
    for line in re.sub(r"(u16|int) \*(\w)", r"\1 * \2", declared).splitlines():
        kind, names = re.fullmatch(rf" *({kinds}) (.*);", line).groups()  # type: ignore[union-attr]
        fields += [(name.strip(" *"), types[kind]) for name in names.split(",")]
    assert fields == list(structure._fields_)


def test_a_compile_error_contains_the_compilers_log() -> None:
    with pytest.raises(
        RuntimeError, match=r"small_m_gemm\.cu does not compile with .*sm_90.*\n.*BITS"
    ):
        nvrtc.compile_source("small_m_gemm.cu", "sm_90")


@pytest.mark.covering
@pytest.mark.parametrize(
    ("in_features", "stored"),
    [(size, WIDE) for size in (64, 320, 2048, 4096, 8192, 12288, 14336)]
    + [(size, SCALED) for size in (128, 640, 2048, 4096, 8192, 12288, 14336)]
    + [(size, each) for size in (256, 2048, 3584, 4096, 8192, 14336) for each in CODES],
)
@pytest.mark.parametrize("rows", [1, 4, MAX_ROWS])
def test_common_widths_fit_into_shared_memory_with_a_deep_enough_ring(
    rows: int, in_features: int, stored: Stored
) -> None:
    fitting = small_m_plan.splits_that_fit(rows, in_features, stored)
    assert fitting
    for splits in fitting:
        ring = small_m_plan.ring_of(rows, in_features, splits, stored)
        assert ring is not None and ring.depth >= small_m_plan.MIN_DEPTH
        assert ring.bytes_of_all <= small_m_plan.MAX_RING_BYTES[stored.bits]
        assert small_m_plan.shared_bytes(rows, in_features, splits, ring) <= nvrtc.SHARED_BYTES
        assert in_features % (splits * ring.step_columns) == 0


def test_widths_that_do_not_fit_have_no_plan() -> None:
    assert small_m_plan.splits_that_fit(MAX_ROWS, 28672) == ()  # 229 KB of x in each of two CTAs
    assert small_m_plan.splits_that_fit(1, 100) == ()  # no whole steps
    assert small_m_plan.splits_that_fit(1, 64, SCALED) == ()  # less than a block


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("in_features", "features"),
    [(4096, 6144), (14336, 4096), (4096, 14336), (4096, 128256), (64, 48)],
)
def test_tiles_cover_the_output_once_and_balance_the_multiprocessors(
    in_features: int, features: int, gated: bool
) -> None:
    processors = 132
    tiles = small_m_plan.tiles_of(4, in_features, features, gated, processors)
    rows_of_tile = tiles.row_groups * (8 if gated else 16)
    assert (tiles.number - 1) * rows_of_tile < features <= tiles.number * rows_of_tile
    workers = min(tiles.number, processors // tiles.splits)
    most = -(-tiles.number // workers) * rows_of_tile / tiles.splits
    smallest = (8 if gated else 16) / tiles.splits
    assert most <= small_m_plan.TOLERANCE * (features / processors + smallest)


@pytest.mark.gpu
@on_each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("in_features", "out_features", "stored"),
    [
        *((4096, 6144, WIDE), (14336, 4096, WIDE), (12288, 4096, WIDE), (64, 48, WIDE)),
        *((192, 1000, WIDE), (128, 50258, WIDE), (320, 512, WIDE)),
        *((4096, 6144, SCALED), (14336, 4096, SCALED), (128, 50258, SCALED), (640, 1000, SCALED)),
        *((*sizes, each) for sizes in ((4096, 6144), (14336, 4096), (256, 1000)) for each in CODES),
    ],
)
def test_the_kernel_is_as_accurate_as_its_reference(
    in_features: int,
    out_features: int,
    stored: Stored,
    dtype: torch.dtype,
    norm: bool,
    gated: bool,
    adds: bool,
    has_bias: bool,
) -> None:
    for rows in (1, 2, 5, 8):
        sizes, form = (rows, in_features, out_features), (norm, gated, adds, has_bias)
        case, again = (Case(sizes, form, dtype, "cuda", stored) for _ in range(2))
        expected = case.expected()
        assert serves(case.x, case.weight, case.scales, case.group)
        error, of_reference = (
            relative_error(case.run(), expected),
            relative_error(again.run(plain_small_m_gemm), expected),
        )
        assert error < 1.5 * of_reference + 1e-4


@pytest.mark.gpu
@on_each_further
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes", [(2560, 20480, WIDE), (2560, 256, WIDE), (4096, 6144, SCALED)], ids=str
)
def test_the_kernel_gates_with_gelu_and_what_is_given(
    sizes: tuple[int, int, Stored], dtype: torch.dtype, further: str
) -> None:
    for rows in (1, 8):
        given = (rows, *sizes[:2]), FURTHER[further], dtype, "cuda", sizes[2], further
        case, again = Case(*given), Case(*given)
        expected = case.expected()
        assert serves(case.x, case.weight, case.scales)
        of_reference = relative_error(again.run(plain_small_m_gemm), expected)
        assert relative_error(case.run(), expected) < 1.5 * of_reference + 1e-4


@pytest.mark.gpu
def test_only_the_residual_stream_is_written() -> None:
    case = Case((3, 256, 512), (True, False, True, False), torch.bfloat16, "cuda")
    assert case.total is not None
    whole = case.total._base if case.total._base is not None else case.total
    before = whole.clone()
    case.run()
    assert torch.equal(whole[:, :512], before[:, :512]) and torch.equal(
        whole[:, 1024:], before[:, 1024:]
    )
    assert not torch.equal(whole[:, 512:1024], before[:, 512:1024])


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [WIDE, SCALED, CODES[2]], ids=str)
def test_a_row_has_the_same_bits_with_any_number_of_rows(stored: Stored) -> None:
    case = Case((8, 4096, 4096), (True, False, False, False), torch.bfloat16, "cuda", stored)
    together = case.run()
    for rows in range(1, 8):
        own = {"scales": case.scales, "group": case.group, "norm": case.norm}
        alone = small_m_gemm(case.x[:rows], case.weight, **own)
        assert torch.equal(alone, together[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_fp8_number_is_converted_exactly(dtype: torch.dtype) -> None:
    """A row of W per number, at another column in each, and 0 elsewhere."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes = codes[(codes & 0x7F) != 0x7F].repeat_interleave(4)  # without NaN
    weight = torch.zeros(len(codes), 256, dtype=torch.uint8, device="cuda")
    columns = torch.arange(len(codes), device="cuda") * 37 % 256
    weight[torch.arange(len(codes)), columns] = codes
    scales = 2.0 ** torch.randint(-3, 4, (len(codes), 2), device="cuda")
    x = torch.ones(2, 256, dtype=dtype, device="cuda")
    found = small_m_gemm(x, weight.view(FP8), scales=scales)
    values = codes.view(FP8).float() * scales.gather(1, columns[:, None] // BLOCK)[:, 0]
    assert torch.equal(found, values.to(dtype).expand(2, -1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", CODES, ids=str)
def test_every_code_is_converted_exactly_with_its_scale_and_zero_point(
    stored: Stored, dtype: torch.dtype
) -> None:
    """With 8 rows of the identity at a time as x the output is 8 columns of the weight."""
    case = Case((8, 512, 200), (False,) * 4, dtype, "cuda", stored)
    identity = torch.eye(512, dtype=dtype, device="cuda")
    for rows in identity.split(8):
        found = small_m_gemm(rows, case.weight, scales=case.scales, group=case.group)
        assert torch.equal(found.double(), (rows.double() @ case.numbers.t()).to(dtype).double())


@pytest.mark.gpu
@pytest.mark.parametrize("power", [-40, 40])
@pytest.mark.parametrize("stored", [SCALED, *CODES], ids=str)
def test_small_and_large_inputs_keep_all_their_bits(stored: Stored, power: int) -> None:
    """The products of quantised weights have another power of two than those of the formula."""
    case = Case((8, 4096, 1000), (False,) * 4, torch.bfloat16, "cuda", stored)
    own = {"scales": case.scales, "group": case.group}
    found = small_m_gemm(case.x * 2.0**power, case.weight, **own)
    assert torch.equal(found, small_m_gemm(case.x, case.weight, **own) * 2.0**power)


@pytest.mark.gpu
def test_pdl_kernels_wait_for_the_previous_kernels_output() -> None:
    """A chain in which each GEMM reads the previous one's output, with and without pauses."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [
        torch.randn(4096, 4096, generator=generator, device="cuda", dtype=torch.bfloat16) / 64
        for _ in range(24)
    ]
    norm = NormWeight(torch.ones(4096, device="cuda", dtype=torch.bfloat16), EPS)
    start = torch.randn(4, 4096, generator=generator, device="cuda", dtype=torch.bfloat16)

    def chain(pause: bool) -> torch.Tensor:
        total = start.clone()
        for weight in weights:
            small_m_gemm(small_m_gemm(total, weight, norm=norm), weight, add_to=total)
            if pause:
                torch.cuda.synchronize()
        return total

    expected = chain(pause=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = chain(pause=False)
    for _ in range(20):
        graph.replay()
        assert torch.equal(output, expected)
        assert torch.equal(chain(pause=False), expected)
