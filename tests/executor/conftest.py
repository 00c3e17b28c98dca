"""Tiny checkpoints that all executor tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.executor.tiny_llama import write_tiny_llama


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Cores that share a layer of a tiny model wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 64 tokens."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model for `tiny` that is often, but not always, of its opinion."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-draft"), noise=0.15)
