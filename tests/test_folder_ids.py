"""Token ids that a model folder names, and its vocabulary does not have."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.lossless.engines import engine
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.zoo.registry import resolve_model

BEYOND, VOCAB_SIZE = "<|beyond|>", 2048


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of its end tokens have the id after the last one of the model."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    shutil.copytree(resolve_model("zoo:llama"), folder)
    _edit(folder / "config.json", eos_token_id=VOCAB_SIZE)
    _edit(folder / "generation_config.json", eos_token_id=[VOCAB_SIZE, VOCAB_SIZE + 9])
    _edit(folder / "tokenizer_config.json", eos_token=BEYOND)
    tokenizer = folder / "tokenizer.json"
    added = json.loads(tokenizer.read_text())["added_tokens"]
    _edit(tokenizer, added_tokens=[*added, added[-1] | {"id": VOCAB_SIZE, "content": BEYOND}])
    return folder


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


SLOW = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("plain", "eagle3_tree")]


@pytest.mark.parametrize("mode", ["ngram", *SLOW])
def test_end_tokens_beyond_the_vocabulary_harm_no_request(
    folder: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    params: list[dict[str, Any]] = [
        {"max_tokens": 6, "min_tokens": 4, "temperature": 0.0},
        {"max_tokens": 6, "temperature": 0.0},
        {"max_tokens": 6, "temperature": 0.0, "bad": [BEYOND]},
        {"max_tokens": 20, "guided_decoding": {"regex": "[0-9]{3}"}, "seed": 1},
        {"max_tokens": 20, "guided_decoding": {"choice": ["def", "class"]}, "min_tokens": 1},
    ]
    with LLM(str(folder), **engine(mode, 3)) as llm:
        (warning,) = [text for text in caplog.messages if "end tokens" in text]
        assert warning.endswith(
            "[2048, 2057], and its vocabulary has ids 0 to 2047: they are left "
            "out, and no text ends by itself"
        )
        outputs = llm.generate(["import os\n"] * 5, [SamplingParams(**each) for each in params])
        llm.check_integrity()
    assert isinstance(outputs, list) and [output.error for output in outputs] == [None] * 5
    early, plain, without, digits, word = [output.outputs[0] for output in outputs]
    assert len(plain.token_ids) == 6 and early.token_ids == plain.token_ids == without.token_ids
    assert re.fullmatch("[0-9]{3}", digits.text) and word.text in ("def", "class")
    # There is no token to end these texts with, and none that could follow.
    assert (digits.finish_reason, word.finish_reason) == ("stop", "stop")
