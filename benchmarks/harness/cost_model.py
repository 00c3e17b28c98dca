"""A cost model of decoding rounds on devices of one kind: bytes read, FLOPs, and collectives by
latency and bandwidth. `benchmarks.scaling_model` prints its tables, docs/scaling.md explains it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mean

from benchmarks.harness.scaling_shapes import Shape

HOST_SIZE = 8  # devices of a host


@dataclass(frozen=True)
class CostModel:
    """Bytes per second, seconds, and bf16 FLOPs per second, also of FP8 weights. The values are an
    H200's, fitted to the rounds of one device (`benchmarks.scaling_model check`)."""

    weight_bandwidth: float = 4.26e12
    kv_bandwidth: float = 3.8e12
    latent_bandwidth: float = 2.0e12  # of latents, which every head reads
    layer_seconds: float = 21.9e-6  # of a layer's launches and small kernels
    expert_seconds: float = 12.6e-6  # of a router and the order of its tokens
    # Where ranks have parts of the experts: leaving out the others' rows, and a shared expert that
    # is a layer of its own. Fitted to the rounds of two H100 and four H200 with parts.
    parts_seconds: float = 30e-6
    latent_seconds: float = 14.7e-6  # of a layer's projections to latents and back
    row_seconds: float = 5.6e-6  # of a row of logits of 128,256 columns: choosing a token
    flops: float = 0.848e15
    memory: float = 130e9  # bytes for weights and KV cache
    # Sums in a CUDA graph, fitted to `benchmarks.several_devices sums` on two H100: a device sends
    # to all others at once. NCCL's latency for each device is fitted to its 20 µs on eight H200.
    one_shot_seconds: float = 2.4e-6
    one_shot_bandwidth: float = 122e9
    # Bytes that arrive within a one-shot sum's latency, since it loads the lines of all devices
    # together: fitted to sums of up to 128 KiB on four H200.
    one_shot_hidden: float = 134e3
    two_shot_seconds: float = 7.2e-6  # of those of up to 2 MiB on four H200
    two_shot_bandwidth: float = 282e9  # of what a device sends
    nccl_seconds: float = 4.0e-6
    nccl_device_seconds: float = 2.0e-6
    nccl_bandwidth: float = 95e9  # bytes of the tensor, not of what is sent
    # Between hosts (InfiniBand): assumptions, not measured.
    network_seconds: float = 25e-6
    network_bandwidth: float = 45e9

    def gemm_seconds(self, elements: float, rows: float, weight_bytes: float) -> float:
        """Reading weights and multiplying overlap, but not fully where they take the same time."""
        reading = elements * weight_bytes / self.weight_bandwidth
        multiplying = 2 * elements * rows / self.flops
        return float((reading**2 + multiplying**2) ** 0.5)

    def one_shot_sum(self, num_bytes: float, devices: int) -> float:
        received = max((devices - 1) * num_bytes - self.one_shot_hidden, 0)
        return self.one_shot_seconds + received / self.one_shot_bandwidth

    def two_shot_sum(self, num_bytes: float, devices: int) -> float:
        sent = 2 * (devices - 1) / devices * num_bytes
        return self.two_shot_seconds + sent / self.two_shot_bandwidth

    def nccl_sum(self, num_bytes: float, devices: int) -> float:
        """More devices have more latency; they send more, but over more links at once."""
        latency = self.nccl_seconds + devices * self.nccl_device_seconds
        return latency + num_bytes / self.nccl_bandwidth

    def all_reduce_seconds(self, num_bytes: float, devices: int) -> float:
        """Within a host in the fastest way; between hosts a ring of hosts on top."""
        local = min(devices, HOST_SIZE)
        if local == 1:
            return 0.0
        ways = (self.one_shot_sum, self.two_shot_sum, self.nccl_sum)
        seconds, hosts = min(way(num_bytes, local) for way in ways), devices // local
        if hosts > 1:
            sent = 2 * (hosts - 1) / hosts * num_bytes / local
            seconds += self.network_seconds + sent / self.network_bandwidth
        return seconds

    def round_seconds(
        self,
        shape: Shape,
        batch: int,
        window: int,
        context: float,
        devices: int,
        expert_parts: int = 1,
        hit: float | None = None,
    ) -> float:
        """A forward of the target over `batch` windows, and sampling. A part of the experts is
        sliced over devices / expert_parts devices. hit: the experts that a part reads, if that was
        counted."""
        rows, size = batch * window, shape.weight_bytes
        kv = batch * context * shape.kv_bytes / min(devices, shape.kv_parts)
        kv /= self.latent_bandwidth if shape.is_latent else self.kv_bandwidth
        layer = self.layer_seconds + shape.is_latent * self.latent_seconds + kv
        layer += self.gemm_seconds(shape.attention / devices, rows, size)
        dense = self.gemm_seconds(shape.mlp / devices, rows, size)
        sparse = 0.0
        if shape.experts:
            hit = hit or hit_experts(shape.experts, shape.top_k, rows, expert_parts)
            read = hit * shape.expert / (devices / expert_parts)
            rows_of_expert = rows * shape.top_k / expert_parts / hit
            expert_size = shape.expert_bytes(devices // expert_parts)
            sparse = self.expert_seconds + (expert_parts > 1) * self.parts_seconds
            sparse += self.gemm_seconds(read, rows_of_expert, expert_size)
            sparse += self.gemm_seconds(shape.shared / devices, rows, size)
        summed = self.all_reduce_seconds(2 * rows * shape.hidden, devices)
        seconds = shape.layers * (layer + 2 * summed) + shape.sparse_layers * sparse
        seconds += summed  # of embeddings
        seconds += (shape.layers - shape.sparse_layers) * dense
        return seconds + self._output_seconds(shape, shape.vocab, rows, devices)

    def eagle3_seconds(
        self,
        shape: Shape,
        batch: int,
        draft_len: int,
        context: float,
        devices: int,
        expert_parts: int = 1,
    ) -> float:
        """A round: the target's, then the head's steps, whose layer is sharded as the target's
        are."""
        target = self.round_seconds(shape, batch, draft_len + 1, context, devices, expert_parts)
        if not draft_len:
            return target
        rows = batch * (draft_len + 1)
        fuse = self.gemm_seconds(shape.head_fc, rows, 2)
        first = self._head_seconds(shape, rows, batch, context, devices)
        step = self._head_seconds(shape, batch, batch, context, devices)
        return target + fuse + first + (draft_len - 1) * step

    def _output_seconds(self, shape: Shape, vocab: int, rows: int, devices: int) -> float:
        """The output layer (bf16), the choice of tokens among each rank's columns, and the exchange
        of each rank's best, 8 bytes a row."""
        exchanged = self.all_reduce_seconds(8 * rows, devices)
        seconds = self.gemm_seconds(vocab * shape.hidden / devices, rows, 2)
        return seconds + exchanged + rows * self.row_seconds * vocab / devices / 128256

    def _head_seconds(
        self, shape: Shape, rows: int, batch: int, context: float, devices: int
    ) -> float:
        kv = batch * context * shape.kv_bytes / min(devices, shape.kv_parts) / self.kv_bandwidth
        layer = 2 * self.layer_seconds + kv + self.gemm_seconds(shape.head_layer / devices, rows, 2)
        sums = 3 * self.all_reduce_seconds(2 * rows * shape.hidden, devices)  # with the embeddings'
        return layer + sums + self._output_seconds(shape, shape.head_vocab, batch, devices)


@lru_cache
def hit_experts(experts: int, top_k: int, rows: int, parts: int) -> float:
    """The most experts that a part of them has to read, on average over random routings."""
    noise, most = random.Random(0), []
    for _ in range(4):
        hit = {expert for _ in range(rows) for expert in noise.sample(range(experts), top_k)}
        size = experts // parts
        most.append(max(sum(each // size == part for each in hit) for part in range(parts)))
    return mean(most)


H200 = CostModel()
_MEMORY_SPEED = 3.35 / 4.8  # of an H100's memory, by the datasheets
H100 = replace(
    H200,
    weight_bandwidth=H200.weight_bandwidth * _MEMORY_SPEED,
    kv_bandwidth=H200.kv_bandwidth * _MEMORY_SPEED,
    memory=70e9,
)
