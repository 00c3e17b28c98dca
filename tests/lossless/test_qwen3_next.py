"""Qwen3-Next through the engine, whose layers have a recurrent state or attention: drafters, trees,
chunked prefill and preemption change no text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lossless.drafters import AdversarialDrafter, AdversarialTreeDrafter
from tests.lossless.small_models import (
    NGRAM,
    ON_GPU,
    PROMPTS,
    SETTINGS,
    TREES,
    assert_deterministic_texts_do_not_depend_on_drafts,
    by_default,
    plain_texts,
    texts,
    write_head,
)
from tests.models.helpers import VOCAB_SIZE, random_tokens, save_checkpoint
from tests.models.qwen3_next import save_predictable, save_qwen3_next
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

SNAPSHOTS = {"tokens_per_block": 4, "state_snapshot_tokens": 8}
MODES = {
    name: own | {"kv_cache_config": own["kv_cache_config"] | SNAPSHOTS}
    for name, own in SETTINGS.items()
}
MODES |= {"no overlap": MODES["prefix_reuse"] | {"disable_overlap_scheduler": True}}
KNOWN: dict[str, Any] = {"decoding_type": "User_Provided", "max_draft_len": 4}
HEAD: dict[str, Any] = {"decoding_type": "Eagle3", "max_draft_len": 3}
HEAD |= {"eagle3_layers_to_capture": [0, 2]}
MODEL: dict[str, Any] = {"decoding_type": "Draft_Target", "max_draft_len": 3}
# With the least acceptance length of the best request: the draft model and the head were not
# trained.
DRAFTERS: dict[str, tuple[dict[str, Any], float]] = {
    "ngram": (NGRAM, 1.1),
    "ngram tree": (NGRAM | TREES["dynamic"], 1.1),
    "sa": ({"decoding_type": "SA", "max_draft_len": 3}, 1.01),
    "known": (KNOWN, 1.5),
    "known tree": (KNOWN | {"max_total_draft_tokens": 8}, 1.5),
    "known, shared rows": (KNOWN | {"verify_budget": 3.5}, 1.2),
    "draft model": (MODEL | {"draft_target_one_model": True}, 1.0),
    "draft model tree, two-model": (MODEL | TREES["dynamic"], 1.0),
    "head": (HEAD, 1.0),
    "head tree": (HEAD | TREES["dynamic"], 1.0),
    "head, two-model": (HEAD | {"eagle3_one_model": False}, 1.0),
    "head tree, two-model": (HEAD | TREES["static"] | {"eagle3_one_model": False}, 1.0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_next")
    save_qwen3_next(path)
    return path


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A head and a draft model, by decoding type."""
    model = tmp_path_factory.mktemp("model")
    save_checkpoint(model, "Llama")
    return {"Eagle3": write_head(tmp_path_factory.mktemp("head")), "Draft_Target": model}


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    return plain_texts(folder)


def config_of(drafter: str, drafts: dict[str, Path], plain: list[list[int]]) -> dict[str, Any]:
    config, _ = DRAFTERS[drafter]
    if (own := drafts.get(config["decoding_type"])) is not None:
        return config | {"speculative_model": str(own)}
    if config["decoding_type"] == "User_Provided":
        known = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain, strict=False)}
        kind = AdversarialTreeDrafter if "tree" in drafter else AdversarialDrafter
        return config | {"drafter": kind(known, VOCAB_SIZE)}
    return config


@pytest.mark.thinned
@pytest.mark.parametrize("setting", MODES)
def test_the_text_does_not_depend_on_batch_chunks_overlap_and_preemption(
    setting: str, folder: Path, plain: list[list[int]]
) -> None:
    found, _ = texts(folder, **MODES[setting])
    assert found == plain


@pytest.mark.parametrize(
    ("drafter", "setting"),
    by_default(
        [
            ("ngram", "preemption"),
            ("ngram tree", "chunks"),
            ("sa", "no overlap"),
            ("known tree", "preemption"),
            ("head", "undisturbed"),
        ],
        *(DRAFTERS, MODES),
    ),
)
def test_drafts_leave_the_text_alone(
    drafter: str, setting: str, folder: Path, drafts: dict[str, Path], plain: list[list[int]]
) -> None:
    config = config_of(drafter, drafts, plain)
    found, acceptance_length = texts(folder, speculative_config=config, **MODES[setting])
    assert found == plain
    assert acceptance_length >= DRAFTERS[drafter][1], "no draft was accepted"


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
    save_predictable(path)
    return path


@pytest.fixture(scope="module")
def plain_of_mtp(with_mtp: Path) -> list[list[int]]:
    return plain_texts(with_mtp)


EVERY_ROUND: dict[Any, Any] = {
    "strategy": "ema",
    "update_interval": 1,
    "warmup_batches": 0,
    1: {"candidate_steps": [0, 1, 3]},
}
OWN_DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"max_draft_len": 3},
    "adaptive": {"max_draft_len": 3, "adaptive": EVERY_ROUND},
    "draft lengths by batch": {"max_draft_len": 3, "draft_len_schedule": {1: 3, 2: 0, 3: 2}},
    "shared rows": {"max_draft_len": 3, "verify_budget": 2},
    "matches": {"max_draft_len": 2, "sa_config": {"threshold": 1}},
    **TREES,
}


