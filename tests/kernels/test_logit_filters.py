"""Cuts of filters and bitmasks of grammars."""

import sys
from fractions import Fraction
from math import exp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cuda_graphs import captured_graph
from tests.kernels.interpreter import on_each_kernel_device
from tests.random_examples import examples
from tllm_spec.kernels.sampling.logit_filters import filter_cut, mask_tokens, token_weights

INF, NAN = float("inf"), float("nan")
Columns = tuple[torch.Tensor, ...]  # temperature, top_k, top_p, min_p


def columns(rows: list[tuple[float, int, float, float]]) -> Columns:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p)


def check(logits: torch.Tensor, parameters: Columns, device: str) -> torch.Tensor:
    expected = filter_cut.reference(logits, *parameters)
    found = filter_cut(logits.to(device), *(column.to(device) for column in parameters)).cpu()
    assert torch.equal(found, expected), (found, expected)
    return expected


def kept_by_definition(values: list[float], top_k: int, top_p: float, min_p: float) -> set[float]:
    """The filters' definition for each value, in exact arithmetic on the reference's weights."""
    best = max(values)
    floor = (
        (torch.tensor(best) + torch.tensor(min_p).double().log().float()).item()
        if min_p > 0
        else -INF
    )
    inside = [v for v in values if v >= floor and sum(w > v for w in values) < top_k]
    if top_p >= 1:
        return set(inside)
    weights = dict(
        zip(values, token_weights(torch.tensor(values), torch.tensor(best)).tolist(), strict=True)
    )
    limit = Fraction(top_p) * sum(weights[v] for v in inside)
    return {v for v in inside if v == best or sum(weights[w] for w in inside if w > v) < limit}


