"""Checks of single values, each with a sentence that names the option, the value and what is
accepted. All raise ValueError."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from tllm_spec.config.option_checks import shown

LARGEST = sys.float_info.max


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: True or False is needed")


def check_integer(name: str, value: object, low: int = 0, high: float = math.inf) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: an integer is needed")
    if not low <= value <= high:
        raise ValueError(f"{name} = {value} is out of range: {_range(low, high)}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: a number is needed")
    # The second condition is for integers, which may be larger than any float.
    if not (low <= value <= high and -LARGEST <= value <= LARGEST):
        raise ValueError(f"{name} = {value} is out of range: {_range(low, high)}")


def check_list(name: str, value: object, *, or_none: bool = True) -> None:
    if or_none and value is None:
        return
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ValueError(f"{name} = {shown(value)}: a list of token ids is needed")


def _range(low: float, high: float) -> str:
    if math.isinf(low):
        return "a finite number is needed"
    return f"at least {low} is needed" if math.isinf(high) else f"{low} to {high} is accepted"
