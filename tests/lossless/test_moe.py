"""Models with experts through the engine: drafts change no text."""

from pathlib import Path
from typing import Any

import pytest

from tests.models.helpers import random_tokens, save_checkpoint
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {},
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 40},
    "Qwen3Moe": EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]},
}
NGRAM = {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2}
PROMPTS = [random_tokens(6 + length, seed=length) for length in range(4)]


def outputs(folder: Path, **options: Any) -> tuple[list[list[int]], float]:
    """Each prompt's tokens, greedy and sampled, and the most accepted drafts per round."""
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=i, temperature=0.3 * (i % 2))
        for i in range(len(PROMPTS))
    ]
    with LLM(
        str(folder), skip_tokenizer_init=True, max_batch_size=3, max_seq_len=64, **options
    ) as llm:
        found = llm.generate(PROMPTS, params)
    lengths = [
        each.speculative_decoding.acceptance_length for each in found if each.speculative_decoding
    ]
    return [each.outputs[0].token_ids for each in found], max(lengths, default=1.0)


@pytest.mark.parametrize("architecture", MODELS)
def test_ngram_drafts_leave_the_text_of_a_model_with_experts_alone(
    architecture: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, architecture, **MODELS[architecture])
    plain, _ = outputs(tmp_path)
    speculated, acceptance_length = outputs(tmp_path, speculative_config=NGRAM)
    assert speculated == plain
    assert acceptance_length > 1.2, "no draft was accepted"


def test_dummy_weights_need_only_the_config(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Qwen3Moe", **MODELS["Qwen3Moe"])
    (tmp_path / "model.safetensors").unlink()
    plain, _ = outputs(tmp_path, load_format="dummy")
    speculated, _ = outputs(tmp_path, load_format="dummy", speculative_config=NGRAM)
    assert speculated == plain and all(len(set(tokens)) > 1 for tokens in plain)