PARAMETERS = st.tuples(
    st.integers(1, 40),
    # Exact in float.
    st.sampled_from([0.0, 0.125, 0.5, 0.75, 0.875, 0.984375, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


@examples(150)
@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=30),
    PARAMETERS,
    st.sampled_from([0.5, 1.0, 7.0]),
)
def test_the_reference_equals_the_definition_with_many_ties(
    logits: list[int], parameters: tuple[int, float, float], spread: float
) -> None:
    values = [spread * logit for logit in logits]
    top_k, top_p, min_p = parameters
    cut = filter_cut.reference(
        torch.tensor([values]), *columns([(1.0, top_k, top_p, min_p)])
    ).item()
    assert {v for v in values if v >= cut} == kept_by_definition(values, top_k, top_p, min_p)


def test_weights_are_exponentials_to_a_few_parts_in_ten_million() -> None:
    x = -torch.linspace(0, 27, 20_001)
    expected = torch.tensor([exp(value) for value in x.tolist()], dtype=torch.float64) * 2.0**40
    found = token_weights(x, torch.zeros(()))
    assert ((found - expected).abs() <= 1 + expected * 3e-7).all()
    ends = token_weights(torch.tensor([5.0, -INF, -100.0]), torch.tensor(5.0))
    assert ends.tolist() == [1 << 40, 0, 0]
    assert token_weights(torch.tensor([INF, 3.0, -INF]), torch.tensor(INF)).tolist() == [
        1 << 40,
        0,
        0,
    ]


def test_off_and_greedy_rows_have_no_cut() -> None:
    rows = [(1.0, 9, 1.0, 0.0), (0.0, 1, 0.1, 0.9), (1.0, 1000, 1.0, 0.0)]
    assert filter_cut.reference(torch.randn(3, 9), *columns(rows)).tolist() == [-INF] * 3


def test_a_tensor_on_the_cpu_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    # Makes the import of the module fail.
    monkeypatch.setitem(sys.modules, "tllm_spec.kernels.sampling.logit_filters", None)
    assert filter_cut(torch.ones(1, 5).bfloat16(), *columns([(1.0, 2, 1.0, 0.0)])).item() == 1.0


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 5, 2051])
def test_the_kernels_cuts_equal_the_references(
    device: str, dtype: torch.dtype, vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    rows = [
        (0.7, 3, 1.0, 0.0),
        (1.3, vocab_size, 0.9, 0.0),
        (1.0, vocab_size, 1.0, 0.05),
        (0.9, 50, 0.8, 0.02),
        (0.0, 1, 0.1, 0.5),
        (1.0, 1, 1e-6, 0.0),
        (4.0, vocab_size - 1 or 1, 0.999, 1e-9),
        (1e-3, vocab_size, 0.999, 0.0),
    ]
    for scale in (0.05, 3.0, 30.0):
        logits = (torch.randn(len(rows), vocab_size, generator=generator) * scale).to(dtype)
        check(logits, columns(rows), device)


@pytest.mark.slow
@on_each_kernel_device
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_the_kernels_cuts_equal_the_references_with_ties_zeros_and_infinities(
    device: str, dtype: torch.dtype
) -> None:
    logits = torch.full((10, 1500), -2.0)
    logits[0, ::3] = 1.0  # 500 ties
    logits[1, 7], logits[1, 9] = 0.0, -0.0
    logits[2, 100] = INF
    logits[3, 5:9], logits[3, 20] = INF, 60000.0
    logits[4] = -INF
    logits[5], logits[5, 3] = -INF, -50.0
    logits[6] = torch.linspace(-1e-7, 1e-7, 1500)
    logits[7, 1], logits[7, 2] = 2.0, 1.0
    logits[8] = torch.linspace(-100, 100, 1500)
    logits[9, :700] = 2.0
    for k, p, m in (
        (2, 1.0, 0.0),
        (1500, 0.4, 0.0),
        (1500, 0.999, 0.0),
        (700, 0.9, 0.1),
        (1, 0.0, 1.0),
    ):
        check(logits.to(dtype), columns([(0.8, k, p, m)] * 10), device)
    # Divided by these, different logits become equal: zeros or infinities.
    for temperature in (1e-38, 1e38):
        for k, p in ((3, 1.0), (1500, 0.5), (800, 0.3)):
            check(logits.to(dtype), columns([(temperature, k, p, 0.0)] * 10), device)


@on_each_kernel_device
def test_a_walk_of_several_steps_counts_every_value_once(device: str) -> None:
    """Adjacent bfloat16 values from 8 down to 1e-28, which take three steps."""
    logits = (0x4100 - torch.arange(12288)).to(torch.int16).view(torch.bfloat16)
    rows = [(1.0, k, 1.0, 0.0) for k in (4096, 4097, 8192, 8193, 12288)]
    rows += [
        (t, k, p, 0.0) for t, k, p in ((1.0, 99999, 0.9), (50.0, 99999, 0.7), (50.0, 9000, 0.9))
    ]
    check(logits.repeat(len(rows), 1), columns(rows), device)


@on_each_kernel_device
def test_a_nan_is_never_below_the_cut(device: str) -> None:
    logits = torch.randn(2, 1500).bfloat16()
    logits[0, 3] = NAN
    # A NaN with its sign bit set.
    logits[1, 1200] = torch.tensor([-64], dtype=torch.int16).view(torch.bfloat16)
    for row in ((1.0, 5, 0.9, 0.1), (1.0, 1500, 0.9, 0.0), (1.0, 1500, 1.0, 0.3)):
        parameters = columns([row] * 2)
        for cut in (
            filter_cut(logits.to(device), *(column.to(device) for column in parameters)).cpu(),
            filter_cut.reference(logits, *parameters),
        ):
            assert ((logits >= cut.unsqueeze(1)) | logits.isnan()).any(dim=1).all()
            assert not (logits[logits.isnan()].float() < cut).any()


@on_each_kernel_device
def test_arguments_may_be_columns_and_slices_of_tables(device: str) -> None:
    table = torch.randn(8, 1300).bfloat16()
    floats = torch.tensor([[0.5, 0.9, 0.01], [1.5, 0.7, 0.0], [1.0, 1.0, 0.2], [0.7, 0.5, 0.1]])
    integers = torch.tensor([[4, 1], [900, 2], [9000, 3], [7, 4]])
    check(table[::2, 1:1101], (floats[:, 0], integers[:, 0], floats[:, 1], floats[:, 2]), device)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(-32768, 32767), min_size=1, max_size=60),
    PARAMETERS,
    st.sampled_from([0.3, 1.0, 2.5]),
)
@on_each_kernel_device
def test_the_kernels_cuts_equal_the_references_for_any_bits(
    device: str, bits: list[int], parameters: tuple[int, float, float], temperature: float
) -> None:
    logits = torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16)
    logits = logits.nan_to_num(nan=1.0, posinf=INF, neginf=-INF)
    check(logits, columns([(temperature, *parameters)]), device)


