"""Which lengths a model is served with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.helpers import MAX_POSITIONS, reference_logits, save_checkpoint
from tllm_spec import LLM, SamplingParams
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.building.plan import BuildPlan

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu"}


def plan_of(folder: Path, **options: Any) -> BuildPlan:
    return BuildPlan(LlmArgs(model=str(folder), device="cpu", **options))


def greedy(model: Any, tokens: list[int], number: int) -> list[int]:
    text = list(tokens)
    for _ in range(number):
        text.append(int(reference_logits(model, text)[-1].argmax()))
    return text[len(tokens) :]


def test_a_window_of_a_draft_model_does_not_limit_the_target(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "target", "Llama")
    save_checkpoint(tmp_path / "draft", "Mistral", sliding_window=8, max_position_embeddings=16)
    spec = {"decoding_type": "Draft_Target", "max_draft_len": 2}
    spec["speculative_model"] = str(tmp_path / "draft")
    prompt = list(range(5, 35))
    texts = []
    for each in (None, spec):
        with LLM(str(tmp_path / "target"), speculative_config=each, **OPTIONS) as llm:
            texts.append(llm.generate(prompt, PARAMS, use_tqdm=False).outputs[0].token_ids)
            llm.check_integrity()
    assert texts[0] == texts[1]


def test_a_context_that_yarn_extends_is_served_in_full(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    rope["original_max_position_embeddings"] = MAX_POSITIONS
    model = save_checkpoint(tmp_path, "Llama", rope_parameters=rope)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["max_position_embeddings"] == MAX_POSITIONS
    plan = plan_of(tmp_path)
    assert plan.max_seq_len == 4 * MAX_POSITIONS
    with pytest.raises(ValueError, match="max_seq_len = 257 exceeds the model's 256 positions"):
        plan_of(tmp_path, max_seq_len=257)
    prompt = torch.arange(100).tolist()
    with LLM(str(tmp_path), **OPTIONS) as llm:
        found = llm.generate(prompt, PARAMS, use_tqdm=False).outputs[0].token_ids
        llm.check_integrity()
    assert found == greedy(model, prompt, 8)
