"""OLMo 2: logits of transformers, also on two ranks, whose q and k are normed together."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.distributed.thread_ranks import ThreadGroup
from tests.models.helpers import (
    MAX_POSITIONS,
    assert_logits_in_all_ways,
    random_tokens,
    reference_logits,
    save_checkpoint,
)
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.interface import HeadsBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.distributed.communicator import Communicator
from tllm_spec.models.layers import Placement
from tllm_spec.models.registry import model_config, model_config_of, model_type
from tllm_spec.models.weights import load_weights

TOKENS = random_tokens(MAX_POSITIONS, seed=3)


@pytest.mark.parametrize("change", [{}, {"attention_bias": True, "head_dim": 32}], ids=str)
@pytest.mark.parametrize("kind", [VanillaAttention, TritonAttention, BatchInvariantAttention])
def test_logits_equal_transformers(
    kind: type[HeadsBackend], change: dict[str, Any], tmp_path: Path
) -> None:
    expected = reference_logits(save_checkpoint(tmp_path, "Olmo2", **change), TOKENS)
    assert_logits_in_all_ways(tmp_path, kind, expected, TOKENS)


@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_ranks_norm_their_heads_together(num_kv_heads: int, tmp_path: Path) -> None:
    """With one head of k both ranks have it."""
    reference = save_checkpoint(tmp_path, "Olmo2", num_key_value_heads=num_kv_heads)
    theirs, config = reference.model.layers[1].self_attn, model_config(tmp_path)
    hidden = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0))

    def heads_of(communicator: Communicator) -> torch.Tensor:
        cpu = torch.device("cpu")
        placement = Placement(torch.float32, cpu, communicator.mapping, communicator=communicator)
        model = model_type(config)(config, MAX_POSITIONS, placement)
        load_weights(model, tmp_path)
        heads: torch.Tensor = model.model.layers[1].self_attn._heads(hidden, None)[0]
        return heads

    both = ThreadGroup().run(heads_of)
    with torch.inference_mode():
        q, k = (
            norm(proj(hidden))
            for norm, proj in ((theirs.q_norm, theirs.q_proj), (theirs.k_norm, theirs.k_proj))
        )
    found = [heads.split_with_sizes((2, 1, 1), 1) for heads in both]
    torch.testing.assert_close(torch.cat([each[0].flatten(1) for each in found], 1), q)
    keys = [each[1].flatten(1) for each in found]
    torch.testing.assert_close(torch.cat(keys if num_kv_heads > 1 else keys[:1], 1), k)
    assert num_kv_heads > 1 or torch.equal(*keys)


def test_a_missing_key_has_the_default_of_transformers() -> None:
    own = {"architectures": ["Olmo2ForCausalLM"]}
    theirs = transformers.Olmo2Config().to_dict() | own | {"dtype": None}
    assert model_config_of(own) == model_config_of(theirs)
