"""Chooses the products of a stack of layers where they run, one after the other: which algorithm is
the fastest alone does not say what the whole takes, since one product's end and the next one's
beginning share the device.

It begins with what was the fastest alone, and ends with that where nothing better is found. It does
not know what else the stack runs, nor how its time is measured."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tllm_spec.kernels.linear_table import ProductKey, rows_class
from tllm_spec.kernels.linear_tuner import MIN_ROWS, Product, Search
from tllm_spec.kernels.tuned_linear import TunedProducts, key_of

# Of the stack's time, what a choice has to gain; less is noise.
GAIN = 0.997
# Of both in turn at the end: the best of many measured times is one that chance has helped.
CONFIRMATIONS = 2
# Rounds of more rows gained nothing: more and more of their time is arithmetic, which power limits.
MAX_ROWS = 64


def place_missing(
    products: TunedProducts,
    stack: Sequence[Product],
    row_counts: Iterable[int],
    seconds: Callable[[int], float],
) -> int:
    """Complete the table for the place of `products` and those of these numbers of rows that are
    worth it; how many entries were missing.

    Args:
        stack: the products of a layer in their order.
        seconds: of a forward of the stack for that many rows, with the table as it is.
    """
    # The largest of a class stands for all of it.
    largest = {
        rows_class(rows): rows for rows in sorted(row_counts) if MIN_ROWS <= rows <= MAX_ROWS
    }
    num_missing = 0
    for rows in sorted(largest.values(), reverse=True):
        keys = [replace(key_of(product.sizes(rows)), place=products.place) for product in stack]
        missing = sum(key not in products.table for key in keys)
        if missing:
            num_missing += missing
            _place(products, dict(zip(keys, stack, strict=True)), rows, partial(seconds, rows))
    return num_missing


def _place(
    products: TunedProducts,
    stack: Mapping[ProductKey, Product],
    rows: int,
    seconds: Callable[[], float],
) -> None:
    alone = {key: products.table.get(replace(key, place="")) for key in stack}
    placed = _descend(products, stack, alone, rows, seconds)
    times: dict[bool, float] = {False: 0.0, True: 0.0}
    for is_placed in [False, True] * CONFIRMATIONS if placed != alone else []:
        _choose(products, placed if is_placed else alone)
        times[is_placed] += seconds()
    _choose(products, placed if times[True] < times[False] else alone)


def _descend(
    products: TunedProducts,
    stack: Mapping[ProductKey, Product],
    alone: Mapping[ProductKey, bytes | None],
    rows: int,
    seconds: Callable[[], float],
) -> dict[ProductKey, bytes | None]:
    """One product after the other, beside what was chosen for those before it."""
    chosen = dict(alone)
    _choose(products, chosen)
    least = seconds()
    for key, product in stack.items():
        for algorithm in [None, *_finalists(products, product, rows)]:
            if algorithm == alone[key]:
                continue
            products.choose(key, algorithm)
            if (time := seconds()) < GAIN * least:
                least, chosen[key] = time, algorithm
        products.choose(key, chosen[key])
    return chosen


def _choose(products: TunedProducts, algorithms: Mapping[ProductKey, bytes | None]) -> None:
    for key, algorithm in algorithms.items():
        products.choose(key, algorithm)


def _finalists(products: TunedProducts, product: Product, rows: int) -> list[bytes]:
    """Of the search for the fastest alone, which an earlier start may have made."""
    sizes = product.sizes(rows)
    name = str(key_of(sizes))
    if name not in products.table.finalists:
        search = Search(products.lt, sizes, product.weights)
        search.load()
        search.fastest()
        products.table.finalists[name] = search.finalists
    return products.table.finalists[name]
