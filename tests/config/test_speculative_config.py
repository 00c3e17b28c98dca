"""The classes of the decoding types: what they take and refuse, and whether rounds overlap."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.decoding_options import FixedDrafter, eagle3, ngram, speculate
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import (
    CONFIG_OF_TYPE,
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    DSparkDecodingConfig,
    Eagle3DecodingConfig,
    EagleDecodingConfig,
    NGramDecodingConfig,
    PARDDecodingConfig,
    SADecodingConfig,
    UserProvidedDecodingConfig,
)
from tllm_spec.config.text_search import TextSearch
from tllm_spec.llm import LLM


@pytest.mark.parametrize("spelling", ["Draft_Target", "DraftTarget"])
@pytest.mark.parametrize(
    "folder", ["speculative_model", "speculative_model_dir", "speculative_draft_model_path"]
)
def test_both_spellings_of_draft_target_and_of_its_model_are_taken(
    spelling: str, folder: str
) -> None:
    options = {"decoding_type": spelling, "max_draft_len": 3, folder: Path("some/draft")}
    args = LlmArgs.from_kwargs("m", speculative_config=options)
    expected = DraftTargetDecodingConfig(max_draft_len=3, speculative_model="some/draft")
    assert args.speculative_config == expected


@pytest.mark.parametrize("decoding_type", ["DraftTarget", "Eagle3"])
def test_a_decoding_type_with_draft_weights_needs_them(decoding_type: str) -> None:
    with pytest.raises(ValueError, match="speculative_model is required"):
        LlmArgs.from_kwargs("m", **speculate({"decoding_type": decoding_type, "max_draft_len": 3}))


@pytest.mark.parametrize(
    "option",
    [{"speculative_model": "d"}, {"use_rejection_sampling": True}, {"load_format": "auto"}],
)
def test_ngram_refuses_options_of_a_draft_model(option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        NGramDecodingConfig(max_draft_len=4, **option)


def test_an_ngram_pool_is_private_by_default_and_a_public_one_is_bounded() -> None:
    config = NGramDecodingConfig(max_draft_len=4)
    assert config.text_search(8) == TextSearch(2, oldest=True)
    public = {"max_draft_len": 4, "is_public_pool": True}
    assert NGramDecodingConfig(**public).text_search(8).num_shared == 245
    small = NGramDecodingConfig(**public, max_pool_entries=4097, is_use_oldest=False)
    assert small.text_search(8) == TextSearch(2, num_shared=2)
    first = NGramDecodingConfig(**public, is_keep_all=False, is_use_oldest=False)
    assert first.text_search(8).oldest
    with pytest.raises(ValueError, match="max_pool_entries = 9 needs is_public_pool: true"):
        NGramDecodingConfig(max_draft_len=4, max_pool_entries=9)


def test_a_global_pool_has_room_for_64_texts_or_a_batch_of_them() -> None:
    """The names are TensorRT-LLM's."""
    for size, batch, rows in ((None, 8, 64), (None, 100, 100), (3, 8, 3)):
        config = SADecodingConfig(max_draft_len=4, enable_global_pool=True, global_pool_size=size)
        assert config.text_search(batch) == TextSearch(64, num_shared=rows)


def test_a_corpus_has_sglangs_names() -> None:
    for own, prefix in ((NGramDecodingConfig, "speculative_ngram_"), (SADecodingConfig, "")):
        path, most = (f"{prefix}external_corpus_{end}" for end in ("path", "max_tokens"))
        for options, limit in (({}, 1_000_000), ({most: 9}, 9)):
            config = own(max_draft_len=4, **{path: "texts.jsonl"}, **options)
            search = config.text_search(8)
            assert search is not None and search.corpus == ("texts.jsonl", limit)
        with pytest.raises(ValueError, match="max_tokens = 9 needs external_corpus_path"):
            own(max_draft_len=4, **{most: 9})


def test_a_match_in_the_text_has_1_to_64_tokens_or_any_number() -> None:
    """The names and -1 are TensorRT-LLM's."""
    for size, most in ((-1, 64), (1, 1), (64, 64)):
        config = SADecodingConfig(max_draft_len=4, max_matching_ngram_size=size)
        assert config.text_search(8) == TextSearch(most)
        assert config.why_no_overlap is None and not config.may_pause
    assert SADecodingConfig(max_draft_len=4).max_matching_ngram_size == -1
    for refused in (0, -2, 65):
        with pytest.raises(ValueError, match=f"max_matching_ngram_size = {refused}.*1 to 64"):
            SADecodingConfig(max_draft_len=4, max_matching_ngram_size=refused)


