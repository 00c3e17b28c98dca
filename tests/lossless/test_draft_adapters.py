"""An adapter's own LoRA of the draft head changes which drafts its requests have, and no text."""

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.draft_adapters import RANK, accepted, harness_of, run, write_draft_adapters
from tests.executor.harness import output_of

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "chains": ("eagle3", {}),
    "two models": ("eagle3_two_model", {}),
    "trees": ("eagle3_tree", {}),
    "trees of two models, with matches": ("eagle3_two_model_sa_tree", {}),
    "shared rows": ("eagle3", {"verify_budget": 2.5}),
    "lengths that change": ("eagle3", {"draft_len_schedule": {1: 4, 5: 0}}),
}
FAST = ("chains",)
# Where a request's drafts do not depend on those of others.
ALONE = ("chains", "two models", "trees")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft_adapters(tmp_path_factory.mktemp("draft_adapters"))


@pytest.fixture(scope="module")
def plain(folders: Path) -> list[list[int]]:
    found = list(map(output_of, run(harness_of(folders, "plain"))))
    assert found[0] == found[1] != found[2]
    return found


@pytest.mark.parametrize(
    "way", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in WAYS]
)
def test_requests_with_the_adapter_have_the_drafts_of_its_own_head_and_the_same_text(
    way: str, folders: Path, plain: list[list[int]]
) -> None:
    mode, options = WAYS[way]
    without = run(harness_of(folders, mode, **options))
    whole = run(harness_of(folders, mode, "whole", **options))
    own = run(harness_of(folders, mode, "head", RANK, **options))
    for requests in (without, whole, own):
        assert list(map(output_of, requests)) == plain
    before, best, found = accepted(without), accepted(whole), accepted(own)
    assert before["own"] == before["shared"] < best["own"]
    assert before["own"] < found["own"]
    if way in ALONE:
        assert found == {"own": best["own"], "shared": before["shared"], "None": before["None"]}
