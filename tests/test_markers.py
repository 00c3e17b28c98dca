"""Which combinations of a test's parameters the default run has."""

from itertools import product
from typing import Any
from unittest.mock import Mock

from tests.conftest import chosen


def grid(marker: str, *arguments: int, **parameters: Any) -> list[Any]:
    """Tests of all combinations."""
    own = {marker: Mock(args=arguments)}
    return [
        Mock(
            callspec=Mock(params=dict(zip(parameters, values, strict=True))),
            get_closest_marker=own.get,
        )
        for values in product(*parameters.values())
    ]


def test_covering_leaves_few_combinations_with_each_value_of_each_parameter() -> None:
    parameters = {"mode": range(5), "size": "abc", "overlap": (True, False)}
    found = [item.callspec.params for item in chosen(grid("covering", **parameters))]
    assert len(found) == 5
    for name, values in parameters.items():
        assert {each[name] for each in found} == {*values}


def test_thinned_leaves_each_nth_combination() -> None:
    found = [item.callspec.params for item in chosen(grid("thinned", 3, a="xyz", b=range(3)))]
    assert found == [{"a": "x", "b": 0}, {"a": "y", "b": 2}, {"a": "z", "b": 1}]
    assert len(chosen(grid("thinned", a=range(4)))) == 2
    assert len(chosen(grid("other", a=range(4)))) == 4