@pytest.mark.parametrize(
    ("drafts", "one_model", "setting"),
    by_default(
        [("chain", True, "preemption"), ("dynamic", False, "chunks")],
        *(OWN_DRAFTS, (True, False), MODES),
    ),
)
def test_the_models_own_layer_drafts_and_leaves_the_text_alone(
    drafts: str, one_model: bool, setting: str, with_mtp: Path, plain_of_mtp: list[list[int]]
) -> None:
    mtp = {"decoding_type": "MTP", "mtp_eagle_one_model": one_model} | OWN_DRAFTS[drafts]
    found, acceptance_length = texts(with_mtp, speculative_config=mtp, **MODES[setting])
    assert found == plain_of_mtp
    assert acceptance_length > 1.1


def test_a_prefix_is_reused_up_to_a_copy_of_the_states(folder: Path) -> None:
    """40 of 44 tokens are reused, the greatest multiple of 8. There are as many copies as requests
    may run; a prompt takes 5, and with only one it takes it away from another prompt."""
    prompts = [random_tokens(44, seed=seed) for seed in (5, 6)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for max_batch_size, expected in ((10, [0, 0, 40, 40]), (1, [0, 0, 0, 0])):
        options: dict[str, Any] = {"max_seq_len": 64, "kv_cache_config": SNAPSHOTS}
        options |= {"skip_tokenizer_init": True, "max_batch_size": max_batch_size}
        with LLM(str(folder), **options) as llm:
            found = [llm.generate(prompt, params) for prompt in prompts * 2]
            llm.check_integrity()
        assert [output.cached_tokens for output in found] == expected
        assert [each.outputs[0].token_ids for each in found[:2]] == [
            each.outputs[0].token_ids for each in found[2:]
        ]


@pytest.mark.parametrize(
    ("family", "drafter", "setting"),
    by_default(
        [("Qwen3_5", "mtp", "prefix_reuse")], *(("Qwen3_5", "Qwen3_5Moe"), ("ngram", "mtp"), MODES)
    ),
)
def test_drafts_leave_the_text_of_qwen3_5_alone(
    family: str, drafter: str, setting: str, tmp_path: Path
) -> None:
    save_predictable(tmp_path, family=family)
    own = NGRAM if drafter == "ngram" else {"decoding_type": "MTP", "max_draft_len": 3}
    found, acceptance_length = texts(tmp_path, speculative_config=own, **MODES[setting])
    assert found == plain_texts(tmp_path)
    assert acceptance_length > 1.1


def test_a_prompt_in_a_broken_round_is_read_again_from_its_start(
    folder: Path, plain: list[list[int]]
) -> None:
    """Its chunk in that round has changed the states, and must not do so twice."""

    def break_third(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) == 7:
            raise RuntimeError("broken")
        return logits

    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=0)
    broken = SamplingParams(max_tokens=24, ignore_eos=True, logits_processor=break_third)
    options: dict[str, Any] = SETTINGS["chunks"] | {"skip_tokenizer_init": True}
    with LLM(str(folder), max_seq_len=64, **options) as llm:
        first, second = llm.generate([[1, 2, 3, 4, 5], PROMPTS[0] * 2], [broken, params])
        alone = llm.generate(PROMPTS[0] * 2, params)
        llm.check_integrity()
    assert "broken" in str(first.error)
    assert second.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_model_with_states_is_refused_as_draft_model(folder: Path) -> None:
    own = {"decoding_type": "Draft_Target", "speculative_model": str(folder), "max_draft_len": 2}
    with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM, which is served as a target only"):
        LLM(str(folder), skip_tokenizer_init=True, speculative_config=own)


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_a_gpu_with_cuda_graphs_gives_the_text_of_the_cpu(
    drafter: str | None, folder: Path, drafts: dict[str, Path], plain: list[list[int]]
) -> None:
    config = None if drafter is None else config_of(drafter, drafts, plain)
    found, _ = texts(folder, speculative_config=config, **(SETTINGS["chunks"] | ON_GPU))
    assert found == plain


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", ["chain", "shared rows", "dynamic"])
def test_a_gpu_drafts_with_the_models_own_layer(
    drafts: str, with_mtp: Path, plain_of_mtp: list[list[int]]
) -> None:
    mtp = {"decoding_type": "MTP"} | OWN_DRAFTS[drafts]
    options = MODES["prefix_reuse"] | ON_GPU
    found, acceptance_length = texts(with_mtp, speculative_config=mtp, **options)
    assert found == plain_of_mtp
    assert acceptance_length > 1.1


@pytest.mark.gpu
def test_deterministic_gives_the_same_text_with_and_without_drafts(folder: Path) -> None:
    assert_deterministic_texts_do_not_depend_on_drafts(folder)
