"""Tiny checkpoints that all executor tests share."""

from pathlib import Path

import pytest

from tests.executor.tiny_llama import write_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 64 tokens."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model for `tiny` that is often, but not always, of its opinion."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-draft"), noise=0.15)
