"""`UserProvidedDecodingConfig`: a drafter object, or an import path of its class."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.decoding_options import FixedDrafter, ngram, speculate
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import UserProvidedDecodingConfig
from tllm_spec.llm import LLM


def test_a_user_drafter_is_an_object_or_is_made_from_its_import_path() -> None:
    drafter = FixedDrafter()
    assert UserProvidedDecodingConfig(max_draft_len=2, drafter=drafter).make_drafter() is drafter
    by_path = {"drafter": "fractions:Fraction", "drafter_args": {"numerator": 3}}
    args = LlmArgs.from_kwargs("m", **speculate(ngram(decoding_type="User_Provided", **by_path)))
    assert isinstance(args.speculative_config, UserProvidedDecodingConfig)
    assert args.speculative_config.make_drafter() == 3
    assert args.speculative_config.make_resource_manager() is None


def test_a_class_next_to_the_options_file_can_be_named_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_drafter.py").write_text("class Own:\n    pass\n")
    (tmp_path / "fractions.py").write_text("")  # hides no module of Python's
    file = tmp_path / "own.yaml"
    for path in ("own_drafter:Own", "fractions:Fraction"):
        spec = ngram(decoding_type="User_Provided", drafter=path)
        file.write_text(json.dumps(speculate(spec)))
        config = LlmArgs.from_yaml(file, model="m").speculative_config
        assert isinstance(config, UserProvidedDecodingConfig)
        config.check_code()
        assert type(config.make_drafter()).__name__ == path.partition(":")[2]


def test_code_that_is_missing_is_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tllm_spec.executor.build.build_engines", lambda *_: 1 / 0)
    spec = ngram(decoding_type="User_Provided", drafter="no_such_module:Drafter")
    with pytest.raises(ValueError, match="put it next to the YAML file, or its folder into PYTH"):
        LLM("zoo:llama", skip_tokenizer_init=True, speculative_config=spec)


def test_an_import_path_that_leads_nowhere_is_named() -> None:
    for path in ("no_such_module:Drafter", "fractions:NoSuchClass"):
        with pytest.raises(ValueError, match=path):
            UserProvidedDecodingConfig(max_draft_len=2, drafter=path).make_drafter()
    with pytest.raises(ValueError, match=r"package\.module:ClassName"):
        UserProvidedDecodingConfig(max_draft_len=2, drafter="not a path")
    with pytest.raises(ValueError, match="drafter_args"):
        UserProvidedDecodingConfig(
            max_draft_len=2, drafter=FixedDrafter(), drafter_args={"token": 1}
        )


@pytest.mark.parametrize(
    ("path", "arguments", "sentence"),
    [
        (".x:Y", None, "'.x:Y' cannot be imported"),
        ("os:path", None, "'os:path' is not a class"),
        ("fractions:Fraction", {"sz": 2}, "drafter_args = {'sz': 2} do not fit Fraction: .*'sz'"),
        ("no_such_module:Y", None, "cannot be imported: No module"),
    ],
)
def test_a_wrong_import_path_or_wrong_arguments_are_named_when_the_drafter_is_made(
    path: str, arguments: dict[str, Any] | None, sentence: str
) -> None:
    config = UserProvidedDecodingConfig(max_draft_len=2, drafter=path, drafter_args=arguments)
    with pytest.raises(ValueError, match=sentence):
        config.make_drafter()
