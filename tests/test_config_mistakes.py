"""Mistakes in configurations that only YAML or an import path can make: each is refused by a
sentence."""

from typing import Any

import pytest

from tllm_spec.config import LlmArgs
from tllm_spec.speculative_config import UserProvidedDecodingConfig

NGRAM: dict[Any, Any] = {"decoding_type": "NGram", "max_draft_len": 4}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"speculative_config": NGRAM | {"decoding_type": ["NGram"]}},
            r"decoding_type = \['NGram'\] is not a known type",
        ),
        (
            {"speculative_config": NGRAM | {5: 6}},
            "speculative_config has the key 5; names of options",
        ),
        ({"kv_cache_config": {5: 6}}, "kv_cache_config has the key 5"),
        (
            {"prefill_cuda_graph_backend": "piecewise"},
            "refused: contexts are whole graphs; accepted: 'auto' or",
        ),
    ],
)
def test_what_yaml_can_write_and_no_option_means_is_refused_by_a_sentence(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        LlmArgs.from_kwargs("m", **options)


@pytest.mark.parametrize(
    ("path", "arguments", "sentence"),
    [
        (".x:Y", None, "'.x:Y' cannot be imported"),
        ("os:path", None, "'os:path' is no class"),
        ("fractions:Fraction", {"sz": 2}, "drafter_args = {'sz': 2} do not fit Fraction: .*'sz'"),
        ("no_such_module:Y", None, "cannot be imported: No module"),
    ],
)
def test_an_import_path_or_arguments_that_lead_nowhere_are_named(
    path: str, arguments: dict[str, Any] | None, sentence: str
) -> None:
    config = UserProvidedDecodingConfig(max_draft_len=2, drafter=path, drafter_args=arguments)
    with pytest.raises(ValueError, match=sentence):
        config.make_drafter()
