"""The grouped GEMMs of a mixture of experts with weights in 16 and 32 bits, in FP8 and in 4 bits:
the formula, that only experts that are hit are read, and that a row has the same bits in every
batch. Under Triton's interpreter in a subprocess, and on a CUDA device with models' shapes."""

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.kernels.hopper import compiled_for_hopper
from tests.kernels.interpreter import (
    INTERPRETED,
    ROUNDING,
    on_each_kernel_device,
    only_outside_the_interpreter,
    only_with_the_compiler,
)
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.experts.grouped_gemm import (
    MOST_ROWS,
    TILINGS,
    ExpertWeights,
    Form,
    block_rows_of,
    down,
    gate_up_silu,
)
from tllm_spec.kernels.experts.permute import ExpertRows, moe_permute
from tllm_spec.kernels.gemm.fp8_numbers import quantise_rows
from tllm_spec.kernels.gemm.int4_weights import (
    exponent_words,
    group_words,
    int4_dequantised,
    packed,
)

FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dataclass(frozen=True)
class Shape:
    num_experts: int
    top_k: int
    hidden: int
    inner: int


# Of FP8 what shares scales of activations and of weights; of 4 bits the inputs that share a word.
KINDS: dict[str, Form] = {
    "plain": "plain",
    "fp8": "fp8",
    "token": "codes",
    "block": "blocks",
    "block of a token": "blocks",
    "tile": "tiles",
}
CODES = tuple(KINDS)[2:]
FORMS = (*KINDS, "int4 32", "int4 128", "mxfp4 32", "nvfp4 16")
on_each_form = pytest.mark.parametrize("form", [form for form in FORMS if form != "tile"])
# Less than a block of inputs, incomplete blocks, and one expert for everything.
SMALL = [Shape(5, 2, 96, 40), Shape(3, 1, 160, 224), Shape(1, 1, 320, 130)]
QWEN3 = Shape(128, 8, 2048, 768)
V3 = Shape(64, 8, 2048, 1408)
GPT_OSS = Shape(32, 4, 2880, 2880)
LIMIT = 1.5
# Relative to the sum of magnitudes: of products in 16 bits, and in FP8, which tensor cores sum with
# fewer bits: 13 below the largest summand.
SUM_ERROR = (2.0**-19, 2.0**-19 if INTERPRETED else 2.0**-12)
PLAIN_ERROR = {torch.float32: 6e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Problem:
    """`gate_up` and `down` are the weights in float64."""

    form: str
    x: torch.Tensor
    layers: tuple[ExpertWeights, ExpertWeights]
    gate_up: torch.Tensor
    down: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    """Factors of the experts that are taken, `[T, k]`."""

    @property
    def rows(self) -> ExpertRows:
        number = len(self.gate_up)
        own = self.experts.numel(), number, self.x.dtype, self.x.device
        kind = KINDS.get(self.form, "int4")
        return moe_permute(self.experts, number, block_rows_of(*own, kind))

    def of(self, tokens: slice) -> "Problem":
        own = {"experts": self.experts[tokens].contiguous(), "weights": self.weights[tokens]}
        return replace(self, x=self.x[tokens], **own)

    def inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What a layer reads, and its options."""
        if self.form not in CODES:
            return x, {}
        codes, scales = quantise_rows(x, in_blocks=self.form in ("block", "tile"))
        return codes, {"code_scales": scales}

    def inner(self, limit: float | None = None, *, is_weighted: bool = False) -> torch.Tensor:
        x, options = self.inputs(self.x)
        own = self.layers[0], self.rows, self.weights if is_weighted else None
        return gate_up_silu(x, *own, limit=limit, dtype=self.x.dtype, **options)

    def output(self, inner: torch.Tensor) -> torch.Tensor:
        """Each assignment's output `[T * k, H]`."""
        x, options = self.inputs(inner)
        return down(x, self.layers[1], self.rows, dtype=self.x.dtype, **options)


def weights_of(
    form: str, weight: torch.Tensor, generator: torch.Generator, dtype: torch.dtype
) -> tuple[ExpertWeights, torch.Tensor]:
    """A random layer of weight's shape `[E, N, K]`, and its values in float64."""
    device, (number, outputs, inputs) = weight.device, weight.shape
    if form == "plain":
        stored = (weight * inputs**-0.5).to(dtype)
        return ExpertWeights(stored), stored.double()
    if form == "fp8":  # scales are powers of two and differ by expert, output and block of inputs
        shape = number, outputs, -(-inputs // 128)
        scales = torch.randint(-8, 1, shape, generator=generator, device=device).float().exp2()
        stored, by_input = weight.to(FP8), scales.double().repeat_interleave(128, 2)
        return ExpertWeights(stored, scales), stored.double() * by_input[..., :inputs]
    bias = torch.randn(number, outputs, generator=generator, device=device).bfloat16()
    if form in CODES:
        columns = 1 if form == "token" else -(-inputs // 128)
        scales = torch.rand(number, columns, outputs, generator=generator, device=device)
        if has_tiles := form == "tile":
            scales, bias = scales[..., ::128].repeat_interleave(128, 2), None
        scales = scales.add_(0.5).div_(inputs**0.5).transpose(1, 2)
        stored = weight.to(FP8)
        by_input = scales.double().repeat_interleave(128 if columns > 1 else inputs, 2)
        layer = ExpertWeights(stored, scales, bias=bias, has_tiles=has_tiles)
        return layer, stored.double() * by_input[..., :inputs]
    kind, group = form.split()
    size = int(group)
    codes = torch.randint(0, 16, weight.shape, generator=generator, device=device).byte()
    shape = number, outputs, -(-inputs // size)
    exponents = torch.randint(-8, -4, shape, generator=generator, device=device)
    words = exponents.float().exp2()
    if kind == "int4":
        zeros = torch.randint(0, 16, shape, generator=generator, device=device)
        words = group_words(words, zeros)
    elif kind == "mxfp4":
        words = exponent_words(words)
    stored = torch.stack([packed(each) for each in codes])
    values = [
        int4_dequantised(*each, size, torch.float32) for each in zip(codes, words, strict=True)
    ]
    return ExpertWeights(stored, words, size, bias), torch.stack(values).double()


def problem(form: str, shape: Shape, num_tokens: int, dtype: torch.dtype, device: str) -> Problem:
    generator = torch.Generator(device).manual_seed(num_tokens)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    experts, inner, hidden = shape.num_experts, shape.inner, shape.hidden
    gate_up = weights_of(form, normal(experts, 2 * inner, hidden), generator, dtype)
    last = weights_of(form, normal(experts, hidden, inner), generator, dtype)
    taken = normal(num_tokens, experts).argsort(-1)[:, : shape.top_k].int().contiguous()
    x = normal(num_tokens, hidden).to(dtype)
    factors = normal(num_tokens, shape.top_k).sigmoid()
    return Problem(form, x, (gate_up[0], last[0]), gate_up[1], last[1], taken, factors)


def values_of(p: Problem, x: torch.Tensor) -> torch.Tensor:
    """What a layer multiplies, in float64."""
    codes, options = p.inputs(x)
    if not options:
        return x.double()
    scales = options["code_scales"].double()
    by_input = scales.t().repeat_interleave(128 if len(scales) > 1 else x.shape[1], 1)
    return codes.double() * by_input[:, : x.shape[1]]


def swiglu(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    if limit is None:
        return gate * gate.sigmoid() * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (1.702 * gate).sigmoid() * (up + 1)


def check(
    p: Problem,
    limit: float | None = None,
    *,
    is_weighted: bool = False,
    outputs: tuple[torch.Tensor, torch.Tensor] | None = None,
    product_error: float = 0.0,
) -> None:
    """Each GEMM on its own, next to float64: the inputs of the second are the outputs of the
    first. outputs: of both; None: they are computed. product_error: if products are rounded."""
    rows, number = p.rows, len(p.gate_up)
    error_of_sums = SUM_ERROR[p.form in CODES] + product_error
    inner = p.inner(limit, is_weighted=is_weighted) if outputs is None else outputs[0]
    found = p.output(inner) if outputs is None else outputs[1]
    experts = rows.experts_of_rows(number)
    assert inner.dtype == found.dtype == p.x.dtype
    inputs = values_of(p, p.x)[rows.order.long() // rows.top_k], values_of(p, inner)
    if is_weighted:
        inputs[0].mul_(p.weights.flatten()[rows.order.long(), None])
    for layer, values, own, output in zip(
        p.layers, (p.gate_up, p.down), inputs, (inner, found[rows.order.long()]), strict=True
    ):
        expected = torch.empty(len(own), values.shape[1], dtype=torch.float64, device=own.device)
        bound = torch.empty_like(expected)
        for expert in range(number):
            mine, weight = experts == expert, values[expert].t()
            expected[mine] = own[mine] @ weight
            if layer.bias is not None:
                expected[mine] += layer.bias[expert].double()
            bound[mine] = (own[mine].abs() @ weight.abs()) * error_of_sums
        if layer is p.layers[0]:
            gates, ups = (each.abs() + 1 for each in expected.chunk(2, -1))
            of_gates, of_ups = bound.chunk(2, -1)
            bound = 2 * (of_gates * ups + of_ups * gates + of_gates * of_ups)
            expected = swiglu(expected, limit)
        bound += ROUNDING[p.x.dtype] * expected.abs()
        if p.form == "plain":
            bound = PLAIN_ERROR[p.x.dtype] * (expected.abs() + 1)
        assert ((output.double() - expected).abs() <= bound).all()


@pytest.mark.interpreted("form", "plain", "fp8")
@pytest.mark.thinned
@on_each_kernel_device
@on_each_dtype
@pytest.mark.parametrize("shape", SMALL, ids=str)
@on_each_form
def test_the_kernel_equals_the_formula(
    form: str, shape: Shape, dtype: torch.dtype, device: str
) -> None:
    assert has_kernels(torch.device(device))
    for num_tokens in (0, 1, 9, *([40] if form == "plain" else [])):
        p = problem(form, shape, num_tokens, dtype, device)
        check(p)
    if form == "plain":
        check(p, is_weighted=True)


@only_outside_the_interpreter
@on_each_form
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_the_reference_equals_the_formula(form: str, limit: float | None) -> None:
    if form != "plain":
        for shape in SMALL:
            check(problem(form, shape, 9, torch.float32, "cpu"), limit)
        return
    for shape, dtype, num_tokens, is_weighted in product(SMALL, DTYPES, (0, 1, 9), (False, True)):
        p = problem(form, shape, num_tokens, dtype, "cpu")
        error = 0.0 if dtype == torch.float32 else ROUNDING[dtype]  # products have 16 bits
        check(p, limit, is_weighted=is_weighted, product_error=error)


@on_each_kernel_device
@pytest.mark.parametrize("form", ["mxfp4 32", "block"])
def test_gates_and_ups_are_clamped_to_the_limit(form: str, device: str) -> None:
    p = problem(form, SMALL[0], 9, torch.float32, device)
    check(p, LIMIT)
    with pytest.raises(AssertionError):
        check(replace(p, gate_up=p.gate_up * 1.1), LIMIT)


@on_each_kernel_device
def test_gates_may_have_gelu(device: str) -> None:
    p = problem("plain", SMALL[0], 9, torch.float32, device)
    found, expected = (
        each(p.x, p.layers[0], p.rows, activation="gelu_pytorch_tanh")
        for each in (gate_up_silu, gate_up_silu.reference)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found - p.inner()).abs().max() > 1e-2


@pytest.mark.interpreted("form", "tile")
@on_each_kernel_device
@pytest.mark.parametrize("form", ["tile", "token", "int4 32", "fp8", "plain"])
def test_every_size_of_block_gives_the_formula(form: str, device: str) -> None:
    seen = set()
    shape = Shape(2, 1, 256, 128) if form == "tile" else Shape(2, 1, 160, 48)
    for num_tokens in (3, 30, 70, 150):
        p = problem(form, shape, num_tokens, torch.bfloat16, device)
        seen.add(p.rows.block_rows)
        check(p)
    assert seen == {16, 32, 64, MOST_ROWS[KINDS.get(form, "int4")]}
    assert form != "plain" or seen == set(TILINGS["plain"])


@pytest.mark.interpreted("form", "plain", "fp8")
@on_each_kernel_device
@on_each_form
def test_a_row_has_the_same_bits_alone_and_in_a_batch(form: str, device: str) -> None:
    p = problem(form, Shape(3, 2, 160, 96), 70, torch.bfloat16, device)
    expected = p.output(p.inner()).view(70, 2, -1)
    for tokens in (slice(69, 70), slice(3, 9), slice(10, 40)):  # smaller blocks
        own = p.of(tokens)
        assert torch.equal(own.output(own.inner()).view(-1, 2, 160), expected[tokens])


@on_each_kernel_device
def test_every_weight_has_its_own_scale(device: str) -> None:
    """Rows of the identity give the weights themselves."""
    p = problem("fp8", Shape(3, 1, 72, 148), 150, torch.bfloat16, device)
    inputs = torch.arange(150, device=device) % 148
    output = p.output(torch.nn.functional.one_hot(inputs, 148).to(p.x.dtype))
    for row, assignment in enumerate(p.rows.order.tolist()):
        own = p.down[int(p.experts[assignment, 0])]
        assert torch.equal(output[assignment].double(), own[:, inputs[row]])


@pytest.mark.slow
@on_each_kernel_device
def test_the_bounds_tell_scales_of_another_expert_output_or_block(device: str) -> None:
    p = problem("fp8", Shape(3, 2, 300, 140 if INTERPRETED else 260), 9, torch.bfloat16, device)
    for number, own in enumerate(p.layers):
        assert own.scales is not None
        for wrong in (own.scales.roll(1, dim) for dim in range(3)):
            layers = list(p.layers)
            layers[number] = replace(own, scales=wrong)
            with pytest.raises(AssertionError):
                check(replace(p, layers=(layers[0], layers[1])))


@pytest.mark.interpreted("form", "plain", "fp8")
@on_each_kernel_device
@pytest.mark.parametrize(("form", "num_tokens"), [("fp8", 5), ("plain", 2), ("plain", 150)])
def test_experts_that_no_token_takes_are_not_read(form: str, num_tokens: int, device: str) -> None:
    """Their weights or scales are NaN, and so is whatever is computed with them."""
    p = problem(form, Shape(8, 2, 64, 48), num_tokens, torch.float32, device)
    p.experts[:] = torch.tensor([5, 2], dtype=torch.int32)
    for own in p.layers:
        stored = own.weight if own.scales is None else own.scales
        stored[[0, 1, 3, 4, 6, 7]] = torch.nan
    check(p)


@on_each_kernel_device
def test_all_tokens_may_take_the_same_expert(device: str) -> None:
    p = problem("plain", Shape(6, 1, 64, 48), 70, torch.bfloat16, device)
    p.experts.fill_(3)
    check(p)


@only_outside_the_interpreter
def test_a_tensor_on_the_cpu_runs_the_reference_with_one_block_per_expert() -> None:
    p = problem("plain", SMALL[0], 40, torch.float32, "cpu")
    assert int(p.rows.num_blocks) == len(p.experts.unique())
    by_blocks = moe_permute.reference(p.experts, len(p.gate_up), 16)
    activated = gate_up_silu.reference(p.x, p.layers[0], by_blocks)
    expected = down.reference(activated, p.layers[1], by_blocks)
    torch.testing.assert_close(p.output(p.inner()), expected)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@pytest.mark.parametrize("shape", [QWEN3, V3, GPT_OSS], ids=str)
@pytest.mark.parametrize("form", ["plain", "fp8", "token", "block", "tile", "int4 128", "mxfp4 32"])
def test_the_number_of_rows_changes_no_bit_of_a_row_on_the_device(form: str, shape: Shape) -> None:
    if form == "tile" and shape == GPT_OSS:
        shape = Shape(4, 2, 768, 384)
    num_tokens = 4096 if form == "plain" else 1024
    p = problem(form, shape, num_tokens, torch.bfloat16, "cuda")
    check(p)
    expected = p.output(p.inner()).view(num_tokens, shape.top_k, -1)
    for number in (1, 8, 9, 64, 256, 600, *([2000] if form == "plain" else [])):
        own = p.of(slice(37, 37 + number))
        found = own.output(own.inner()).view(number, shape.top_k, -1)
        assert torch.equal(found, expected[37 : 37 + number]), number


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs")
def test_a_captured_graph_follows_the_routing_at_replay() -> None:
    static = problem("plain", QWEN3, 16, torch.bfloat16, "cuda")
    static.output(static.inner())  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inner = static.inner()
        output = static.output(inner)
    for hit in (8, 128):
        static.experts.copy_(torch.rand(16, hit, device="cuda").argsort(-1)[:, :8])
        graph.replay()
        check(static, outputs=(inner, output))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
def test_exact_weights_of_4_bits_give_the_bits_of_the_same_weights_in_bfloat16() -> None:
    p = problem("mxfp4 32", GPT_OSS, 1024, torch.bfloat16, "cuda")
    layers = zip(p.layers, (p.gate_up, p.down), strict=True)
    gate_up, down_ = (ExpertWeights(wide.bfloat16(), bias=own.bias) for own, wide in layers)
    for number in (1, 60, 1024):
        own = p.of(slice(number))
        other = replace(own, layers=(gate_up, down_))
        inner = own.inner(LIMIT)
        assert torch.equal(other.inner(LIMIT), inner)
        assert torch.equal(other.output(inner), own.output(inner))


@only_with_the_compiler
@pytest.mark.parametrize("form", ["block", "mxfp4 32"])
def test_the_compiled_kernel_feeds_hoppers_tensor_cores(form: str) -> None:
    """Codes of FP8 go there as they are. 4 bits become numbers, and biases and limits are there."""
    from tllm_spec.kernels.experts.grouped_gemm_triton import grouped_gemm_kernel

    is_codes = form in CODES
    tiling = TILINGS["blocks" if is_codes else "int4"][16].gate_up
    types = dict.fromkeys(("order", "blocks", "num_blocks"), "*i32")
    types |= dict.fromkeys(("x", "weight"), "*fp8e4nv") if is_codes else {"x": "*bf16"}
    types |= {"scales": "*fp32", "bias": "*bf16", "output": "*bf16"}
    types |= {"x_scales": "*fp32"} if is_codes else {"weight": "*u8", "scales": "*u32"}
    constants: dict[str, Any] = {"IN": 2048, "OUT": 768, "TOP_K": 8, "GATED": True, "SLOPE": 1.702}
    constants |= {"LIMIT": None if is_codes else 7.0, "GROUP": 0 if is_codes else 32}
    constants |= {"X_BLOCKS": is_codes, "W_BLOCKS": is_codes, "WIDEN": False, "PDL": True}
    constants |= {"ADDED": 128}
    constants |= {} if is_codes else {"x_scales": None, "x_scales_stride": 0}
    tile = {"BLOCK_ROWS": 16, "BLOCK_OUT": tiling.outputs, "BLOCK_IN": tiling.inputs}
    code = compiled_for_hopper(
        grouped_gemm_kernel,
        types,
        constants | tile | {"input_weights": None},
        ("num_inputs",),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    ptx = code.asm["ptx"]
    found = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+)", ptx))
    assert found == {"m64n16k32" if is_codes else "m64n16k16"} and "mma.sync" not in ptx
    assert "cp.async" in ptx and "ld.global.b8" not in ptx
