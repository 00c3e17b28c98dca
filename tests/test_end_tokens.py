"""Which tokens end a text: those of the model's files and the tokenizer's."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.grammars import end_ids_of
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.zoo.registry import resolve_model

PROMPT = "def add(a, b):\n    return"


@pytest.mark.parametrize(
    ("model", "tokenizer", "expected"),
    [
        ((1, 2), 7, (1, 2, 7)),
        ((1, 2), 2, (1, 2)),
        ((), 7, (7,)),
        ((1,), None, (1,)),
        ((1, 99, -1), 100, (1,)),
    ],
)
def test_the_end_tokens_are_the_models_and_the_tokenizers_of_the_vocabulary(
    model: tuple[int, ...], tokenizer: int | None, expected: tuple[int, ...]
) -> None:
    limits = RequestLimits(99, model, 64, 0, None)
    own: Any = SimpleNamespace(eos_token_id=tokenizer)
    assert end_ids_of(limits, own) == expected
    assert end_ids_of(limits, None) == tuple(each for each in model if 0 <= each < 99)


def test_a_text_ends_at_the_end_token_that_only_the_tokenizer_names(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_seq_len": 64, "max_num_tokens": 64}
    with LLM("zoo:llama", **options) as llm:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        plain = llm.generate(PROMPT, params, use_tqdm=False).outputs[0].token_ids
    end, folder = plain[6], tmp_path / "tokenizer"
    shutil.copytree(resolve_model("zoo:llama"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = {number: name for name, number in tokenizer["model"]["vocab"].items()}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    changed = settings | {"eos_token": names[end]}
    (folder / "tokenizer_config.json").write_text(json.dumps(changed))
    with LLM("zoo:llama", tokenizer=str(folder), **options) as llm:
        output = llm.generate(PROMPT, SamplingParams(max_tokens=12), use_tqdm=False).outputs[0]
        llm.check_integrity()
    assert output.finish_reason == "stop"
    assert output.token_ids[: plain.index(end)] == plain[: plain.index(end)]
    assert len(output.token_ids) <= plain.index(end) + 1
