"""Also CPUs keep 4-bit weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock, patch

from tllm_spec.models.formats import quantised_layers


@contextmanager
def keeping_int4() -> Iterator[Mock]:
    """Also CPUs keep 4-bit weights, which the plain-torch reference multiplies. Yields what is
    asked whether a device multiplies them."""
    multiplies_int4 = quantised_layers.multiplies_int4
    asked = Mock(side_effect=lambda device: device.type == "cpu" or multiplies_int4(device))
    with patch.object(quantised_layers, "multiplies_int4", asked):
        yield asked
