"""Gemma 3 (a window in three of four layers, two rotary embeddings), gpt-oss (sinks, a window in
every second layer, experts in MXFP4), Phi-3 (texts cross the original length of longrope) and
GLM-4.5 (its own further layer drafts) through the engine: every drafter, tier, chunk, prefix hit
and preemption leaves texts of several windows alone."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.lossless.drafters import AdversarialDrafter
from tests.lossless.small_models import (
    NGRAM,
    ON_GPU,
    PROMPTS,
    SETTINGS,
    TREES,
    assert_deterministic_texts_do_not_depend_on_drafts,
    by_default,
    over_codes,
    plain_texts,
    texts,
    write_head,
)
from tests.lossless.test_adaptive import EVERY_ROUND
from tests.models.gpt_oss import in_mxfp4, save_gpt_oss
from tests.models.helpers import VOCAB_SIZE
from tests.models.mtp_reference import save_predictable
from tests.models.test_gemma3 import save_gemma3
from tests.models.test_phi3 import save as save_phi3

NO_OVERLAP = {"no_overlap": SETTINGS["prefix_reuse"] | {"disable_overlap_scheduler": True}}
TRITON = {"triton": SETTINGS["prefix_reuse"] | {"attn_backend": "TRITON"}}
WAYS = SETTINGS | TRITON | NO_OVERLAP
TIERS: dict[str, Any] = {
    "adaptive": {"strategy": "ema", **EVERY_ROUND, 1: {"candidate_steps": [0, 1, 3]}}
}
DRAFT_MODEL: dict[str, Any] = {"decoding_type": "Draft_Target", "max_draft_len": 3}
HEAD: dict[str, Any] = {"decoding_type": "Eagle3", "max_draft_len": 3}
MTP: dict[str, Any] = {"decoding_type": "MTP", "max_draft_len": 3}
TWO_MODEL = {"draft_target_one_model": False}
# With the least acceptance length of the best request: the target is its own draft model, and the
# head was not trained.
DRAFTERS: dict[str, tuple[dict[str, Any], float]] = {
    "ngram": (NGRAM, 1.1),
    "ngram tree": (NGRAM | TREES["dynamic"], 1.1),
    "sa": ({"decoding_type": "SA", "max_draft_len": 3}, 1.1),
    "user provided": ({"decoding_type": "User_Provided", "max_draft_len": 4}, 1.5),
    "draft model": (DRAFT_MODEL | {"draft_target_one_model": True}, 2.5),
    "draft model tree": (DRAFT_MODEL | TREES["dynamic"] | {"draft_target_one_model": True}, 2.5),
    "draft model, two-model": (DRAFT_MODEL | TWO_MODEL, 2.5),
    "draft model tree, two-model": (DRAFT_MODEL | TREES["static"] | TWO_MODEL, 2.5),
    "head": (HEAD, 1.0),
    "head tree": (HEAD | TREES["dynamic"], 1.0),
    "head, two-model": (HEAD | {"eagle3_one_model": False}, 1.0),
    "head tree, two-model": (HEAD | TREES["static"] | {"eagle3_one_model": False}, 1.0),
}
OWN_LAYERS: dict[str, tuple[dict[str, Any], float]] = {
    "mtp": (MTP, 1.3),
    "mtp, two-model": (MTP | {"mtp_eagle_one_model": False}, 1.3),
    "mtp tree": (MTP | TREES["dynamic"], 1.3),
    "mtp, vanilla": (MTP | {"use_mtp_vanilla": True, "max_draft_len": 2}, 1.3),
}


def save_in_mxfp4(folder: Path, **sizes: Any) -> None:
    in_mxfp4(folder, save_gpt_oss(folder, **sizes))


def save_glm(folder: Path, **sizes: Any) -> None:
    save_predictable(folder, num_modules=2, family="Glm4Moe")


SAVE: dict[str, Callable[..., object]] = {
    "gemma3": save_gemma3, "gpt-oss": save_in_mxfp4, "phi3": save_phi3, "glm": save_glm
}  # fmt: skip
# The settings and drafters of each.
GRID = {
    "gemma3": (SETTINGS | TRITON, DRAFTERS),
    "gpt-oss": (WAYS, DRAFTERS),
    "phi3": (SETTINGS, DRAFTERS),
    "glm": (SETTINGS, OWN_LAYERS | {"ngram": DRAFTERS["ngram"]}),
}
QUICK = [
    ("gemma3", "ngram", "undisturbed"),
    ("gpt-oss", "ngram", "undisturbed"),
    ("phi3", "ngram", "undisturbed"),
    ("glm", "mtp", "undisturbed"),
]


class Models:
    """Checkpoints and their plain texts by family, made when they are first asked for."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self.make_folder = make_folder
        self.folder = cache(self.saved)
        self.plain = cache(lambda family: plain_texts(self.folder(family)))
        self.head = cache(lambda: write_head(make_folder("head")))

    def saved(self, family: str) -> Path:
        path = self.make_folder(family)
        SAVE[family](path, max_position_embeddings=128)
        return path

    def config(self, family: str, drafter: str) -> dict[str, Any]:
        """What makes the drafts: the family's own model, a head, or a drafter that knows texts."""
        config, _ = GRID[family][1][drafter]
        own: dict[str, Any] = {}
        if config["decoding_type"] == "Eagle3":
            layers = [0, 1] if family == "phi3" else [0, 2]  # of two layers and of more
            own = {"speculative_model": str(self.head()), "eagle3_layers_to_capture": layers}
        elif config["decoding_type"] == "Draft_Target":
            own = {"speculative_model": str(self.folder(family))}
        elif config["decoding_type"] == "User_Provided":
            known = {
                tuple(prompt): text
                for prompt, text in zip(PROMPTS, self.plain(family), strict=False)
            }
            own = {"drafter": AdversarialDrafter(known, VOCAB_SIZE)}
        return config | own


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp)


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        pytest.param(family, setting, marks=[pytest.mark.slow] * (family == "gpt-oss" and i % 2))
        for family in ("gemma3", "gpt-oss")
        for i, setting in enumerate(GRID[family][0])
    ],
)
def test_the_text_does_not_depend_on_batch_chunks_prefix_hits_and_preemption(
    family: str, setting: str, models: Models
) -> None:
    found, _ = texts(models.folder(family), **WAYS[setting])
    assert found == models.plain(family)


