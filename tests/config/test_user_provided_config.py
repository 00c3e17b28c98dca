"""`UserProvidedDecodingConfig`: a drafter object, or an import path of its class."""

from typing import Any

import pytest

from tests.decoding_options import FixedDrafter, ngram, speculate
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import UserProvidedDecodingConfig


def test_a_user_drafter_is_an_object_or_is_made_from_its_import_path() -> None:
    drafter = FixedDrafter()
    assert UserProvidedDecodingConfig(max_draft_len=2, drafter=drafter).make_drafter() is drafter
    by_path = {"drafter": "fractions:Fraction", "drafter_args": {"numerator": 3}}
    args = LlmArgs.from_kwargs("m", **speculate(ngram(decoding_type="User_Provided", **by_path)))
    assert isinstance(args.speculative_config, UserProvidedDecodingConfig)
    assert args.speculative_config.make_drafter() == 3
    assert args.speculative_config.make_resource_manager() is None


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
        (
            "tllm_spec.executor.speculative.drafting.drafter:Drafter",
            {},
            "is abstract: .* prepare_draft",
        ),
    ],
)
def test_a_wrong_import_path_or_wrong_arguments_are_named_when_the_drafter_is_made(
    path: str, arguments: dict[str, Any] | None, sentence: str
) -> None:
    config = UserProvidedDecodingConfig(max_draft_len=2, drafter=path, drafter_args=arguments)
    with pytest.raises(ValueError, match=sentence):
        config.make_drafter()
