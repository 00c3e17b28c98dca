"""The input of a draft head's first layer: the kernel against its reference, and both against
the formula in float64."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.cuda_graphs import captured_graph
from tests.kernels.interpreter import (
    ROUNDING,
    check_like_the_reference,
    on_each_kernel_device,
    only_outside_the_interpreter,
)
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.drafts.draft_input import DraftInput, DraftInputNorms, draft_input

EPS = 1e-5
VOCAB_SIZE = 37
MAX_POSITIONS, HEAD_DIM = 19, 12
SHAPES = [(1, 4096), (3, 192), (5, 100), (2, 1), (7, 2560), (0, 64)]
WANTED: dict[str, list[int] | None] = {"all": None, "some": [4, 1, 3], "twice": [2, 2], "none": []}
on_each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
on_each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, DraftInputNorms, Rotary]


def arguments(
    shape: tuple[int, int], dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> Arguments:
    """Token ids, table, hidden states, two different norms, and rotary; rows of very different
    magnitudes."""
    (num_rows, size), generator = shape, torch.Generator().manual_seed(seed)

    def rows(number: int) -> torch.Tensor:
        sizes = torch.logspace(-3, 1, number)[:, None]
        return (torch.randn(number, size, generator=generator) * sizes).to(device, dtype)

    def weight() -> torch.Tensor:
        return (torch.rand(size, generator=generator) + 0.5).to(device, dtype)

    token_ids = torch.randint(VOCAB_SIZE, (num_rows,), generator=generator)
    token_ids[:2] = torch.tensor([VOCAB_SIZE - 1, 0])[:num_rows]  # the table's last and first row
    norms = DraftInputNorms(weight(), weight(), EPS)
    cos_sin = torch.randn(MAX_POSITIONS, 2, 1, HEAD_DIM, generator=generator).to(device, dtype)
    positions = torch.randint(MAX_POSITIONS, (num_rows,), generator=generator).to(device)
    positions[:1] = MAX_POSITIONS - 1
    rotary = Rotary(cos_sin, positions)
    return token_ids.to(device), rows(VOCAB_SIZE), rows(num_rows), norms, rotary


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The formula in float64."""
    return x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def check(found: DraftInput, given: Arguments, wanted: torch.Tensor | None = None) -> None:
    token_ids, table, hidden, norms, rotary = given
    assert found.both.dtype == hidden.dtype and found.both.is_contiguous()
    expected = torch.cat(
        (normed(table[token_ids], norms.embedding), normed(hidden, norms.hidden)), -1
    )
    # One rounding of the result, plus the error of the float32 arithmetic before it.
    rounding = ROUNDING[hidden.dtype] + 6e-7
    torch.testing.assert_close(found.both.double(), expected, rtol=rounding, atol=1e-7)
    assert torch.equal(found.total, hidden if wanted is None else hidden[wanted])
    cos_sin = found.rotary.cos_sin
    assert cos_sin.is_contiguous() and torch.equal(cos_sin, rotary.table[rotary.positions])


@on_each_shape
@on_each_dtype
def test_the_reference_equals_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    given = arguments(shape, dtype)
    check(draft_input.reference(*given), given)


@on_each_kernel_device
@on_each_shape
@on_each_dtype
def test_the_kernel_equals_the_formula_and_its_reference(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    assert has_kernels(torch.device(device))
    given = arguments(shape, dtype, device)
    before = given[2].clone()
    found = draft_input(*given)
    assert torch.equal(given[2], before) and found.rotary.gathered is not None
    check(found, given)
    check_like_the_reference(found.both, draft_input.reference(*given).both)


@on_each_kernel_device
@on_each_dtype
def test_without_ids_the_table_has_the_embeddings_of_the_rows(
    dtype: torch.dtype, device: str
) -> None:
    token_ids, table, *others = arguments((5, 192), dtype, device)
    expected = draft_input(token_ids, table, *others)
    found = draft_input(None, table[token_ids], *others)
    assert torch.equal(found.both, expected.both) and torch.equal(found.total, expected.total)


def check_total(wanted: list[int] | None, device: str) -> None:
    given = arguments((5, 192), torch.bfloat16, device)
    rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int64, device=device)
    found = draft_input(*given, rows)
    check(found, given, rows)
    before = given[2].clone()
    found.total.fill_(7)
    assert torch.equal(given[2], before)