@pytest.mark.parametrize(
    "option",
    [{"global_pool_size": 64}, {"speculative_model": "d"}, {"use_rejection_sampling": True}],
)
def test_matches_in_the_text_refuse_what_has_no_effect(option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        SADecodingConfig(max_draft_len=4, **option)
    off = {"enable_global_pool": False, "global_pool_size": None}
    assert SADecodingConfig(max_draft_len=4, **off) == SADecodingConfig(max_draft_len=4)


def test_greedy_drafts_contradict_rejection_sampling() -> None:
    with pytest.raises(ValueError, match="contradicts"):
        DraftTargetDecodingConfig(
            max_draft_len=4,
            speculative_model="d",
            use_rejection_sampling=True,
            draft_sampling="greedy",
        )


def test_an_eagle3_configuration_is_read_from_yaml(tmp_path: Path) -> None:
    yaml_file = tmp_path / "options.yaml"
    yaml_file.write_text(
        "speculative_config: {decoding_type: Eagle3, max_draft_len: 3, speculative_model_dir: "
        "some/head,\n"
        "  eagle3_one_model: false, eagle3_layers_to_capture: [5, 1, 5], draft_sampling: greedy}\n"
    )
    assert LlmArgs.from_yaml(yaml_file, model="m").speculative_config == Eagle3DecodingConfig(
        max_draft_len=3,
        speculative_model="some/head",
        eagle3_one_model=False,
        eagle3_layers_to_capture=(1, 5),
        draft_sampling="greedy",
    )


@pytest.mark.parametrize("name", [*CONFIG_OF_TYPE])
def test_a_decoding_type_may_be_written_in_any_case(name: str) -> None:
    given = {"max_draft_len": 2, "speculative_model": "head", "drafter": FixedDrafter()}
    kind = CONFIG_OF_TYPE[name]
    own = {key: value for key, value in given.items() if key in kind.model_fields}
    for spelling in (name.lower(), name.upper(), name):
        options = own | {"decoding_type": spelling}
        config = LlmArgs.from_kwargs("m", speculative_config=options).speculative_config
        assert type(config) is kind
        assert config.decoding_type == kind.model_fields["decoding_type"].default


def test_eagle_takes_the_options_of_eagle3_and_is_a_type_of_its_own() -> None:
    config = LlmArgs.from_kwargs("m", **speculate(eagle3(decoding_type="Eagle"))).speculative_config
    assert type(config) is EagleDecodingConfig
    expected = Eagle3DecodingConfig(**eagle3())
    assert config.model_dump() == expected.model_dump() | {"decoding_type": "Eagle"}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ngram(), "NGram"),
        ({"decoding_type": "MTP", "max_draft_len": 1}, "MTP"),
    ],
)
def test_a_token_map_is_refused_without_draft_weights_of_its_own(
    config: dict[str, object], reason: str
) -> None:
    with pytest.raises(
        ValueError, match=f"speculative_token_map = 'hot.pt' is an option of .*, not of {reason}"
    ):
        LlmArgs.from_kwargs("m", **speculate(config | {"speculative_token_map": "hot.pt"}))


def test_a_network_outside_torch_has_no_token_map() -> None:
    options = eagle3(
        decoding_type="Draft_Target",
        draft_backend="onnxruntime",
        draft_target_one_model=True,
        speculative_token_map="hot.pt",
    )
    with pytest.raises(ValueError, match=r"own round; its network has no token map; accepted"):
        LlmArgs.from_kwargs("m", **speculate(options))


def test_a_token_map_may_be_a_path() -> None:
    options = eagle3(decoding_type="Draft_Target", speculative_token_map=Path("some/hot.pt"))
    config = LlmArgs.from_kwargs("m", **speculate(options)).speculative_config
    assert isinstance(config, DraftTargetDecodingConfig)
    assert config.speculative_token_map == "some/hot.pt"


@pytest.mark.parametrize("layers", [[31, 2, 16, 31], (16, 31, 2), {31, 16, 2}])
def test_captured_layers_are_kept_in_ascending_order_and_once(layers: object) -> None:
    config = Eagle3DecodingConfig(
        max_draft_len=3, speculative_model="h", eagle3_layers_to_capture=layers
    )
    assert config.eagle3_layers_to_capture == (2, 16, 31)
    assert (
        Eagle3DecodingConfig(max_draft_len=3, speculative_model="h").eagle3_layers_to_capture
        is None
    )


