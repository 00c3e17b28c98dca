"""The zoo's tokenizer on held-out text; a tiny random target and EAGLE-3 head for training."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.zoo.eagle3_entries import DRAFT_IDS, SHAPE, with_large_weights
from tllm_spec.zoo.corpus import heldout_files, read_source
from tllm_spec.zoo.eagle3 import Eagle3Head
from tllm_spec.zoo.registry import resolve_model


@pytest.fixture
def target() -> LlamaForCausalLM:
    """Ten layers, so that the three captured ones (1, 4, 6) are not evenly spaced."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 10}
    config = LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None)
    return with_large_weights(LlamaForCausalLM(config)).requires_grad_(False).eval()


@pytest.fixture
def head() -> Eagle3Head:
    torch.manual_seed(2)
    return with_large_weights(Eagle3Head(SHAPE, DRAFT_IDS))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model("zoo:llama"))


@pytest.fixture(scope="session")
def heldout_tokens(tokenizer: Any) -> Tensor:
    """`[N]`: all held-out files, concatenated."""
    return torch.tensor(
        [token for path in heldout_files() for token in tokenizer.encode(read_source(path))]
    )
