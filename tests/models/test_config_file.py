"""Wrong types and values in config.json: each is refused by its key, none ends in another
exception."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.published import GEMMA3, GPT_OSS, PHI4_MINI, PUBLISHED
from tests.models.published_fp8 import PUBLISHED_FP8
from tests.models.published_images import MISTRAL_SMALL_3_1, QWEN3_VL_30B
from tests.models.published_states import QWEN3_5, QWEN3_NEXT
from tllm_spec.models.eagle import EagleConfig
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.registry import check_shards, model_config
from tllm_spec.zoo.registry import resolve_model

# A value of each type, and those at which types end.
NUMBERS = (0, -1, 3, 1.5, 10**12, 10**400, float("inf"))
VALUES = (None, True, *NUMBERS, "", "x", [], [[]], {}, {"a": {}})


def zoo(name: str, **more: Any) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((resolve_model(name) / "config.json").read_text())
    return raw | more


def read_model(folder: Path) -> None:
    model_config(folder)


def read_head(folder: Path) -> None:
    Eagle3Config.from_pretrained(folder)


def read_first_head(folder: Path) -> None:
    EagleConfig.from_pretrained(folder)


def build(folder: Path) -> None:
    check_shards(folder, 1, 1)


WINDOW = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
YARN = {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32, "mscale": 1.0, "truncate": True}
CASES = {
    "llama": (zoo("zoo:llama", layer_types=["full_attention"], rope_scaling=YARN), read_model),
    "qwen2": (zoo("zoo:llama", architectures=["Qwen2ForCausalLM"], **WINDOW), read_model),
    "deepseek": (zoo("zoo:deepseek", n_group=2, topk_group=1, scoring_func=None), build),
    "llama4": (PUBLISHED["Llama-4-Scout"], read_model),
    "gemma3": (GEMMA3["Gemma-3-4b"], read_model),
    "gemma3 text": (GEMMA3["Gemma-3-270m"], read_model),
    "phi3": (PHI4_MINI, read_model),
    "glm": (PUBLISHED["GLM-4.5"], build),
    "gpt-oss": (GPT_OSS["gpt-oss-20b"], read_model),
    "qwen3-next": (QWEN3_NEXT, read_model),
    "qwen3.5": (QWEN3_5, read_model),
    "qwen3-vl": (QWEN3_VL_30B, read_model),
    "mistral3": (MISTRAL_SMALL_3_1, read_model),
    "moe": (PUBLISHED["Qwen2-57B-A14B"], read_model),
    "blocks": (PUBLISHED_FP8["Qwen3-8B-FP8"][0], read_model),
    "groups": (PUBLISHED_FP8["RedHatAI's Llama-3.1-8B-FP8"][0], read_model),
    "eagle3": (
        zoo("zoo:llama-eagle3", eagle_config={"eagle_aux_hidden_state_layer_ids": [1]}),
        read_head,
    ),
    "eagle": (zoo("zoo:llama", architectures=["LlamaForCausalLMEagle"]), read_first_head),
}


def places(raw: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every key of a file, with the object that has it."""
    for key, value in raw.items():
        yield raw, key
        if isinstance(value, dict):
            yield from places(value)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("case", CASES)
def test_every_wrong_value_of_every_key_is_refused_or_accepted(case: str, tmp_path: Path) -> None:
    original, read = CASES[case]
    raw = copy.deepcopy(original)
    num_refused = 0
    for fields, key in list(places(raw)):
        kept = fields[key]
        for value in VALUES:
            fields[key] = value
            (tmp_path / "config.json").write_text(json.dumps(raw))
            try:
                read(tmp_path)
            except ValueError as error:
                num_refused += 1
                assert "\n" not in str(error)
        del fields[key]
        (tmp_path / "config.json").write_text(json.dumps(raw))
        try:
            read(tmp_path)
        except ValueError:
            num_refused += 1
        fields[key] = kept
    assert num_refused > 10 * len(VALUES)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("num_hidden_layers", 10**12, "num_hidden_layers is 1000000000000; it must be an integer"),
        ("hidden_size", 192.0, "hidden_size is 192.0; it must be an integer from 1 to"),
        ("tie_word_embeddings", "false", "tie_word_embeddings is 'false'; it must be true"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan; it must be a number from 0"),
        ("rms_norm_eps", None, "rms_norm_eps is null; it must be a number from 0"),
        ("eos_token_id", [1, "2"], r"eos_token_id is \[1, '2'\]; it must be a token id or a list"),
        ("rope_scaling", "x", "rope_scaling is 'x'; it must be an object"),
        ("rope_scaling", {"factor": "8"}, "rope_scaling.factor is '8'; it must be a number"),
        ("architectures", {"a": 1}, "architectures is {'a': 1}; it must be a list of names"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(
    key: str, value: object, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(zoo("zoo:llama") | {key: value}))
    with pytest.raises(ValueError, match=sentence):
        model_config(tmp_path)


def test_all_wrong_values_are_named_at_once(tmp_path: Path) -> None:
    wrong = {"vocab_size": "2048", "head_dim": -1}
    (tmp_path / "config.json").write_text(json.dumps(zoo("zoo:llama") | wrong))
    with pytest.raises(ValueError, match=r"vocab_size is '2048'.*; head_dim is -1"):
        model_config(tmp_path)


def test_end_tokens_of_a_wrong_type_in_generation_config_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(zoo("zoo:llama")))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1.5}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is 1\.5"):
        model_config(tmp_path)


def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(ValueError, match="nested too deeply"):
        model_config(tmp_path)
