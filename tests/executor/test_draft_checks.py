"""A head given as a draft model, and the reverse, are refused by option and cause."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.lossless.other_tokenizer import NUM_REMOVED, write_draft_with_another_tokenizer
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.speculative.drafting.heads import DraftPlan
from tllm_spec.executor.speculative.drafting.loaded_draft import check_draft
from tllm_spec.executor.speculative.modes import draft_plan_of
from tllm_spec.llm import LLM
from tllm_spec.models.registry import model_config
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.registry import resolve_model

ZOO = resolve_model("zoo:llama")


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


def draft_model(folder: Path, **options: str) -> DraftPlan:
    args = LlmArgs(
        model="zoo:llama",
        speculative_config={
            "decoding_type": "Draft_Target",
            "max_draft_len": 3,
            "speculative_model": str(folder),
            **options,
        },
    )
    draft = draft_plan_of(args.speculative_config)
    assert draft is not None
    return draft


def test_a_draft_model_without_a_tokenizer_is_taken_to_have_the_targets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = resolve_model("zoo:llama"), resolve_model("zoo:llama-draft")
    shutil.copy(draft / "config.json", tmp_path)
    sizes = model_config(target)
    check_draft(draft_model(tmp_path), load_tokenizer(target), sizes)
    assert f"{tmp_path} has no tokenizer; its token ids are taken to be the target's" in caplog.text
    (tmp_path / "tokenizer.json").write_text("[]")
    problem = "speculative_config.speculative_model: no tokenizer can be loaded from"
    with pytest.raises(ValueError, match=problem):
        check_draft(draft_model(tmp_path), load_tokenizer(target), sizes)


def test_another_tokenizer_is_mapped_by_bytes_and_refused_where_the_network_has_no_map(
    tmp_path: Path,
) -> None:
    folder = write_draft_with_another_tokenizer(tmp_path / "draft")
    target, sizes = load_tokenizer("zoo:llama"), model_config(ZOO)
    tokens = check_draft(draft_model(folder), target, sizes)
    assert tokens is not None and len(tokens.ids) == 2048 - NUM_REMOVED
    names = load_tokenizer(str(folder)).get_vocab()
    pairs = dict(zip(tokens.ids.tolist(), tokens.rows.tolist(), strict=True))
    [word] = target.encode(" the")
    assert pairs[word] == names["▁the"] and pairs[1] == names["<|endoftext|>"]
    hot = "zoo:llama-draft/token_map.json"
    limited = check_draft(draft_model(folder, speculative_token_map=hot), target, sizes)
    assert limited is not None and 900 < len(limited.ids) < 1024
    assert {*limited.ids.tolist()} < pairs.keys()
    with pytest.raises(ValueError, match="draft_backend = 'onnxruntime' is refused: the draft mod"):
        check_draft(draft_model(folder, draft_backend="onnxruntime"), target, sizes)


def test_a_tokenizer_with_few_of_the_targets_tokens_is_refused_by_option_and_figure(
    tmp_path: Path,
) -> None:
    folder = write_draft_with_another_tokenizer(tmp_path / "draft", num_removed=1300)
    sizes = model_config(ZOO)
    with pytest.raises(ValueError) as refusal:
        check_draft(draft_model(folder), load_tokenizer("zoo:llama"), sizes)
    assert "speculative_config.speculative_model: the draft model's tokenizer shares 748" in str(
        refusal.value
    )
