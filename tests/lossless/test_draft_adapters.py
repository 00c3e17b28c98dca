"""An adapter's own LoRA of the draft head changes which drafts its requests have, and no text."""

from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

import pytest

from tests.adapters.draft_adapters import RANK, accepted, harness_of, run, write_draft_adapters
from tests.adapters.folders import random_pairs, write_adapter
from tests.executor.harness import Harness, output_of
from tests.lossless.engines import MODES
from tllm_spec.executor.request import LlmRequest
from tllm_spec.lora_request import target_version

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "chains": ("eagle3", {}),
    "two models": ("eagle3_two_model", {}),
    "trees": ("eagle3_tree", {}),
    "trees of two models, with matches": ("eagle3_two_model_sa_tree", {}),
    "shared rows": ("eagle3", {"verify_budget": 2.5}),
    "lengths that change": ("eagle3", {"draft_len_schedule": {1: 4, 8: 0}}),
}
FAST = ("chains",)
# Where a request's drafts do not depend on those of others.
ALONE = ("chains", "two models", "trees", "lengths that change")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft_adapters(tmp_path_factory.mktemp("draft_adapters"))


@pytest.fixture(scope="module")
def chains(folders: Path) -> list[LlmRequest]:
    """Requests of an engine that takes no adapter of the head."""
    return run(harness_of(folders, "eagle3"))


@pytest.fixture(scope="module")
def owning(folders: Path) -> Harness:
    """An engine that takes them."""
    return harness_of(folders, "eagle3", "head", RANK)


@pytest.fixture(scope="module")
def owned(owning: Harness) -> list[LlmRequest]:
    """Its requests, before any swap."""
    return run(owning)


@pytest.fixture(scope="module")
def plain(folders: Path) -> list[list[int]]:
    found = list(map(output_of, run(harness_of(folders, "plain"))))
    assert found[0] == found[1] != found[2]
    return found


@pytest.mark.parametrize(
    "way", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in WAYS]
)
def test_requests_with_the_adapter_have_the_drafts_of_its_own_head_and_the_same_text(
    way: str,
    folders: Path,
    plain: list[list[int]],
    chains: list[LlmRequest],
    owned: list[LlmRequest],
) -> None:
    mode, options = WAYS[way]
    without = chains if way == "chains" else run(harness_of(folders, mode, **options))
    whole = run(harness_of(folders, mode, "whole", **options))
    own = owned if way == "chains" else run(harness_of(folders, mode, "head", RANK, **options))
    for requests in (without, whole, own):
        assert list(map(output_of, requests)) == plain
    before, best, found = accepted(without), accepted(whole), accepted(own)
    assert before["own"] == before["shared"] < best["own"]
    assert before["own"] < found["own"]
    if way in ALONE:
        assert found == {"own": best["own"], "shared": before["shared"], "None": before["None"]}


def test_a_slot_forgets_the_head_of_the_adapter_before(
    folders: Path, chains: list[LlmRequest]
) -> None:
    before = accepted(chains)
    found = accepted(run(harness_of(folders, "eagle3", "head", RANK, max_loras=1)))
    assert found["shared"] == before["shared"] and found["own"] > before["own"]


def test_a_swap_of_the_shared_head_passes_by_its_adapters(
    folders: Path, plain: list[list[int]], owning: Harness, owned: list[LlmRequest]
) -> None:
    before, weights = accepted(owned), owning.parts.draft_weights
    assert weights is not None
    weights.swap(weights.stage(str(folders / "whole")))
    requests = run(owning)
    after = accepted(requests)
    assert list(map(output_of, requests)) == plain
    assert after["shared"] == before["own"] > max(before["shared"], after["own"])
    loaded = owning.executor.state()["adapters"]["loaded"]
    ranks = {name: info["draft_rank"] for name, info in loaded.items()}
    assert ranks == {"own": RANK, "shared": None}


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("plain", "and there is none; accepted: null"),
        ("draft_target", "and this is a draft model (draft_backend = 'torch')"),
        ("peagle", "and this is P-EAGLE"),
        ("eagle3_onnxruntime", "and this is EAGLE-3 (draft_backend = 'onnxruntime')"),
    ],
)
def test_other_drafters_are_refused_by_name(mode: str, reason: str, folders: Path) -> None:
    own = MODES[mode] or {}
    options: dict[str, Any] = {"speculative_model": own.get("speculative_model")}
    with pytest.raises(ValueError, match=r"max_draft_lora_rank = 8 is refused") as refused:
        harness_of(folders, mode, "head", RANK, **options)
    assert reason in str(refused.value)


def test_a_wrong_adapter_of_the_head_is_refused_and_one_that_is_not_served_is_logged(
    folders: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copytree(folders / "own", tmp_path / "own")
    slots = harness_of(folders, "eagle3", "head", RANK).parts.adapters
    assert slots is not None and slots.read(str(tmp_path / "own")).draft is not None
    (fc,) = random_pairs({"fc": (192, 576)}, RANK).values()
    write_adapter(tmp_path / "own/draft", {"fc": fc}, r=RANK)
    with pytest.raises(ValueError, match=r"fc fuses the target's hidden states"):
        slots.read(str(tmp_path / "own"))
    write_adapter(tmp_path / "own/draft", {"fc": fc}, r=RANK + 1)
    with pytest.raises(ValueError, match=r"accepted is 1 to max_draft_lora_rank, which is 8"):
        slots.read(str(tmp_path / "own"))
    (tmp_path / "link").mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        copyfile(folders / "own" / file, tmp_path / "link" / file)
    (tmp_path / "link/draft").symlink_to(folders / "own/draft")
    with pytest.raises(ValueError, match=r"draft has files outside of"):
        slots.read(str(tmp_path / "link"), str(tmp_path))
    without = harness_of(folders, "eagle3").parts.adapters
    assert without is not None
    with caplog.at_level("INFO", "tllm_spec"):
        assert without.read(str(folders / "own")).draft is None
    assert "draft is not used: lora_config.max_draft_lora_rank is null" in caplog.text


def test_the_adapters_identity_names_both_parts(folders: Path) -> None:
    """So that a new head of its own is loaded in place of the old one, and texts of both are
    known to be of the same target."""
    slots = harness_of(folders, "eagle3", "head", RANK).parts.adapters
    assert slots is not None
    own, shared = (slots.infos[name].version for name in ("own", "shared"))
    assert target_version(own) == "own@" + shared.removeprefix("shared@") != own