@pytest.mark.gpu
def test_a_captured_graph_gives_the_references_cuts_of_a_large_vocabulary() -> None:
    num_rows, vocab_size = 24, 128256
    rows = [
        (
            0.5 + index / 20,
            (50, vocab_size, 2000)[index % 3],
            (0.9, 1.0, 0.5, 0.9999)[index % 4],
            0.01 * (index % 2),
        )
        for index in range(num_rows)
    ]
    parameters = tuple(column.cuda() for column in columns(rows))
    buffer = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    graph, cut = captured_graph(lambda: filter_cut(buffer, *parameters))
    for seed, scale in ((1, 0.3), (2, 3.0), (3, 10.0)):
        logits = (
            torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
        ).bfloat16()
        buffer.copy_(logits)
        graph.replay()
        assert torch.equal(cut.cpu(), filter_cut.reference(logits, *columns(rows)))


SHAPES = [(1, 31), (3, 64), (2, 5000)]
on_each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def arguments(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of three rows more than are masked; the last may have one token only, which something
    else has excluded."""
    num_masks, vocab_size = shape
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_masks + 3, vocab_size, generator=generator)
    words = torch.randint(
        -(2**31), 2**31, (num_masks, -(-vocab_size // 32)), generator=generator
    ).to(torch.int32)
    words[0, 0] = -1  # all allowed, the sign bit included
    mask_of_row = torch.arange(num_masks + 3, dtype=torch.int32).flip(0) - 2
    mask_of_row[-1] = -2 - only_token(shape)
    logits[-1, only_token(shape)] = -torch.inf
    return logits, mask_of_row.where(mask_of_row < num_masks, -1), words


def only_token(shape: tuple[int, int]) -> int:
    return shape[1] // 2


@on_each_shape
def test_only_excluded_tokens_of_rows_with_a_mask_become_minus_infinity(
    shape: tuple[int, int],
) -> None:
    logits, mask_of_row, words = arguments(shape)
    assert sorted(mask_of_row.tolist()) == [-2 - only_token(shape), -1, -1, *range(shape[0])]
    expected = logits.clone()
    for row, index in enumerate(mask_of_row.tolist()):
        for token in range(shape[1] if index >= 0 else 0):
            if not (int(words[index, token // 32]) >> (token % 32)) & 1:
                expected[row, token] = -torch.inf
    expected[-1] = -torch.inf
    expected[-1, only_token(shape)] = 0
    mask_tokens.reference(logits, mask_of_row, words)
    assert torch.equal(logits, expected)


@on_each_shape
def test_some_columns_are_masked_like_the_whole(shape: tuple[int, int]) -> None:
    logits, mask_of_row, words = arguments(shape)
    expected, first, last = logits.clone(), shape[1] // 3, shape[1] - 4
    mask_tokens.reference(expected, mask_of_row, words)
    own = logits[:, first:last].contiguous()
    mask_tokens.reference(own, mask_of_row, words, first)
    assert torch.equal(own, expected[:, first:last])


@on_each_kernel_device
@on_each_shape
@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_equals_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, first: int, device: str
) -> None:
    logits, mask_of_row, words = (each.to(device) for each in arguments(shape))
    logits = logits.to(dtype)[:, first:].contiguous()
    expected = logits.clone()
    mask_tokens.reference(expected, mask_of_row, words, first)
    mask_tokens(logits, mask_of_row, words, first)
    assert torch.equal(logits, expected)
