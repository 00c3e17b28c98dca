"""FLASHINFER equals VANILLA: with the plain-torch reference of FlashInfer's prefill, and with
FlashInfer on a CUDA device (`-m gpu`)."""

from dataclasses import replace

import pytest
import torch

from tests.attention.batches import CUDA, LAYER, LAYERS, Batch, Forward
from tests.attention.plain_prefill import PlainPrefill
from tllm_spec.attention.flashinfer import FlashInferAttention, FlashInferContexts
from tllm_spec.attention.geometry import AttentionGeometry
from tllm_spec.attention.interface import AttentionMetadata, HeadsInputs
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.kernels.attention.kv_codes import KVScales
from tllm_spec.kernels.attention.paged_prefill import PrefillLimits, PrefillRows
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.attention.visible_keys import KeySpan

on_each_device = pytest.mark.parametrize("device", ["cpu", CUDA])
SHAPES = [(8, 2, 128), (6, 6, 64), (8, 2, 64)]  # query heads, KV heads, head_dim
ERROR = {"cpu": 1e-5, "cuda": 1e-2}  # of float32 and bfloat16


SLIDING_100 = KeySpan(100, slides=True)
BATCHES = {
    "one token": Batch(((0, 1),)),
    "a prompt": Batch(((0, 129),)),
    "a short chunk after a long prefix": Batch(((500, 7),)),
    "three requests": Batch(((0, 129), (300, 7), (64, 1))),
    "page ends": Batch(((31, 1), (32, 32), (0, 64), (63, 65))),
    "chunks and windows": Batch(((0, 7), (250, 129)), (40, 5, 200), window=4),
    "a chunk and single tokens": Batch(((33, 5),), (64, 65)),
    "a sliding window": Batch(((0, 300), (250, 129)), (40, 5, 200), 4, span=SLIDING_100),
    "a sliding window that ends in a page": Batch(((500, 7),), span=KeySpan(45, slides=True)),
    "codes": Batch(((0, 7), (250, 129)), (40, 5, 200), 4, scales=KVScales(0.013, 0.021)),
    "sinks": Batch(((0, 7), (250, 129)), (40, 5, 200), 4, has_sinks=True),
    "codes, sinks and a sliding window": Batch(
        ((0, 300), (250, 129)),
        (40, 5, 200),
        4,
        span=SLIDING_100,
        scales=KVScales(0.013, 0.021),
        has_sinks=True,
    ),
}


class FlashForward(Forward):
    """Slots that no earlier token has written are NaN."""

    def __init__(
        self,
        batch: Batch,
        device: str,
        shape: tuple[int, int, int] = SHAPES[0],
        page_size: int = 32,
        seed: int = 0,
    ) -> None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        geometry = AttentionGeometry(LAYERS, *shape, 0.7 * shape[2] ** -0.5)
        super().__init__(batch, device, seed, geometry, page_size, dtype)
        self.poison()

    def flash(self) -> FlashInferAttention:
        if self.device.type == "cpu":
            return FlashInferAttention(self.geometry, self.pool(), PlainPrefill(self.geometry))
        pytest.importorskip("flashinfer")
        return FlashInferAttention(self.geometry, self.pool())

    def check_rows(self, output: torch.Tensor) -> None:
        """The output equals VANILLA's, row by row."""
        expected = self.run(VanillaAttention(self.geometry, self.pool()))
        assert output.shape == expected.shape
        error = (output.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)
        assert float(error.max()) < ERROR[self.device.type], error  # NaN fails, too


@pytest.mark.covering
@on_each_device
@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", BATCHES)
@torch.inference_mode()
def test_every_kind_of_batch_equals_vanilla(
    name: str, shape: tuple[int, int, int], page_size: int, device: str
) -> None:
    forward = FlashForward(BATCHES[name], device, shape, page_size)
    backend = forward.flash()
    forward.check_rows(forward.run(backend))
    vanilla = VanillaAttention(forward.geometry, forward.pool())
    forward.run(vanilla)
    # Keys up to a rounding; a code may be the next one.
    errors = {"rtol": 1e-2, "atol": 1e-3} if forward.scales is None else {"rtol": 1 / 7, "atol": 1}
    pools = backend.pool.data.float(), vanilla.pool.data.float()
    torch.testing.assert_close(*pools, equal_nan=True, **errors)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", BATCHES)
