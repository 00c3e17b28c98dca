"""For the whole suite: one torch thread, and tiny checkpoints. On small models a second thread
costs more than it computes, most of all when the machine is busy."""

from pathlib import Path

import pytest
import torch

from tests.executor.tiny_llama import write_tiny_llama
from tests.lossless.engines import write_tiny_drafts

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 64 tokens."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A draft model and a head for `tiny`."""
    return write_tiny_drafts(tmp_path_factory.mktemp("drafts"))