@on_each_kernel_device
@pytest.mark.parametrize("name", WANTED)
def test_total_is_a_copy_of_the_wanted_rows(name: str, device: str) -> None:
    check_total(WANTED[name], device)


@only_outside_the_interpreter
@pytest.mark.parametrize("name", WANTED)
def test_the_references_total_is_a_copy_of_the_wanted_rows(name: str) -> None:
    check_total(WANTED[name], "cpu")


@on_each_kernel_device
@on_each_dtype
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, device: str) -> None:
    token_ids, table, hidden, norms, rotary = arguments((6, 1000), dtype, device)
    whole = draft_input(token_ids, table, hidden, norms, rotary).both
    for row in range(6):
        own = slice(row, row + 1)
        own_rotary = Rotary(rotary.table, rotary.positions[own])
        alone = draft_input(token_ids[own], table, hidden[own], norms, own_rotary).both
        assert torch.equal(alone[0], whole[row])


@on_each_kernel_device
def test_hidden_states_may_be_views(device: str) -> None:
    token_ids, table, hidden, norms, rotary = arguments((8, 3 * 192), torch.bfloat16, device)
    columns = slice(192, 384)
    norms = replace(norms, embedding=norms.embedding[columns], hidden=norms.hidden[columns])
    given = (
        token_ids[:4],
        table[:, columns].contiguous(),
        hidden[::2, columns],
        norms,
        rotary.first(4),
    )
    wanted = torch.tensor([3, 0], device=device)
    check(draft_input(*given, wanted), given, wanted)


@on_each_kernel_device
def test_the_embedding_at_position_0_may_be_zeros(device: str) -> None:
    given = arguments((5, 192), torch.bfloat16, device)
    given[4].positions[1] = 0
    expected = draft_input(*given).both.clone()
    expected[given[4].positions == 0, :192] = 0
    given = *given[:3], replace(given[3], hides_first=True), given[4]
    assert torch.equal(draft_input(*given).both, expected)
    assert torch.equal(draft_input.reference(*given).both[:, :192].any(1), expected[:, :192].any(1))


@on_each_kernel_device
def test_a_nan_stays_in_its_own_half_of_its_row(device: str) -> None:
    given = arguments((4, 192), torch.bfloat16, device)
    given[2][1, 7] = torch.nan
    halves = draft_input(*given).both.view(4, 2, 192).isnan().any(-1)
    assert halves.nonzero().tolist() == [[1, 1]]


@on_each_kernel_device
@on_each_shape
def test_without_norms_both_halves_are_copies(shape: tuple[int, int], device: str) -> None:
    token_ids, table, hidden, _, rotary = arguments(shape, torch.bfloat16, device)
    wanted = token_ids[:0]
    for make in (draft_input, draft_input.reference):
        found = make(token_ids, table, hidden, None, rotary, wanted)
        assert torch.equal(found.both, torch.cat((table[token_ids], hidden), -1))
        assert found.total.shape == (0, shape[1])
        assert torch.equal(found.rotary.cos_sin, rotary.table[rotary.positions])


@on_each_kernel_device
def test_epsilon_is_used(device: str) -> None:
    token_ids, table, hidden, norms, rotary = arguments((2, 64), torch.float32, device)
    large = replace(norms, eps=3.0)
    found = draft_input(token_ids, table, hidden, large, rotary).both
    torch.testing.assert_close(
        found, draft_input.reference(token_ids, table, hidden, large, rotary).both
    )
    assert (found - draft_input(token_ids, table, hidden, norms, rotary).both).abs().amax() > 0.1


@pytest.mark.gpu
@on_each_dtype
def test_a_captured_graph_reads_its_inputs_at_replay(dtype: torch.dtype) -> None:
    given = arguments((6, 4096), dtype, "cuda")
    token_ids, _, hidden, _, rotary = given
    wanted = torch.tensor([5, 2], device="cuda")
    graph, found = captured_graph(lambda: draft_input(*given, wanted))
    for seed in (1, 2):
        new = arguments((6, 4096), dtype, seed=seed)
        token_ids.copy_(new[0])
        hidden.copy_(new[2])
        rotary.positions.copy_(new[4].positions)
        wanted.copy_(torch.tensor([seed, 0]))
        graph.replay()
        check(found, given, wanted)
