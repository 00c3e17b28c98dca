"""Gives the linear layers of loaded models the fastest product for the numbers of rows that they
will see: out of the table that an earlier start left, else by measuring now.

It knows which layers there are; not how a product is measured (kernels/linear_tuner.py), nor how it
is run."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Protocol

import torch
from torch import nn

from tllm_spec.kernels.cublas_lt import ALGORITHM_BYTES, DATA_TYPES, CublasLt, shared_library
from tllm_spec.kernels.disk_cache import cache_folder
from tllm_spec.kernels.linear_placing import place_missing
from tllm_spec.kernels.linear_table import read_table, table_path, write_table
from tllm_spec.kernels.linear_tuner import Product, tune_missing
from tllm_spec.kernels.tuned_linear import TunedProducts
from tllm_spec.models.causal_lm import CausalLM, layers_of
from tllm_spec.models.linear import Linear, RowLinear

logger = logging.getLogger(__name__)

MIN_WEIGHT_BYTES = 4 << 20  # of smaller ones most of the time is the launch's


class Stack(Protocol):
    """The first layers of a model, in rounds of some numbers of rows."""

    @property
    def model(self) -> CausalLM: ...
    @property
    def row_counts(self) -> list[int]: ...
    def seconds(self, rows: int) -> float: ...


@torch.inference_mode()
def tune_linears(
    models: Sequence[nn.Module],
    row_counts: Iterable[int],
    device: torch.device,
    stack: Stack | None = None,
) -> None:
    """On CUDA; elsewhere nothing happens. Batch-invariant layers keep their kernel. Waits for the
    device. `stack`: its layers are also compared where they run."""
    layers = [layer for model in models for layer in model.modules() if isinstance(layer, Linear)]
    layers = [layer for layer in layers if _is_worth_it(layer)]
    if device.type != "cuda" or not layers:
        return
    library = shared_library()
    if library is None:
        logger.info(
            "linear layers run torch's choice of algorithm, which is slower: there is no "
            "libcublasLt"
        )
        return
    start, lt = monotonic(), CublasLt(library, device)
    path = table_path(
        cache_folder(), torch.cuda.get_device_name(device), lt.version, torch.__version__
    )
    table = read_table(path, ALGORITHM_BYTES)
    measured = tune_missing(table, lt, _by_shape(layers), row_counts)
    products = TunedProducts(lt, table)
    for layer in layers:
        layer.products = products
    if stack is not None:
        measured += _place(stack, products)
    if measured:
        torch.cuda.empty_cache()
        write_table(path, table)
        logger.info(
            "measured %d products of linear layers in %.1f s; see %s",
            measured,
            monotonic() - start,
            path,
        )


def _place(stack: Stack, products: TunedProducts) -> int:
    """Of the stack's model, every layer from now on runs what is best in its place. How much was
    measured."""
    modules = layers_of(stack.model).modules()
    layers = [
        layer for layer in modules if isinstance(layer, Linear) and layer.products is products
    ]
    of_a_layer = _by_shape(layers)
    names = [
        f"{weight.shape[1]}x{weight.shape[0]}"
        for weight in (each.weights[0] for each in of_a_layer)
    ]
    placed = TunedProducts(products.lt, products.table, "+".join(names))
    for layer in layers:
        layer.products = placed
    return place_missing(placed, of_a_layer, stack.row_counts, stack.seconds) if layers else 0


def _is_worth_it(layer: Linear) -> bool:
    weight = layer.weight
    return (
        not layer.batch_invariant
        and weight.dtype in DATA_TYPES
        and weight.numel() * weight.element_size() >= MIN_WEIGHT_BYTES
    )


def _by_shape(layers: Iterable[Linear]) -> list[Product]:
    """The outputs of a row-parallel layer go to the running sum."""
    found: dict[tuple[torch.Size, torch.dtype, bool], list[torch.Tensor]] = defaultdict(list)
    for layer in layers:
        found[layer.weight.shape, layer.weight.dtype, isinstance(layer, RowLinear)].append(
            layer.weight
        )
    return [Product(weights, adds) for (_, _, adds), weights in found.items()]