CAUSE = "; synthetic acceptance is for benchmarks and changes the text"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("eagle3_layers_to_capture", [], "one or more layer ids"),
        ("eagle3_layers_to_capture", [2, -1], "counted from 0; the outputs of these layers"),
        ("eagle3_layers_to_capture", [True], "valid integer"),
        ("eagle3_layers_to_capture", "12", "'12'"),
        ("synthetic_acceptance_rates", {0.5, 0.4, 0.3}, "a list is needed"),
        ("synthetic_acceptance_rates", [0.5, 0.6, 0.1], f"only with all before it{CAUSE}"),
        ("synthetic_acceptance_rates", [1.1, 0.6, 0.1], f"0..1{CAUSE}"),
        ("synthetic_acceptance_rates", [0.5, 0.1, -0.1], f"0..1{CAUSE}"),
        ("synthetic_acceptance_rates", [float("nan")] * 3, f"0..1{CAUSE}"),
        ("synthetic_acceptance_rates", [0.5, 0.4], f"one probability for each draft{CAUSE}"),
        ("synthetic_acceptance_rates", [0.5] * 4, f"one probability for each draft{CAUSE}"),
    ],
)
def test_wrong_layers_and_rates_are_refused_with_their_key_and_the_reason(
    name: str, value: object, sentence: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        LlmArgs.from_kwargs("m", **speculate(eagle3(**{name: value})))
    assert name in str(refusal.value)
    assert sentence in str(refusal.value)


def test_synthetic_acceptance_excludes_rejection_sampling() -> None:
    options = eagle3(synthetic_acceptance_rates=[0.5, 0.4, 0.3], use_rejection_sampling=True)
    with pytest.raises(ValueError, match=f"use_rejection_sampling = True are exclusive.*{CAUSE}"):
        LlmArgs(model="m", **speculate(options))


@pytest.mark.parametrize(
    ("speculative_config", "why_not"),
    [
        (None, None),
        (eagle3(use_rejection_sampling=True), None),
        (eagle3(eagle3_one_model=False), None),
        (eagle3(decoding_type="Draft_Target", draft_target_one_model=True), None),
        (eagle3(decoding_type="Draft_Target"), None),
        (ngram(), None),
        (
            ngram(decoding_type="User_Provided", drafter=FixedDrafter()),
            "the user's drafter sees every round end",
        ),
    ],
)
def test_rounds_overlap_without_drafts_and_with_drafts_that_are_made_on_the_device(
    speculative_config: dict[str, object] | None, why_not: str | None
) -> None:
    args = LlmArgs.from_kwargs("m", speculative_config=speculative_config)
    assert (args.why_no_overlap is None) == (why_not is None)
    assert (why_not or "") in (args.why_no_overlap or "")
    args = LlmArgs(
        model="m", speculative_config=args.speculative_config, disable_overlap_scheduler=True
    )
    assert args.why_no_overlap == "disable_overlap_scheduler is set"


@pytest.mark.parametrize("decoding", [ngram(), eagle3(), eagle3(decoding_type="Draft_Target")])
def test_synthetic_acceptance_rates_are_taken_by_every_decoding_type(
    decoding: dict[str, object],
) -> None:
    decoding = {**decoding, "max_draft_len": 3, "synthetic_acceptance_rates": [1, 0.52, 0.52]}
    config = LlmArgs.from_kwargs("m", speculative_config=decoding).speculative_config
    assert config is not None and config.synthetic_acceptance_rates == (1.0, 0.52, 0.52)


def test_vllms_parallel_draft_model_is_pard() -> None:
    options = {"method": "draft_model", "model": "m", "num_speculative_tokens": 4}
    config = LlmArgs(
        model="m", **speculate(options | {"parallel_drafting": True})
    ).speculative_config
    assert config == PARDDecodingConfig(max_draft_len=4, speculative_model="m")
    config = LlmArgs(model="m", **speculate(options | {"method": "dflash"})).speculative_config
    assert config == DFlashDecodingConfig(max_draft_len=4, speculative_model="m")


def test_tensorrt_llms_confidence_scheduling_is_adaptive_verification() -> None:
    given = {
        "decoding_type": "DSpark",
        "speculative_model": "m",
        "max_draft_len": 7,
        "enable_confidence_scheduling": True,
        "enable_ragged_verify": True,
        "enable_fused_confidence_scheduler": True,
        "confidence_cost_table_path": "table.json",
        "confidence_calibration_path": "calibration.json",
        "confidence_min_predicted_gain": 0.04,
    }
    assert LlmArgs(model="m", **speculate(given)).speculative_config == DSparkDecodingConfig(
        max_draft_len=7,
        speculative_model="m",
        enable_adaptive_verification=True,
        adaptive={"switch_margin": 0.04},
        round_times_path="table.json",
        confidence_calibration_path="calibration.json",
    )
    with pytest.raises(ValueError, match="round_times_path = 't' is refused: only adaptive's cost"):
        DSparkDecodingConfig(max_draft_len=7, speculative_model="m", round_times_path="t")


# `UserProvidedDecodingConfig`: a drafter object, or an import path of its class.


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
