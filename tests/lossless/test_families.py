"""Families of models through the engine: windows and trees over the borders of chunks (Llama 4) and
of sliding windows (Mistral; Qwen2, in some layers), experts, text parts of models that also see
images, prefix reuse, chunked prefill and preemption change no text."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.lossless.small_models import (
    NGRAM,
    ON_GPU,
    PLAIN,
    SETTINGS,
    TREES,
    TextsOf,
    assert_deterministic_texts_do_not_depend_on_drafts,
    by_default,
    over_codes,
    plain_texts,
    texts,
    write_head,
)
from tests.models.helpers import save_checkpoint
from tests.models.test_llama4 import save_llama4
from tests.models.with_images import FAMILIES, save_with_images

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
WINDOW = {"max_position_embeddings": 128, "sliding_window": 7}
# A request has 43 tokens: three chunks, six windows, and a change of Llama 4's temperature.
SPANS: dict[str, dict[str, Any]] = {
    "Llama4": {"attention_chunk_size": 16, "floor_scale": 24, "attn_scale": 0.7}
    | {"max_position_embeddings": 128, "no_rope_layer_interval": 2},
    "Mistral": WINDOW,
    "Qwen2": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
}
MODELS: dict[str, dict[str, Any]] = SPANS | {
    "Mixtral": {},
    "Olmo2": {},
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 40},
    "Qwen3Moe": EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]},
    **{name: {} for name in FAMILIES},
}
BACKENDS = SETTINGS | {
    "no_overlap": SETTINGS["prefix_reuse"] | {"disable_overlap_scheduler": True},
    "triton": SETTINGS["prefix_reuse"] | {"attn_backend": "TRITON"},
}
HEAD = {"decoding_type": "Eagle3", "eagle3_layers_to_capture": [0, 1], "max_draft_len": 3}
DRAFTS = {"chain": {"max_draft_len": 5}} | TREES


def save(folder: Path, name: str) -> Path:
    if name == "Llama4":
        save_llama4(folder, **MODELS[name])
    elif name in FAMILIES:
        save_with_images(folder, name)
    else:
        save_checkpoint(folder, name, **MODELS[name])
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp(name), name) for name in MODELS}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> TextsOf:
    return cache(lambda name: plain_texts(folders[name]))


@pytest.mark.parametrize(
    ("model", "setting"),
    by_default(
        [("Llama4", "preemption"), ("Qwen3Moe", "prefix_reuse"), ("Qwen3VLMoe", "chunks")],
        MODELS,
        BACKENDS,
    ),
)
def test_the_text_is_the_same_with_and_without_drafts_of_ngram(
    model: str, setting: str, folders: dict[str, Path], plain: TextsOf
) -> None:
    without, _ = texts(folders[model], **BACKENDS[setting])
    assert without == plain(model)
    found, acceptance_length = texts(folders[model], speculative_config=NGRAM, **BACKENDS[setting])
    assert found == plain(model)
    assert acceptance_length > 1.1, "no draft was accepted"


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        pytest.param("Llama4", "triton", marks=pytest.mark.slow),
        ("Qwen2", "chunks"),
        pytest.param("Mistral", "preemption", marks=pytest.mark.slow),
        pytest.param("Qwen2", "triton", marks=pytest.mark.slow),
    ],
)
def test_drafts_leave_the_text_over_an_fp8_cache_alone(
    model: str, setting: str, folders: dict[str, Path]
) -> None:
    alone, _ = texts(folders[model], max_batch_size=1, **over_codes(PLAIN))
    options = over_codes(BACKENDS[setting])
    found, acceptance_length = texts(folders[model], speculative_config=NGRAM, **options)
    assert found == alone
    assert acceptance_length > 1.1, "no draft was accepted"


QUICK_DRAFTS = [
    ("Llama4", "dynamic", True, "prefix_reuse"),
    ("Mistral", "static", True, "chunks"),
    ("Qwen2", "dynamic", False, "preemption"),
    ("Qwen2", "chain", False, "no_overlap"),
]


@pytest.mark.parametrize(
    ("model", "drafts", "one_model", "setting"),
    by_default(QUICK_DRAFTS, SPANS, DRAFTS, (True, False), BACKENDS),
)
def test_the_target_as_its_own_draft_model_leaves_the_text_alone(
    model: str, drafts: str, one_model: bool, setting: str, folders: dict[str, Path], plain: TextsOf
) -> None:
    """Its drafts are right, so that most windows over a border are accepted."""
    own = {"decoding_type": "Draft_Target", "speculative_model": str(folders[model])}
    own |= {"draft_target_one_model": one_model} | DRAFTS[drafts]
    found, acceptance_length = texts(folders[model], speculative_config=own, **BACKENDS[setting])
    assert found == plain(model)
    assert acceptance_length > 2.5


QUICK_HEADS = [
    ("Llama4", True, False, "chunks"),
    ("Mistral", False, True, "preemption"),
    ("Qwen2", True, True, "triton"),
]


@pytest.mark.parametrize(
    ("model", "is_tree", "one_model", "setting"),
    by_default(QUICK_HEADS, SPANS, (False, True), (True, False), BACKENDS),
)
def test_an_eagle3_head_leaves_the_text_alone(
    model: str,
    is_tree: bool,
    one_model: bool,
    setting: str,
    folders: dict[str, Path],
    head: Path,
    plain: TextsOf,
) -> None:
    own = HEAD | {"speculative_model": str(head), "eagle3_one_model": one_model}
    own |= TREES["dynamic"] if is_tree else {}
    found, _ = texts(folders[model], speculative_config=own, **BACKENDS[setting])
    assert found == plain(model)


def test_dummy_weights_need_only_the_config(tmp_path: Path) -> None:
    save(tmp_path, "Qwen3Moe")
    (tmp_path / "model.safetensors").unlink()
    plain, _ = texts(tmp_path, load_format="dummy")
    speculated, _ = texts(tmp_path, load_format="dummy", speculative_config=NGRAM)
    assert speculated == plain and all(len(set(tokens)) > 1 for tokens in plain)


DRAFTS_ON_GPU: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": NGRAM,
    **{f"draft_{name}": {"decoding_type": "Draft_Target"} | own for name, own in DRAFTS.items()},
}


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["undisturbed", "prefix_reuse", "chunks"])
@pytest.mark.parametrize("drafts", DRAFTS_ON_GPU)
@pytest.mark.parametrize("model", SPANS)
def test_a_gpu_with_cuda_graphs_gives_the_text_of_the_cpu(
    model: str, drafts: str, setting: str, folders: dict[str, Path], plain: TextsOf
) -> None:
    own = DRAFTS_ON_GPU[drafts]
    if drafts.startswith("draft"):
        more = {"speculative_model": str(folders[model]), "draft_target_one_model": True}
        own = (own or {}) | more
    found, acceptance_length = texts(
        folders[model], speculative_config=own, **(SETTINGS[setting] | ON_GPU)
    )
    assert found == plain(model)
    assert not drafts.startswith("draft") or acceptance_length > 2.5


@pytest.mark.gpu
@pytest.mark.parametrize("model", SPANS)
def test_deterministic_gives_the_same_text_with_and_without_drafts(
    model: str, folders: dict[str, Path]
) -> None:
    assert_deterministic_texts_do_not_depend_on_drafts(folders[model])
