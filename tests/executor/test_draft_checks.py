"""A head given as a draft model, and the reverse, are refused by option and cause."""

from pathlib import Path
from typing import Any

import pytest

from tllm_spec.llm import LLM


@pytest.mark.parametrize(
    ("decoding_type", "model", "sentences"),
    [
        ("Draft_Target", "zoo:llama-eagle3", ["is an EAGLE-3 head", "decoding_type: Eagle3"]),
        ("Eagle3", "zoo:llama-draft", ["layers, not an EAGLE-3 head", "Draft_Target"]),
        ("Eagle3", "zoo:llama", ["layers, not an EAGLE-3 head", "Draft_Target"]),
    ],
)
@pytest.mark.parametrize("options", [{}, {"skip_tokenizer_init": True}])
def test_a_model_of_the_wrong_kind_is_refused_by_option_and_cause(
    decoding_type: str, model: str, sentences: list[str], options: dict[str, Any]
) -> None:
    spec = {"decoding_type": decoding_type, "max_draft_len": 3, "speculative_model": model}
    with pytest.raises(ValueError) as refusal:
        LLM("zoo:llama", max_seq_len=64, speculative_config=spec, **options)
    assert f"speculative_config.speculative_model = {model!r}" in str(refusal.value)
    for sentence in sentences:
        assert sentence in str(refusal.value)


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    spec = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": tmp_path}
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        LLM("zoo:llama", max_seq_len=64, speculative_config=spec)
