"""For the whole suite: one torch thread, tiny checkpoints, which tests are slow. On small models a
second thread costs more than it computes, most of all when the machine is busy."""

import signal
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.executor.tiny_llama import write_tiny_llama
from tests.lossless.engines import LONG_ONLY, write_tiny_drafts
from tests.models.fp8_checkpoint import keeping_fp8

torch.set_num_threads(1)
# A shell ignores SIGINT for what it starts in the background, and children inherit that: tests of
# Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what LONG_ONLY and the marker `thinned` say."""
    seen: dict[tuple[str, str], list[str]] = {}  # the values of each parameter of each test
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        is_left_out = item.callspec.params.get("mode") in LONG_ONLY
        if item.get_closest_marker("thinned"):
            place = 0
            for name, value in item.callspec.params.items():
                values = seen.setdefault((item.nodeid.split("[")[0], name), [])
                if repr(value) not in values:
                    values.append(repr(value))
                place += values.index(repr(value))
            is_left_out |= place % 2 == 1
        if is_left_out:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 64 tokens."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A draft model and a head for `tiny`."""
    return write_tiny_drafts(tmp_path_factory.mktemp("drafts"))


@pytest.fixture
def fp8_on_cpu() -> Iterator[Mock]:
    """FP8 weights stay so on CPUs, too. Yields what is asked whether a device multiplies them."""
    with keeping_fp8() as asked:
        yield asked
