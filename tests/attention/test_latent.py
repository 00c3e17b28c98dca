"""MLA in every backend, over numbers and over FP8 codes, against attention of each query alone."""

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch

from tests.attention.batches import on_each_device
from tests.kernels.row_counts import rows_of
from tests.kernels.tree_problem import bits_of, random_paths
from tllm_spec.attention import batch_invariant
from tllm_spec.attention import latent as module
from tllm_spec.attention.batch_invariant import BatchInvariantLatent
from tllm_spec.attention.choice import create_backend, workspace_bytes
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool, LatentGeometry
from tllm_spec.attention.interface import AttentionMetadata
from tllm_spec.attention.latent import LatentBackend, LatentInputs, TritonLatent, VanillaLatent
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.kernels.attention.kv_codes import UNSCALED, KVScales, encoded
from tllm_spec.kernels.attention.latent_attention import MAX_PARTIAL_ROWS
from tllm_spec.kernels.attention.latent_prefill import MAX_EXPANDED_TOKENS
from tllm_spec.kernels.attention.latent_write import LatentNorm
from tllm_spec.kernels.attention.rotary_write import Rotary, plain_rotate
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.gemm.norms import rms_norm

LAYERS, HEADS, RANK, ROPE, NOPE, VALUE, PAGE_SIZE = 2, 3, 24, 8, 16, 12, 4
GEOMETRY = LatentGeometry(LAYERS, HEADS, RANK, ROPE, NOPE, VALUE, 0.2)
KINDS: list[type[LatentBackend]] = [VanillaLatent, TritonLatent]
ALL_KINDS = [*KINDS, BatchInvariantLatent]
on_each_kind = pytest.mark.parametrize("kind", KINDS)
NUM_DRAFTS, SEQ_LENS = 3, (10, 7)


def pool_of(
    num_pages: int,
    kv_format: KVFormat = KVFormat(torch.float32),  # noqa: B008 - it is frozen
    device: torch.device = torch.device("cpu"),  # noqa: B008 - it cannot change
) -> KVPool:
    return KVPool(
        GEOMETRY, num_pages=num_pages, page_size=PAGE_SIZE, kv_format=kv_format, device=device
    )


