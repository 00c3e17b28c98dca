"""Products chosen among their neighbours, with a clock of the test's own: what is tried beside
what, and what wins."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tllm_spec.kernels import linear_placing
from tllm_spec.kernels.linear_placing import place_missing
from tllm_spec.kernels.linear_table import LinearTable
from tllm_spec.kernels.linear_tuner import Product
from tllm_spec.kernels.tuned_linear import TunedProducts, key_of

NO_LIBRARY: Any = None
FIRST = Product([torch.zeros(48, 64)], adds=False)
SECOND = Product([torch.zeros(64, 48)], adds=True)
STACK = [FIRST, SECOND]
ALONE, OTHER, WORSE = b"alone", b"other", b"worse"


def placed_key(product: Product, rows: int, place: str = "here") -> Any:
    return replace(key_of(product.sizes(rows)), place=place)


class Layers:
    """A stack whose time depends on both products at once. `tried`: what they were whenever it was
    measured."""

    def __init__(self, times: dict[tuple[bytes | None, bytes | None], float]) -> None:
        self.products = TunedProducts(NO_LIBRARY, LinearTable(), "here")
        self.tried: list[tuple[int, bytes | None, bytes | None]] = []
        self._times = times

    def found_alone(self, rows: int, *algorithms: bytes | None) -> None:
        for product, algorithm in zip(STACK, algorithms, strict=True):
            key = key_of(product.sizes(rows))
            self.products.table[key] = algorithm
            self.products.table.finalists[str(key)] = [ALONE, OTHER, WORSE]

    def seconds(self, rows: int) -> float:
        first, second = self.chosen(rows)
        self.tried.append((rows, first, second))
        return self._times.get((first, second), 9.0)

    def chosen(self, rows: int) -> tuple[bytes | None, ...]:
        return tuple(self.products.table[placed_key(product, rows)] for product in STACK)


def test_each_product_is_chosen_beside_what_was_chosen_before_it() -> None:
    """The first is faster with OTHER, and only then the second with torch's."""
    layers = Layers(
        {(ALONE, ALONE): 5.0, (OTHER, ALONE): 4.0, (ALONE, None): 3.0, (OTHER, None): 2.0}
    )
    layers.found_alone(32, ALONE, ALONE)
    assert place_missing(layers.products, STACK, [32], layers.seconds) == 2
    assert layers.chosen(32) == (OTHER, None)
    assert layers.tried == [
        (32, ALONE, ALONE),
        *[(32, first, ALONE) for first in (None, OTHER, WORSE)],
        *[(32, OTHER, second) for second in (None, OTHER, WORSE)],
        *[(32, ALONE, ALONE), (32, OTHER, None)] * 2,
    ]
    alone = [layers.products.table[key_of(product.sizes(32))] for product in STACK]
    assert alone == [ALONE, ALONE], "what was measured alone is others' business"


def test_what_gains_less_than_the_noise_is_not_chosen() -> None:
    layers = Layers({(None, ALONE): 1.0, (OTHER, ALONE): 0.998, (None, OTHER): 0.996})
    layers.found_alone(16, None, ALONE)
    place_missing(layers.products, STACK, [16], layers.seconds)
    assert layers.chosen(16) == (None, OTHER)


def test_what_was_faster_by_chance_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers({(ALONE, ALONE): 5.0, (OTHER, ALONE): 5.1})
    layers.found_alone(32, ALONE, ALONE)
    lucky = iter([(ALONE, ALONE, 5.0), (None, ALONE, 9.0), (OTHER, ALONE, 4.0)])

    def seconds(rows: int) -> float:
        measured = layers.seconds(rows)
        *ran, time = next(lucky, (None, None, measured))
        assert time == measured or layers.chosen(rows) == tuple(ran)
        return time

    place_missing(layers.products, STACK, [32], seconds)
    assert layers.chosen(32) == (ALONE, ALONE)


def test_classes_of_rows_are_measured_once_the_largest_first_and_few_or_many_rows_never() -> None:
    layers = Layers({})
    for rows in (12, 33, 48):
        layers.found_alone(rows, None, None)
    assert (
        place_missing(layers.products, STACK, [1, 8, 12, 33, 48, 65, 128, 1024], layers.seconds)
        == 4
    )
    assert sorted({rows for rows, *_ in layers.tried}) == [12, 48] and layers.tried[0][0] == 48
    layers.tried.clear()
    assert place_missing(layers.products, STACK, [16, 40], layers.seconds) == 0 and not layers.tried


def test_what_an_earlier_start_measured_alone_is_searched_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Search:
        def __init__(self, lt: object, *about: Any) -> None:
            self.finalists: list[bytes] = []

        def load(self) -> None:
            self.finalists = [b"not", b"ranked"]

        def fastest(self) -> bytes:
            self.finalists = [OTHER]
            return OTHER

    monkeypatch.setattr(linear_placing, "Search", Search)
    layers = Layers({(OTHER, OTHER): 1.0, (OTHER, None): 5.0})
    place_missing(layers.products, STACK, [32], layers.seconds)
    assert layers.chosen(32) == (OTHER, OTHER)


def test_a_product_runs_what_was_chosen_in_its_place_and_elsewhere_what_was_chosen_alone() -> None:
    table = LinearTable()
    here, elsewhere, nowhere = (
        TunedProducts(NO_LIBRARY, table, place) for place in ("here", "there", "")
    )
    sizes = FIRST.sizes(32)
    table[key_of(sizes)] = None
    assert here.prepared(sizes) is None
    asked: list[bytes] = []

    class Plan:
        def __init__(self, *about: object) -> None: ...
        def accepts(self, algorithm: bytes) -> bool:
            asked.append(algorithm)
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tllm_spec.kernels.tuned_linear.Plan", Plan)
        here.choose(placed_key(FIRST, 32), OTHER)
        prepared = here.prepared(sizes)
        assert prepared is not None and prepared[1] == OTHER and asked == [OTHER]
        assert elsewhere.prepared(sizes) is None and nowhere.prepared(sizes) is None
        here.choose(placed_key(FIRST, 32), None)
        table[key_of(sizes)] = ALONE
        assert here.prepared(sizes) is None, "torch's was as fast there"
        nowhere.choose(key_of(sizes), ALONE)
        found = nowhere.prepared(sizes)
        assert found is not None and found[1] == ALONE
