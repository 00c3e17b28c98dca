"""Bounds of numbers and `multipleOf` in the forms that xgrammar keeps."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor, isfinite

from tllm_spec.config.option_checks import shown
from tllm_spec.grammar.schema_types import Schema

LOWS, HIGHS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
MAX_MULTIPLES = 1024
DECIMALS = 6  # of numbers with bounds, as xgrammar writes them
Bound = tuple[Fraction, bool]  # the value, and whether it is excluded


def rewrite_numbers(schema: Schema, types: list[str]) -> None:
    """Raises ValueError for what cannot be kept."""
    step = schema.get("multipleOf")
    if step is not None:
        step = _exact(step, "multipleOf")
        if step <= 0:
            raise ValueError(f"multipleOf = {shown(schema['multipleOf'])} must be greater than 0")
    low, high = _bound(schema, LOWS, is_low=True), _bound(schema, HIGHS, is_low=False)
    has_fractions = "number" in types and (step is None or step.denominator > 1)
    if step is not None and (low or high or has_fractions):
        _list_multiples(schema, types, step, low, high)
        return
    if step is not None:
        schema["multipleOf"] = step.numerator  # of whole numbers
    if not has_fractions and "number" in types:
        schema["type"] = sorted({"integer" if each == "number" else each for each in types})
    if low and high:
        _check_bounds(low, high, Fraction(1, 10**DECIMALS) if has_fractions else Fraction(1))
    if not has_fractions:
        _write_whole_bounds(schema, low, high)


def _bound(schema: Schema, names: tuple[str, str], *, is_low: bool) -> Bound | None:
    """The narrower one of two; it alone stays in the schema."""
    bounds = [
        (_exact(value, name), name == names[1])
        for name in names
        if (value := schema.get(name)) is not None
    ]
    if not bounds:
        return None
    found = max(bounds) if is_low else min(bounds, key=lambda bound: (bound[0], not bound[1]))
    schema.pop(names[not found[1]], None)
    return found


def _exact(value: object, name: str) -> Fraction:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value):
        raise ValueError(f"{name} = {shown(value)} in the JSON schema: a number is needed")
    return Fraction(str(value))


def _first(bound: Bound, step: Fraction) -> int:
    """The least multiple that a lower bound allows, in steps."""
    value, is_excluded = bound
    return floor(value / step) + 1 if is_excluded else ceil(value / step)


def _last(bound: Bound, step: Fraction) -> int:
    return -_first((-bound[0], bound[1]), step)


def _check_bounds(low: Bound, high: Bound, step: Fraction) -> None:
    if _first(low, step) > _last(high, step):
        kind = "integer" if step == 1 else f"number of at most {DECIMALS} decimals"
        raise ValueError(f"no {kind} is within the bounds in the JSON schema")


def _list_multiples(
    schema: Schema, types: list[str], step: Fraction, low: Bound | None, high: Bound | None
) -> None:
    """The compiler reads no bounds next to multipleOf, so all numbers are listed."""
    if low is None or high is None or len(types) > 1:
        raise ValueError(
            "multipleOf in the JSON schema needs type integer without bounds, or a minimum and a "
            "maximum"
        )
    if types == ["integer"]:
        step = Fraction(step.numerator)  # whole numbers that are multiples of a fraction
    _check_bounds(low, high, step)
    first, last = _first(low, step), _last(high, step)
    if last - first >= MAX_MULTIPLES:
        raise ValueError(
            f"multipleOf in the JSON schema: there are {last - first + 1} such numbers; at most "
            f"{MAX_MULTIPLES} are supported"
        )
    for name in ("type", "multipleOf", *LOWS, *HIGHS):
        schema.pop(name, None)
    multiples = [each * step for each in range(first, last + 1)]
    schema["enum"] = [int(each) if each.denominator == 1 else float(each) for each in multiples]


def _write_whole_bounds(schema: Schema, low: Bound | None, high: Bound | None) -> None:
    for name in (*LOWS, *HIGHS):
        schema.pop(name, None)
    if low:
        schema["minimum"] = _first(low, Fraction(1))
    if high:
        schema["maximum"] = _last(high, Fraction(1))