class Problem:
    """Requests with random latents in shuffled pages; everything else in the pool is NaN. The
    tokens of each request that are not cached yet are the rows of a forward. With a `scale` the
    pool has FP8 codes."""

    def __init__(
        self, kv_lens: list[int], new: list[int], num_contexts: int = 0, scale: float | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        width = max(-(-length // PAGE_SIZE) for length in kv_lens)
        self.kv_lens, self.new, self.num_contexts = kv_lens, new, num_contexts
        self.scale = scale
        self.tree: TreeMask | None = None
        tables = torch.randperm(len(kv_lens) * width, generator=generator).view(-1, width)
        self.tables = tables.to(torch.int32)
        self.norm = LatentNorm(random(RANK) + 1, 1e-6)
        self.up = random(HEADS, NOPE + VALUE, RANK) * RANK**-0.5
        angles = torch.arange(max(kv_lens))[:, None] * torch.linspace(1, 0.1, ROPE // 2)
        cos, sin = angles.cos(), angles.sin()
        halves = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        self.cos_sin = torch.stack(halves, 1)[:, :, None]
        self.latents = [random(length, RANK + ROPE) for length in kv_lens]
        self.queries = [random(count, HEADS, NOPE + ROPE) for count in new]

    def slots(self, request: int, first: int) -> torch.Tensor:
        positions = torch.arange(first, self.kv_lens[request], device=self.tables.device)
        pages = self.tables[request].long()[positions // PAGE_SIZE]
        return pages * PAGE_SIZE + positions % PAGE_SIZE

    def entries(self, request: int) -> torch.Tensor:
        """What the cache must hold: normed latents and rotated keys, `[L, R + P]`."""
        latent, key = self.latents[request].split((RANK, ROPE), 1)
        key = key[:, None].clone()
        plain_rotate(key, Rotary(self.cos_sin, torch.arange(len(key), device=key.device)))
        normed = rms_norm.reference(latent, self.norm.weight, self.norm.eps)
        entries = torch.cat((normed, key[:, 0]), 1)
        return entries if self.scale is None else encoded(entries, self.scale).float() * self.scale

    @property
    def kv_format(self) -> KVFormat:
        """Layer 1 runs."""
        scales = None if self.scale is None else (UNSCALED, KVScales(self.scale))
        return KVFormat(self.up.dtype, scales)

    def metadata(self) -> AttentionMetadata:
        starts = [length - count for length, count in zip(self.kv_lens, self.new, strict=True)]
        requests, device = range(len(starts)), self.tables.device
        windows = self.new[self.num_contexts :]
        return AttentionMetadata(
            context_lens=tuple(self.new[: self.num_contexts]),
            context_kv_lens=tuple(self.kv_lens[: self.num_contexts]),
            rows=rows_of(windows, device=str(device)),
            block_tables=self.tables,
            kv_lens=torch.tensor(self.kv_lens, dtype=torch.int32, device=device),
            positions=torch.cat(
                [torch.arange(starts[r], self.kv_lens[r], device=device) for r in requests]
            ),
            kv_slots=torch.cat([self.slots(r, starts[r]) for r in requests]),
            max_kv_len=max(self.kv_lens[self.num_contexts :], default=0),
            tree=self.tree,
        )

    def on_device(self, dtype: torch.dtype) -> None:
        """Moves what `run` reads to the GPU."""
        self.norm = LatentNorm(self.norm.weight.to("cuda", dtype), self.norm.eps)
        self.up, self.cos_sin = self.up.to("cuda", dtype), self.cos_sin.to("cuda", dtype)
        self.latents = [latent.to("cuda", dtype) for latent in self.latents]
        self.queries = [query.to("cuda", dtype) for query in self.queries]
        self.tables = self.tables.to("cuda")

    def run(self, kind: type[LatentBackend], tolerance: float = 1e-5) -> torch.Tensor:
        pool = pool_of(self.tables.numel(), self.kv_format, self.up.device)
        pool.data.fill_(torch.nan)
        flat = pool.data[1].flatten(0, 1)
        for request, count in enumerate(self.new):
            cached = self.entries(request)[: self.kv_lens[request] - count]
            slots = self.slots(request, 0)[: len(cached)]
            flat[slots] = cached if self.scale is None else encoded(cached, self.scale)
        metadata, backend = self.metadata(), kind(GEOMETRY, pool)
        latent = [x[len(x) - n :] for x, n in zip(self.latents, self.new, strict=True)]
        inputs = LatentInputs(torch.cat(self.queries), torch.cat(latent), self.norm, self.up)
        rotary = Rotary(self.cos_sin, metadata.positions)
        output = backend.run(1, inputs, rotary, backend.plan(metadata))
        self.rotated = inputs.q
        for request in range(len(self.new)):
            written = flat[self.slots(request, 0)]
            if self.scale is not None:
                written = written.float() * self.scale
            expected = self.entries(request)
            torch.testing.assert_close(written, expected, rtol=tolerance, atol=tolerance)
        return output.view(-1, HEADS, VALUE)


@dataclass(frozen=True)
class PhaseArguments:
    """What FlashInfer's MLA wrapper is planned with, page size 1."""

    qo_indptr: list[int]
    kv_len_arr: list[int]
    causal: bool

    @property
    def kv_indptr(self) -> list[int]:
        return [0, *accumulate(self.kv_len_arr)]


def ragged_attention(problem: Problem, arguments: PhaseArguments) -> torch.Tensor:
    """Attention as the wrapper defines it: the queries from qo_indptr[i] on attend to the entries
    kv_indices[kv_indptr[i] : kv_indptr[i + 1]], with `causal` the last query to all of them."""
    entries = torch.cat([problem.entries(request) for request in range(len(problem.kv_lens))])
    expanded = torch.einsum("lr,hdr->lhd", entries[:, :RANK], problem.up)
    shared = entries[:, None, RANK:].expand(-1, HEADS, -1)
    keys, values = torch.cat((expanded[..., :NOPE], shared), -1), expanded[..., NOPE:]
    queries = torch.cat(problem.queries)
    plain_rotate(queries[..., NOPE:], Rotary(problem.cos_sin, problem.metadata().positions))
    outputs = []
    for index in range(len(arguments.kv_len_arr)):
        rows = slice(*arguments.qo_indptr[index : index + 2])
        own = slice(*arguments.kv_indptr[index : index + 2])
        scores = torch.einsum("qhd,khd->hqk", queries[rows], keys[own]) * GEOMETRY.scale
        if arguments.causal:
            num_queries, num_keys = scores.shape[1:]
            hidden = torch.ones(num_queries, num_keys).triu(1 + num_keys - num_queries).bool()
            scores = scores.masked_fill(hidden, -torch.inf)
        outputs.append(torch.einsum("hqk,khv->qhv", scores.softmax(-1), values[own]))
    return torch.cat(outputs)


WINDOW = 1 + NUM_DRAFTS
# Each phase of a round after which the requests have SEQ_LENS tokens in the cache: how many rows
# each has, and what the wrapper would be planned with.
PHASES = {
    "decode": (1, PhaseArguments([0, 1, 2], [n + 1 for n in SEQ_LENS], causal=False)),
    "draft_decode_0": (1, PhaseArguments([0, 1, 2], [n + 1 for n in SEQ_LENS], causal=False)),
    "draft_decode_1": (1, PhaseArguments([0, 1, 2], [n + 2 for n in SEQ_LENS], causal=False)),
    "draft_extend": (
        WINDOW,
        PhaseArguments([0, WINDOW, 2 * WINDOW], [n + WINDOW for n in SEQ_LENS], causal=True),
    ),
    "verify": (
        WINDOW,
        PhaseArguments([0, WINDOW, 2 * WINDOW], [n + WINDOW for n in SEQ_LENS], causal=True),
    ),
}


@on_each_kind
@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_of_a_round_attends_as_the_planned_wrapper_would(
    phase: str, kind: type[LatentBackend]
) -> None:
    num_rows, arguments = PHASES[phase]
    problem = Problem(arguments.kv_len_arr, [num_rows] * len(SEQ_LENS))
    plan = kind(GEOMETRY, pool_of(16)).plan(problem.metadata())
    windows = plan.windows
    assert windows is not None and plan.first == 0
    starts = [index * windows.rows.window for index in range(len(SEQ_LENS) + 1)]
    assert starts == arguments.qo_indptr
    assert windows.kv_lens.tolist() == arguments.kv_len_arr
    expected = ragged_attention(problem, arguments)
    torch.testing.assert_close(problem.run(kind), expected, rtol=1e-4, atol=1e-5)


SCALE = 0.0061  # numbers above 2.7 saturate


@pytest.mark.covering
@on_each_device
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize(
    ("counts", "scale"),
    [((2, 2), None), ((1, 3), None), ((1, 3), SCALE)],
    ids=["", "rows of their own", "codes"],
)
@pytest.mark.parametrize("bound", [5, 12, 1000])
def test_chunks_with_and_without_earlier_tokens_and_windows_share_a_forward(
    bound: int,
    counts: tuple[int, int],
    scale: float | None,
    kind: type[LatentBackend],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_EXPANDED_TOKENS", bound)
    monkeypatch.setattr(batch_invariant, "MAX_ABSORBED_TOKENS", bound)
    kv_lens, new = [6, 17, 4, 9, 14], [6, 5, 4, *counts]
    problem, plain = (Problem(kv_lens, new, num_contexts=3, scale=scale) for _ in range(2))
    phases = PhaseArguments([0, *accumulate(new)], kv_lens, causal=True)
    if device == "cuda":
        problem.on_device(torch.float32)
    found, expected = problem.run(kind).cpu(), ragged_attention(plain, phases)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.covering
@on_each_device
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize(("offset", "scale"), [(0, None), (4, None), (4, SCALE)])
def test_rows_of_trees_attend_to_their_paths_and_chunks_stay_causal(
    offset: int, scale: float | None, kind: type[LatentBackend], device: str
) -> None:
    kv_lens, new = [6, 17, 14, 9], [6, 5, 3, 3]
    problem, plain = (Problem(kv_lens, new, num_contexts=2, scale=scale) for _ in range(2))
    length, generator = offset + new[-1], torch.Generator().manual_seed(4)
    paths = [random_paths(length, generator)[offset:] for _ in kv_lens[2:]]
    bits = torch.tensor([bits_of(own) for own in paths], device=device)
    problem.tree = TreeMask(bits, length)
    if device == "cuda":
        problem.on_device(torch.float32)
    output = problem.run(kind)
    chunks = ragged_attention(plain, PhaseArguments([0, 6, 11], kv_lens[:2], causal=True))
    torch.testing.assert_close(output[:11].cpu(), chunks, rtol=1e-4, atol=1e-5)
    for request, own in enumerate(paths, 2):
        first = kv_lens[request] - length
        for row, path in enumerate(own):
            seen = [*range(first), *(first + key for key in path)]
            index = 11 + 3 * (request - 2) + row
            expected = attend(problem, request, row, seen)
            torch.testing.assert_close(output[index], expected, rtol=1e-4, atol=1e-5)


def attend(problem: Problem, request: int, row: int, seen: list[int]) -> torch.Tensor:
    """Attention of one row, whose query `run` has rotated, over the request's entries `seen`."""
    entries = problem.entries(request)[seen]
    expanded = torch.einsum("lr,hdr->lhd", entries[:, :RANK], problem.up)
    shared = entries[:, None, RANK:].expand(-1, HEADS, -1)
    keys = torch.cat((expanded[..., :NOPE], shared), -1)
    query = problem.rotated[sum(problem.new[:request]) + row]
    weights = (torch.einsum("hd,lhd->hl", query, keys) * GEOMETRY.scale).softmax(-1)
    return torch.einsum("hl,lhv->hv", weights, expanded[..., NOPE:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("bound", [5, 1000])
def test_a_gpu_attends_as_the_reference_in_parts_and_windows(
    bound: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_EXPANDED_TOKENS", bound)
    kv_lens, new = [6, 17, 4, 9, 14], [6, 5, 4, 2, 2]
    problem = Problem(kv_lens, new, num_contexts=3)
    starts = [0, *accumulate(new)]
    expected = ragged_attention(problem, PhaseArguments(starts, kv_lens, causal=True))
    problem = Problem(kv_lens, new, num_contexts=3)  # the reference has rotated its queries
    problem.on_device(dtype)
    output = problem.run(TritonLatent, tolerance).float().cpu()
    torch.testing.assert_close(output, expected, rtol=0, atol=tolerance)


def test_a_backend_expands_no_more_keys_at_a_time_than_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_EXPANDED_TOKENS", 8)
    problem = Problem([3, 4, 2, 30, 7], [3, 4, 2, 6, 7], num_contexts=5)
    parts = VanillaLatent(GEOMETRY, pool_of(40)).plan(problem.metadata()).contexts
    assert [part.key_lens for part in parts] == [(3, 4), (2,), (8,), (8,), (8,), (6,), (7,)]
    assert [part.is_causal for part in parts] == [True, True, False, False, False, True, True]
    assert max(sum(part.key_lens) for part in parts) <= 8


@pytest.mark.parametrize(
    ("kind", "latent"),
    [
        (VanillaAttention, VanillaLatent),
        (TritonAttention, TritonLatent),
        (FlashInferAttention, TritonLatent),
    ],
)
def test_the_layout_decides_which_backend_runs(
    kind: type[VanillaAttention], latent: type[LatentBackend]
) -> None:
    assert type(create_backend(kind, GEOMETRY, pool_of(2))) is latent
    planned = workspace_bytes(kind, GEOMETRY, KVFormat(torch.float32))
    elements = HEADS * (NOPE + VALUE + 2 * (NOPE + ROPE)) + RANK + ROPE
    assert planned == MAX_EXPANDED_TOKENS * elements * 4 + MAX_PARTIAL_ROWS * (RANK + 1) * 4


def test_pools_of_both_layouts_have_the_shape_and_page_bytes_of_their_layout() -> None:
    heads = AttentionGeometry(LAYERS, HEADS, 1, 8, 1.0)
    kv_format = KVFormat(torch.float32)
    on_cpu = {"kv_format": kv_format, "device": torch.device("cpu")}
    for geometry, shape in (
        (GEOMETRY, (LAYERS, 5, PAGE_SIZE, RANK + ROPE)),
        (heads, (LAYERS, 2, 5, PAGE_SIZE, 1, 8)),
    ):
        pool = KVPool(geometry, num_pages=5, page_size=PAGE_SIZE, **on_cpu)
        assert tuple(pool.data.shape) == shape
        assert 5 * KVPool.page_bytes(geometry, PAGE_SIZE, kv_format) == pool.data.nbytes
        pool.data.normal_()
        before = pool.data.clone()
        pool.copy_page(1, 3)
        pages = pool.data.movedim(1 + geometry.page_dim, 0)
        old = before.movedim(1 + geometry.page_dim, 0)
        assert torch.equal(pages[3], old[1]) and torch.equal(pages[[0, 1, 2, 4]], old[[0, 1, 2, 4]])
