"""Chooses the fastest GEMM algorithm for the linear layers of loaded models and the numbers of rows
that they will see: from the table on disk of an earlier start, or by measuring now."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from time import monotonic

import msgpack
import torch
from torch import nn

from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.kernels.disk_cache import cache_folder
from tllm_spec.kernels.gemm.cublas_lt import ALGORITHM_BYTES, DATA_TYPES, CublasLt, shared_library
from tllm_spec.kernels.gemm.fp8_linear import Fp8Gemms
from tllm_spec.kernels.gemm.tuned_linear import (
    GemmGroup,
    TunedGemms,
    read_table,
    table_path,
    tune_missing,
    write_table,
)
from tllm_spec.models.formats.fp8_activations import QuantisedActivations
from tllm_spec.models.formats.plain import CudaWeight
from tllm_spec.models.linear import Linear, RowLinear

logger = logging.getLogger(__name__)

MIN_WEIGHT_BYTES = 4 << 20  # for smaller weights the launch takes most of the time


@torch.inference_mode()
def tune_linears(
    models: Sequence[nn.Module],
    row_counts: Iterable[int],
    device: torch.device,
    communicator: Communicator = SINGLE,
) -> None:
    """Does nothing without CUDA. Only layers of `CudaWeight` are tuned; those with activations in
    FP8 use the library without. Waits for the device. Rank 0 chooses for all ranks, so that a layer
    that all have puts out the same bits on each."""
    layers = [layer for model in models for layer in model.modules() if isinstance(layer, Linear)]
    in_fp8 = [layer for layer in layers if isinstance(layer.weight_format, QuantisedActivations)]
    layers = [layer for layer in layers if _is_worth_it(layer)]
    if device.type != "cuda" or not layers + in_fp8:
        return
    library = shared_library()
    if library is None:
        logger.info("libcublasLt was not found: linear layers run torch's choice of algorithm")
        return
    start, lt = monotonic(), CublasLt(library, device)
    gemms = Fp8Gemms(lt)
    for layer in in_fp8:
        assert isinstance(layer.weight_format, QuantisedActivations)
        layer.weight_format.use_library(gemms)
    name = torch.cuda.get_device_name(device)
    path = table_path(cache_folder(), name, lt.version, torch.__version__)
    table = read_table(path, ALGORITHM_BYTES)
    is_first, num_measured = communicator.mapping.rank == 0, 0
    if is_first:
        num_measured = tune_missing(table, lt, _by_shape(layers), row_counts)
    choices = communicator.broadcast(msgpack.packb(table) if is_first else b"")
    table = msgpack.unpackb(choices)
    tuned = TunedGemms(lt, table)
    for layer in layers:
        assert isinstance(layer.weight_format, CudaWeight)
        layer.weight_format.tuned_gemms = tuned
    if num_measured:
        torch.cuda.empty_cache()
        write_table(path, table)
        seconds = monotonic() - start
        logger.info("tuned %d GEMMs in %.1f s; see %s", num_measured, seconds, path)


def _is_worth_it(layer: Linear) -> bool:
    weight = layer.weight
    return (
        isinstance(layer.weight_format, CudaWeight)
        and weight.dtype in DATA_TYPES
        and weight.numel() * weight.element_size() >= MIN_WEIGHT_BYTES
    )


def _by_shape(layers: Iterable[Linear]) -> list[GemmGroup]:
    """The results of row-parallel layers are added to the residual stream, if no other rank's are
    added before."""
    found: dict[tuple[torch.Size, torch.dtype, bool], list[torch.Tensor]] = defaultdict(list)
    for layer in layers:
        adds = isinstance(layer, RowLinear) and layer.mapping.tp_size == 1
        found[layer.weight.shape, layer.weight.dtype, adds].append(layer.weight)
    return [GemmGroup(weights, adds) for (_, _, adds), weights in found.items()]
