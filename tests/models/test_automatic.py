"""`decoding_type: AUTO`: what it takes for the weights that there are, and that the YAML which it
logs stands for it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.executor.tiny_llama import write_tiny_llama
from tests.models.tiny_dflash import write_tiny_dflash
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec import AutoDecodingConfig, SAEnhancerConfig
from tllm_spec.cli.serve import read_command_line
from tllm_spec.config.llm_args import LlmArgs, read_options
from tllm_spec.config.speculative_config import DecodingBaseConfig
from tllm_spec.models.automatic import with_drafter

HEAD, DRAFT = "zoo:llama-eagle3", "zoo:llama-draft"


def chosen(spec: Any, model: str = "zoo:llama") -> DecodingBaseConfig:
    config = LlmArgs(**with_drafter(model, {"model": model, "speculative_config": spec}))
    assert config.speculative_config is not None
    return config.speculative_config


def auto(draft: object = None) -> dict[str, Any]:
    return {"decoding_type": "AUTO", "speculative_model": draft}


@pytest.mark.parametrize(
    ("model", "draft", "decoding_type"),
    [
        ("zoo:llama", None, "SA"),
        ("zoo:deepseek", None, "MTP"),
        ("zoo:deepseek", HEAD, "Eagle3"),
        ("zoo:llama", HEAD, "Eagle3"),
        ("zoo:llama", "zoo:llama-peagle", "Eagle3"),
        ("zoo:llama", DRAFT, "Draft_Target"),
    ],
)
def test_the_drafter_follows_from_the_weights_that_there_are(
    model: str, draft: str | None, decoding_type: str
) -> None:
    config = chosen(auto(draft), model)
    assert config.decoding_type == decoding_type
    assert config.lossy_option is None and not config.use_rejection_sampling
    assert config.text_search(8) is not None
    adaptive = config.adaptive
    assert adaptive is not None and adaptive.is_cost_model
    assert all(0 in slot.candidate_steps for _, slot in adaptive.slots)
    if decoding_type != "SA":
        assert [bool(slot.candidate_trees) for _, slot in adaptive.slots] == [True, False]


def test_folders_of_other_kinds_are_told_apart(tmp_path: Path) -> None:
    """A block of DFlash limits the drafts, and its steps limit the trees."""
    dflash = write_tiny_dflash(tmp_path / "dflash", block_size=4)
    assert (found := chosen(auto(dflash))).decoding_type == "DFlash"
    assert found.max_draft_len == 3 and found.shapes.longest.depth == 3
    short = write_tiny_dflash(tmp_path / "short", block_size=2)
    assert chosen(auto(short)).shapes.longest.name == "1"
    pard = write_tiny_llama(tmp_path / "pard")
    config = json.loads((pard / "config.json").read_text()) | {"pard_token": 5}
    (pard / "config.json").write_text(json.dumps(config))
    assert chosen(auto(str(pard))).decoding_type == "PARD"
    assert chosen(auto(str(write_tiny_eagle3(tmp_path / "e3")))).decoding_type == "Eagle3"


def test_a_checkpoint_whose_modules_were_left_out_has_none(tmp_path: Path) -> None:
    """Quantised copies often keep the key of config.json and not the weights."""
    folder = write_tiny_llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    for keys in (config, {name: config[name] for name in config if name != "num_hidden_layers"}):
        (folder / "config.json").write_text(json.dumps(keys))
        assert chosen(auto(), str(folder)).decoding_type == "SA"


@pytest.mark.parametrize("model", ["zoo:llama", "zoo:deepseek"])
@pytest.mark.parametrize("draft", [None, HEAD])
def test_the_logged_yaml_is_a_file_that_means_the_same(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, model: str, draft: str | None
) -> None:
    with caplog.at_level(logging.INFO):
        config = chosen(auto(draft), model)
    _, _, text = caplog.messages[-1].partition("\n")
    (file := tmp_path / "saved.yaml").write_text(text, encoding="utf-8")
    assert LlmArgs(model=model, **read_options(file)).speculative_config == config
    assert "&" not in text and "AUTO" not in text


@pytest.mark.parametrize(
    "flags",
    [
        ["--speculate", "--speculative_model", HEAD],
        ["--speculative_config", "auto", "--speculative-model", HEAD],
        ["--speculative_config", "Auto", "--speculative-model", HEAD],
        ["--speculative-config", json.dumps({"method": "auto", "model": HEAD})],
    ],
)
def test_every_way_to_write_it_means_the_same(flags: list[str]) -> None:
    found = read_command_line(["zoo:llama", *flags], []).args.speculative_config
    assert found == chosen(auto(HEAD)) == chosen(AutoDecodingConfig(speculative_model=HEAD))


def test_an_option_next_to_it_replaces_what_it_chooses() -> None:
    config = chosen(auto(HEAD) | {"sa_config": None, "adaptive": {}, "max_draft_len": 5})
    assert config.text_search(8) is None and config.max_draft_len == 5
    flags = ["zoo:llama", "--speculate", "--speculative_config.max_concurrency", "3"]
    spec = read_command_line(flags, []).args.speculative_config
    assert spec is not None and (spec.decoding_type, spec.max_concurrency) == ("SA", 3)


@pytest.mark.parametrize("draft", [None, HEAD])
@pytest.mark.parametrize("max_draft_len", [1, 4, 10, 20])
def test_what_it_chooses_follows_a_draft_length_next_to_it(
    draft: str | None, max_draft_len: int
) -> None:
    config = chosen(auto(draft) | {"max_draft_len": max_draft_len})
    assert config.max_draft_len == max_draft_len and config.adaptive is not None
    assert config.adaptive.draft_lens[0] == 0 and config.adaptive.draft_lens[-1] == max_draft_len
    assert max((tree.depth for tree in config.adaptive.trees), default=0) <= max_draft_len


def test_there_are_only_chains_without_use_dynamic_tree() -> None:
    chain = chosen(auto(HEAD) | {"use_dynamic_tree": False, "enable_adaptive_verification": True})
    assert not chain.drafts_trees and chain.shapes.longest.depth == 7
    with pytest.raises(ValueError, match="max_draft_len = -3: Eagle3DecodingConfig needs"):
        chosen(auto(HEAD) | {"max_draft_len": -3})


def test_the_targets_own_folder_as_draft_weights_means_its_modules() -> None:
    assert chosen(auto("zoo:deepseek"), "zoo:deepseek") == chosen(auto(), "zoo:deepseek")
    assert chosen(auto("zoo:llama")).decoding_type == "Draft_Target"


def test_options_may_be_objects() -> None:
    config = chosen(AutoDecodingConfig(speculative_model=HEAD, sa_config=SAEnhancerConfig()))
    assert config == chosen(auto(HEAD))
    with pytest.raises(ValueError, match="speculative_config: object has no plain form"):
        chosen(auto(HEAD) | {"max_concurrency": object()})


def test_weights_that_cannot_be_read_are_named() -> None:
    with pytest.raises(ValueError, match=r"speculative_config\.speculative_model: .*no/folder"):
        chosen(auto("no/folder"))
