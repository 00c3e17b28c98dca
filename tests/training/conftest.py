"""A tiny random target and EAGLE-3 head for training."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.eagle3_entries import DRAFT_IDS, SHAPE, with_large_weights
from tllm_spec.training.eagle3 import Eagle3Head


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
