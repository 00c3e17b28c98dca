"""The zoo's tokenizer on held-out text."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tllm_spec.zoo.corpus import heldout_files, read_source
from tllm_spec.zoo.registry import resolve_model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model("zoo:llama"))


@pytest.fixture(scope="session")
def heldout_tokens(tokenizer: Any) -> Tensor:
    """`[N]`: all held-out files, concatenated."""
    return torch.tensor(
        [token for path in heldout_files() for token in tokenizer.encode(read_source(path))]
    )