@pytest.mark.parametrize(
    ("family", "drafter", "setting"),
    [
        each
        for family, (settings, drafters) in GRID.items()
        for each in by_default(
            [quick for quick in QUICK if quick[0] == family], [family], drafters, settings
        )
    ],
)
def test_drafts_leave_the_text_alone(
    family: str, drafter: str, setting: str, models: Models
) -> None:
    config = models.config(family, drafter)
    found, length = texts(models.folder(family), speculative_config=config, **WAYS[setting])
    assert found == models.plain(family)
    assert length >= GRID[family][1][drafter][1]


@pytest.mark.parametrize("drafter", ["head", "draft model", "ngram"])
@pytest.mark.thinned(3)
def test_adaptive_tiers_leave_the_text_alone(drafter: str, models: Models) -> None:
    config = models.config("gpt-oss", drafter) | TIERS
    options = SETTINGS["prefix_reuse"]
    found, _ = texts(models.folder("gpt-oss"), speculative_config=config, **options)
    assert found == models.plain("gpt-oss")


@pytest.mark.parametrize("drafter", ["ngram tree", "draft model", "head"])
@pytest.mark.thinned(3)
def test_over_an_fp8_cache_drafts_leave_the_text_alone(drafter: str, models: Models) -> None:
    folder, config = models.folder("gpt-oss"), models.config("gpt-oss", drafter)
    alone, _ = texts(folder, max_batch_size=1, **over_codes(SETTINGS["undisturbed"]))
    options = over_codes(SETTINGS["preemption"])
    found, _ = texts(folder, speculative_config=config, **options)
    assert found == alone != models.plain("gpt-oss")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "drafter"),
    [(name, each) for name in ("gemma3", "gpt-oss", "glm") for each in (None, *GRID[name][1])],
)
def test_a_gpu_with_cuda_graphs_gives_the_text_of_the_cpu(
    family: str, drafter: str | None, models: Models
) -> None:
    config = None if drafter is None else models.config(family, drafter)
    options = SETTINGS["chunks"] | ON_GPU
    found, _ = texts(models.folder(family), speculative_config=config, **options)
    assert found == models.plain(family)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
def test_deterministic_gives_the_same_text_with_and_without_drafts(
    family: str, models: Models
) -> None:
    assert_deterministic_texts_do_not_depend_on_drafts(models.folder(family))
