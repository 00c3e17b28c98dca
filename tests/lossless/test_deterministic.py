"""`deterministic: true` without a GPU: what it refuses, and a tiny model under Triton's
interpreter, in a process of its own, whose texts and log probabilities are the same bits in every
batch. test_deterministic_gpu.py has a device."""

from pathlib import Path
from typing import Any

import pytest

from tests.executor.tiny_llama import write_tiny_llama
from tests.kernels.interpreter import INTERPRETED, only_outside_the_interpreter
from tests.models.fp8_checkpoint import keeping_int4, quantise
from tests.models.helpers import save_checkpoint
from tests.models.mtp_reference import save_with_mtp
from tests.models.test_llama4 import save_llama4
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.zoo.quantise import Style
from tllm_spec.zoo.quantise import quantise as write_copy

NGRAM = {"decoding_type": "NGram", "max_draft_len": 3}
# Ends of prompts are repeated, so that n-grams are found. One is longer than a chunk.
PROMPTS = [[1, 2, 3, 1, 2], [7, 8, 9, 10, 7, 8, 9], list(range(20, 41))]
IN_CHUNKS = {"enable_chunked_prefill": True, "max_num_tokens": 19}
TREES = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_draft_len": 2}
MTP_TREES = {"decoding_type": "MTP"} | TREES
KINDS = ("llama", "experts", "chunks", "fp8 activations", "fp8 cache", "4-bit weights", "latents")
# Their kernels' own tests show that other rows change no bit.
SLOW = ("experts", "chunks", "4-bit weights")
NUM_TOKENS = 4
SMALL_LATENTS = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}

# The interpreter takes long for each head and each block of outputs.
SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 80,
}
# A prompt has two or three chunks.
SMALL_CHUNKS = SMALL | {"attention_chunk_size": 11, "floor_scale": 6, "no_rope_layer_interval": 2}


@only_outside_the_interpreter
def test_a_cpu_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path)
    with pytest.raises(ValueError, match=r"deterministic = true needs CUDA and Triton; on 'cpu'"):
        LLM(model, skip_tokenizer_init=True, device="cpu", deterministic=True)


def test_options_that_contradict_deterministic_are_refused() -> None:
    for backend in ("VANILLA", "TRITON"):
        with pytest.raises(ValueError, match=rf"attn_backend must be 'auto', not '{backend}'"):
            LlmArgs.from_kwargs("m", deterministic=True, attn_backend=backend)
    draft = {"decoding_type": "Draft_Target", "speculative_model": "m", "max_draft_len": 2}
    with pytest.raises(
        ValueError, match="deterministic and use_rejection_sampling exclude each other"
    ):
        LlmArgs.from_kwargs(
            "m", deterministic=True, speculative_config=draft | {"use_rejection_sampling": True}
        )
    with pytest.raises(ValueError, match=r"tensor_parallel_size up to 2, not 4: the order"):
        LlmArgs.from_kwargs("m", deterministic=True, tensor_parallel_size=4)
    assert LlmArgs.from_kwargs("m", deterministic=True, speculative_config=draft).deterministic
    assert LlmArgs.from_kwargs("m", deterministic=True, tensor_parallel_size=2).deterministic


def outputs_of(model: Path, batch_size: int, **options: Any) -> list[RequestOutput]:
    kept = {"max_batch_size": batch_size, "max_seq_len": 80}
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_p": 0.8}, {"temperature": 0.7}]
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=i, logprobs=2, **way)
        for i, way in enumerate(ways)
    ]
    with LLM(
        model, skip_tokenizer_init=True, device="cpu", deterministic=True, **(kept | options)
    ) as llm:
        return llm.generate(PROMPTS, params, use_tqdm=False)


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process of Triton's interpreter")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=f"interpreted {kind}", marks=[pytest.mark.slow] * (kind in SLOW))
        for kind in KINDS
    ],
)
def test_every_bit_is_that_of_a_request_alone(kind: str, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path)
    if kind == "experts":
        sizes = SMALL | {"num_local_experts": 4, "intermediate_size": 48}
        save_checkpoint(tmp_path, "Mixtral", **sizes)
    elif kind == "chunks":
        save_llama4(tmp_path, **SMALL_CHUNKS)
    elif kind == "fp8 activations":
        save_checkpoint(tmp_path, "Llama", **SMALL)
        quantise(tmp_path, granularity="row")
    elif kind == "4-bit weights":
        save_checkpoint(tmp_path, "Llama", **SMALL)
        write_copy(tmp_path, Style("gptq", is_ordered=True))
    elif kind == "latents":
        save_with_mtp(tmp_path, vocab_size=48, max_position_embeddings=80, **SMALL_LATENTS)
    with keeping_int4():
        check_every_bit(kind, model)


def check_every_bit(kind: str, model: Path) -> None:
    """Together, in chunks and with drafts: a fault of any one shows."""
    cache = {"enable_block_reuse": False, "dtype": "fp8" if kind == "fp8 cache" else "model"}
    alone = outputs_of(model, 1, kv_cache_config=cache)
    assert all(one.error is None and one.outputs[0].length == NUM_TOKENS for one in alone)
    spec = MTP_TREES if kind == "latents" else NGRAM
    others = outputs_of(model, 3, kv_cache_config=cache, speculative_config=spec, **IN_CHUNKS)
    for one, other in zip(alone, others, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    stats = [other.speculative_decoding for other in others if other.speculative_decoding]
    assert sum(each.num_drafted_tokens for each in stats) > 0