@torch.inference_mode()
def test_the_kernels_for_gpus_other_than_hopper_equal_vanilla(
    name: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flashinfer")
    monkeypatch.setattr("flashinfer.prefill.determine_attention_backend", lambda *arguments: "fa2")
    forward = FlashForward(BATCHES[name], "cuda", shape)
    forward.check_rows(forward.run(forward.flash()))


@on_each_device
@torch.inference_mode()
def test_target_and_draft_layers_alternate_with_different_heads(device: str) -> None:
    batch = BATCHES["chunks and windows"]
    target, draft = (
        FlashForward(batch, device, (8, 2, 128)),
        FlashForward(batch, device, (6, 6, 64), seed=1),
    )
    backends = target.flash(), draft.flash()
    plans = [b.plan(f.metadata) for b, f in zip(backends, (target, draft), strict=True)]
    for _ in range(2):
        for forward, backend, plan in zip((target, draft), backends, plans, strict=True):
            forward.check_rows(forward.run(backend, plan))


class NoPrefill(PlainPrefill):
    def plan(self, rows: PrefillRows) -> PrefillRows:
        raise AssertionError("there are no contexts")


@torch.inference_mode()
def test_a_forward_of_windows_only_does_not_call_flashinfer() -> None:
    forward = FlashForward(Batch((), (40, 5, 200), window=4), "cpu")
    backend = FlashInferAttention(forward.geometry, forward.pool(), NoPrefill(forward.geometry))
    forward.check_rows(forward.run(backend))
    assert backend.supports_graphs


FLIGHT = (
    BATCHES["three requests"],
    Batch(((90, 40), (0, 200), (7, 2), (0, 130))),
    BATCHES["chunks and windows"],
)


def sharing_one_prefill(forwards: list[FlashForward]) -> list[FlashInferAttention]:
    """A backend with its own pool for each forward; the plans are those of one backend."""
    backends = [forward.flash() for forward in forwards]
    for backend in backends:
        backend._prefill, backend._wide = backends[0]._prefill, backends[0]._wide
    return backends


@pytest.mark.gpu
@torch.inference_mode()
def test_plans_in_flight_are_independent_and_two_of_them_do_not_wait() -> None:
    forwards = [FlashForward(batch, "cuda", seed=i) for i, batch in enumerate(FLIGHT)]
    backends = sharing_one_prefill(forwards)
    for forward, backend in zip(forwards, backends, strict=True):
        forward.run(backend)  # compiles, and fills the caches of device and pinned memory
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # cycles: half a second
    awake = torch.cuda.Event()
    awake.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [forwards[i].run(backends[i]) for i in range(2)]
        assert not awake.query(), "the host waited"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    outputs.append(forwards[2].run(backends[2]))
    for forward, output in zip(forwards, outputs, strict=True):
        forward.check_rows(output)


@pytest.mark.gpu
@torch.inference_mode()
def test_plans_made_before_the_first_run_keep_their_rows() -> None:
    forwards = [FlashForward(batch, "cuda", seed=i) for i, batch in enumerate(FLIGHT[:2])]
    backends = sharing_one_prefill(forwards)
    plans = [b.plan(f.metadata) for b, f in zip(backends, forwards, strict=True)]
    for forward, backend, plan in zip(forwards, backends, plans, strict=True):
        forward.check_rows(forward.run(backend, plan))


@pytest.mark.gpu
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    """Bit-equal: keys are never split, and each row reads its keys in the same order."""
    together = FlashForward(BATCHES["three requests"], "cuda")
    output = together.run(together.flash())
    alone = together.only(0)
    assert torch.equal(alone.run(together.flash()), output[:129])


IN_PLACE = (Batch(((90, 40), (0, 200), (7, 2))), BATCHES["three requests"], Batch(((0, 1),)))
CODES_IN_PLACE = tuple(replace(batch, scales=KVScales(0.013, 0.021)) for batch in IN_PLACE)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("batches", [IN_PLACE, CODES_IN_PLACE], ids=["", "codes"])
@torch.inference_mode()
def test_a_plan_in_place_runs_what_was_planned_last(
    batches: tuple[Batch, ...], device: str
) -> None:
    """A graph captured with the plan of one batch replays others, padded to its number of rows and
    chunks."""
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's kernels")
    forwards = [FlashForward(batch, device, seed=i) for i, batch in enumerate(batches)]
    num_rows = max(len(forward.qkv) for forward in forwards)
    backends = sharing_one_prefill(forwards)
    plans = backends[0].context_plans(PrefillLimits(num_rows, 4, 50))
    assert plans is not None
    update(plans, padded_to(forwards[0].metadata, num_rows))
    kv_slots = torch.zeros(num_rows, dtype=torch.int64, device=device)
    plan = plans.for_graph(kv_slots)
    for forward, backend in zip(forwards, backends, strict=True):
        metadata, own = padded_to(forward.metadata, num_rows), len(forward.qkv)
        update(plans, metadata)
        kv_slots.copy_(metadata.kv_slots)
        qkv = torch.cat((forward.qkv, forward.qkv[:1].expand(num_rows - own, -1, -1)))
        rotary = Rotary(forward.rotary.table, metadata.positions)
        output = backend.run(LAYER, HeadsInputs(qkv), rotary, plan)
        assert output.isfinite().all()  # padding too: other rows may read the page of its keys
        forward.check_rows(output[:own])


def update(plans: FlashInferContexts, metadata: AttentionMetadata) -> None:
    lens, kv_lens = metadata.context_lens, metadata.context_kv_lens
    plans.update(lens, kv_lens, PrefillRows.build(lens, kv_lens, metadata.block_tables, 32).pages)


def padded_to(metadata: AttentionMetadata, num_rows: int) -> AttentionMetadata:
    """Padded to four chunks with one on page 0 and empty ones."""
    missing = num_rows - len(metadata.positions)
    offsets = torch.arange(missing, device=metadata.positions.device)
    page_size, empty = 32, 3 - len(metadata.context_lens)
    more = max(0, -(-missing // page_size) - metadata.block_tables.shape[1])
    lens = (missing, *[0] * empty)
    return replace(
        metadata,
        context_lens=(*metadata.context_lens, *lens),
        context_kv_lens=(*metadata.context_kv_lens, *lens),
        block_tables=torch.nn.functional.pad(metadata.block_tables, (0, more, 0, 1 + empty)),
        positions=torch.cat((metadata.positions, offsets.clamp_max(0))),
        kv_slots=torch.cat((metadata.kv_slots, offsets % page_size)),
    )


@pytest.mark.gpu
def test_memory_planning_knows_what_the_backend_allocates() -> None:
    forward = FlashForward(BATCHES["a prompt"], "cuda")
    forward.run(forward.flash())  # allocates what all backends share
    pool = forward.pool()
    before = torch.cuda.memory_allocated()
    backend = FlashInferAttention(forward.geometry, pool)
    allocated = torch.cuda.memory_allocated() - before
    expected = backend.workspace_bytes(forward.geometry, pool.kv_format)
    assert allocated == pytest.approx(expected, rel=0.01)
