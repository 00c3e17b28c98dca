"""DeepSeek's latent attention through the engine: drafts of NGram and of the model's own MTP
module, prefix reuse, chunked prefill and preemption change no text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.deepseek import save_deepseek
from tests.models.helpers import random_tokens
from tests.models.mtp_reference import export_modules, save_predictable
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

# With a public pool the second time finds the text of the first.
NGRAM = {"decoding_type": "NGram", "max_draft_len": 3, "is_public_pool": True}
# The first two share 12 tokens.
SHARED = random_tokens(12, seed=9)
PROMPTS = [
    SHARED + random_tokens(7, seed=1),
    SHARED + random_tokens(5, seed=2),
    random_tokens(5, seed=3) * 4,
    random_tokens(18, seed=4),
]
PLAIN = {"kv_cache_config": {"enable_block_reuse": False}, "disable_overlap_scheduler": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "undisturbed": {"kv_cache_config": {"enable_block_reuse": False}},
    "prefix_reuse": {"kv_cache_config": {"tokens_per_block": 4}},
    "chunks": {
        "kv_cache_config": {"tokens_per_block": 4},
        "enable_chunked_prefill": True,
        "max_num_tokens": 12,
    },
    "preemption": {"kv_cache_config": {"tokens_per_block": 4, "max_tokens": 84}},
}


def texts(folder: Path, **options: Any) -> tuple[list[list[int]], float]:
    """Each prompt's tokens, greedy and sampled, twice, so that the second finds its prefix cached;
    and the most accepted drafts per round."""
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=i, temperature=0.3 * (i % 2))
        for i in range(len(PROMPTS))
    ]
    sizes = {"skip_tokenizer_init": True, "max_batch_size": 3, "max_seq_len": 64}
    with LLM(str(folder), **(sizes | options)) as llm:
        found = llm.generate(PROMPTS, params) + llm.generate(PROMPTS, params)
        llm.check_integrity()
    lengths = [
        each.speculative_decoding.acceptance_length for each in found if each.speculative_decoding
    ]
    return [each.outputs[0].token_ids for each in found], max(lengths, default=1.0)


@pytest.fixture(scope="module", params=["DeepseekV2", "DeepseekV3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_deepseek(path, request.param)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    found, _ = texts(folder, max_batch_size=1, **PLAIN)
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS)
    return found


@pytest.mark.thinned
@pytest.mark.parametrize("setting", SETTINGS)
def test_latent_attention_gives_plain_text_with_and_without_drafts(
    setting: str, folder: Path, plain: list[list[int]]
) -> None:
    without, _ = texts(folder, **SETTINGS[setting])
    assert without == plain
    speculated, acceptance_length = texts(folder, speculative_config=NGRAM, **SETTINGS[setting])
    assert speculated == plain
    assert acceptance_length > 1.1, "no draft was accepted"


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
    save_predictable(path, num_modules=2)
    return path


@pytest.fixture(scope="module")
def plain_of_mtp(with_mtp: Path) -> list[list[int]]:
    return texts(with_mtp, max_batch_size=1, **PLAIN)[0]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("one_model", [True, False])
@pytest.mark.parametrize(("is_vanilla", "draft_len"), [(False, 3), (True, 2)])
def test_the_models_own_modules_draft_and_leave_the_text_alone(
    one_model: bool,
    is_vanilla: bool,
    draft_len: int,
    setting: str,
    with_mtp: Path,
    plain_of_mtp: list[list[int]],
) -> None:
    mtp = {
        "decoding_type": "MTP",
        "num_nextn_predict_layers": draft_len,
        "mtp_eagle_one_model": one_model,
        "use_mtp_vanilla": is_vanilla,
    }
    found, acceptance_length = texts(with_mtp, speculative_config=mtp, **SETTINGS[setting])
    assert found == plain_of_mtp
    assert acceptance_length > 1.3


TREES: dict[str, dict[str, Any]] = {
    "dynamic": {
        "max_draft_len": 3,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 3,
        "max_total_draft_tokens": 8,
    },
    "static": {"eagle_choices": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
}


# Every pair of two of them is in the default run.
on_trees = pytest.mark.parametrize(
    ("tree", "one_model", "setting"),
    [
        pytest.param(
            *(tree, one_model, setting), marks=[pytest.mark.slow] if (i + j + k) % 3 else []
        )
        for i, tree in enumerate(TREES)
        for j, one_model in enumerate((True, False))
        for k, setting in enumerate(SETTINGS)
    ],
)


@on_trees
def test_trees_of_the_models_own_module_leave_the_text_alone(
    tree: str, one_model: bool, setting: str, with_mtp: Path, plain_of_mtp: list[list[int]]
) -> None:
    mtp = {"decoding_type": "MTP", "mtp_eagle_one_model": one_model} | TREES[tree]
    found, acceptance_length = texts(with_mtp, speculative_config=mtp, **SETTINGS[setting])
    assert found == plain_of_mtp
    assert acceptance_length > 1.5


@pytest.mark.thinned(3)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("one_model", [True, False])
@pytest.mark.parametrize("is_vanilla", [True, False])
def test_matches_next_to_the_models_own_modules_leave_the_text_alone(
    is_vanilla: bool, one_model: bool, setting: str, with_mtp: Path, plain_of_mtp: list[list[int]]
) -> None:
    mtp = {
        "decoding_type": "MTP",
        "max_draft_len": 2,
        "mtp_eagle_one_model": one_model,
        "use_mtp_vanilla": is_vanilla,
        "sa_config": {"threshold": 1},
    }
    found, acceptance_length = texts(with_mtp, speculative_config=mtp, **SETTINGS[setting])
    assert found == plain_of_mtp
    assert acceptance_length > 1.3


@pytest.mark.thinned
@pytest.mark.parametrize("one_model", [True, False])
@pytest.mark.parametrize("is_vanilla", [True, False])
def test_exported_modules_draft_as_those_of_the_checkpoint(
    is_vanilla: bool, one_model: bool, plain_of_mtp: list[list[int]], tmp_path: Path
) -> None:
    folder, exported = tmp_path / "target", tmp_path / "exported"
    folder.mkdir()
    save_predictable(folder, num_modules=2)
    mtp = {
        "decoding_type": "MTP",
        "max_draft_len": 2,
        "mtp_eagle_one_model": one_model,
        "use_mtp_vanilla": is_vanilla,
    }
    expected = texts(folder, speculative_config=mtp, **SETTINGS["undisturbed"])
    export_modules(folder, exported)
    mtp["speculative_model"] = str(exported)
    found = texts(folder, speculative_config=mtp, **SETTINGS["undisturbed"])
    assert found == expected and found[0] == plain_of_mtp


def test_mtp_and_exported_modules_need_each_other(with_mtp: Path, tmp_path: Path) -> None:
    folder, exported = tmp_path / "target", tmp_path / "exported"
    folder.mkdir()
    save_predictable(folder)
    export_modules(folder, exported)
    for decoding, draft, problem in (
        ("Eagle3", exported, "has MTP modules; use it with decoding_type: MTP"),
        ("MTP", with_mtp, "must be a folder of exported MTP modules"),
        ("MTP", None, "num_nextn_predict_layers of this DeepseekV3ForCausalLM is 0"),
    ):
        spec = {"decoding_type": decoding, "max_draft_len": 2}
        spec |= {} if draft is None else {"speculative_model": str(draft)}
        with pytest.raises(ValueError, match=problem):
            LLM(str(folder), skip_tokenizer_init=True, speculative_config=spec)


@pytest.mark.parametrize("one_model", [True, False])
def test_trees_of_a_module_for_each_step_leave_the_text_alone(
    one_model: bool, with_mtp: Path, plain_of_mtp: list[list[int]]
) -> None:
    tree = {"max_draft_len": 2, "use_dynamic_tree": True, "dynamic_tree_max_topK": 3}
    mtp = {"decoding_type": "MTP", "mtp_eagle_one_model": one_model, "use_mtp_vanilla": True}
    found, acceptance_length = texts(
        with_mtp, speculative_config=mtp | tree, **SETTINGS["prefix_reuse"]
    )
    assert found == plain_of_mtp
    assert acceptance_length > 1.3


@pytest.mark.parametrize(("one_model", "setting"), [(True, "prefix_reuse"), (False, "preemption")])
def test_a_draft_model_with_latents_drafts_trees_for_a_target_with_latents(
    one_model: bool, setting: str, folder: Path, plain: list[list[int]]
) -> None:
    """The draft model is the target itself, so its drafts are right."""
    drafting = {
        "decoding_type": "Draft_Target",
        "speculative_model": str(folder),
        "draft_target_one_model": one_model,
    }
    found, acceptance_length = texts(
        folder, speculative_config=drafting | TREES["dynamic"], **SETTINGS[setting]
    )
    assert found == plain
    assert acceptance_length > 2.5


@pytest.mark.thinned
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("one_model", [True, False])
def test_an_eagle3_head_with_heads_of_its_own_shares_the_page_numbers_of_a_latent_cache(
    one_model: bool, setting: str, with_mtp: Path, plain_of_mtp: list[list[int]], tmp_path: Path
) -> None:
    check_eagle3({"max_draft_len": 2}, one_model, setting, with_mtp, plain_of_mtp, tmp_path)


@pytest.mark.parametrize(
    ("tree", "one_model", "setting"),
    [
        pytest.param(
            *(tree, one_model, setting), marks=[pytest.mark.slow] if k != 2 * i + j else []
        )
        for i, tree in enumerate(TREES)
        for j, one_model in enumerate((True, False))
        for k, setting in enumerate(SETTINGS)
    ],
)
def test_trees_of_an_eagle3_head_leave_the_text_of_a_latent_target_alone(
    tree: str,
    one_model: bool,
    setting: str,
    with_mtp: Path,
    plain_of_mtp: list[list[int]],
    tmp_path: Path,
) -> None:
    check_eagle3(TREES[tree], one_model, setting, with_mtp, plain_of_mtp, tmp_path)


def check_eagle3(
    drafts: dict[str, Any],
    one_model: bool,
    setting: str,
    with_mtp: Path,
    plain_of_mtp: list[list[int]],
    tmp_path: Path,
) -> None:
    head = write_tiny_eagle3(
        tmp_path, hidden_size=64, vocab_size=128, draft_vocab_size=100, num_captured=2
    )
    eagle3 = {
        "decoding_type": "Eagle3",
        "speculative_model": str(head),
        "eagle3_layers_to_capture": [0, 2],
        "eagle3_one_model": one_model,
        **drafts,
    }
    found, _ = texts(with_mtp, speculative_config=eagle3, **SETTINGS[setting])
    assert found == plain_of_mtp


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("setting", ["undisturbed", "prefix_reuse", "chunks"])
@pytest.mark.parametrize("is_vanilla", [False, True])
@pytest.mark.parametrize("one_model", [None, True, False])
def test_a_gpu_with_cuda_graphs_gives_the_text_of_the_cpu(
    one_model: bool | None,
    is_vanilla: bool,
    setting: str,
    with_mtp: Path,
    plain_of_mtp: list[list[int]],
) -> None:
    mtp = {
        "decoding_type": "MTP",
        "max_draft_len": 2,
        "mtp_eagle_one_model": one_model,
        "use_mtp_vanilla": is_vanilla,
    }
    spec = None if one_model is None else mtp
    options = {"device": "cuda", "dtype": "float32", "cuda_graph_config": {"batch_sizes": [1, 3]}}
    found, acceptance_length = texts(
        with_mtp, speculative_config=spec, **(SETTINGS[setting] | options)
    )
    assert found == plain_of_mtp
    assert one_model is None or acceptance_length > 1.3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("setting", ["undisturbed", "prefix_reuse", "chunks"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("one_model", [True, False])
def test_trees_on_a_gpu_with_cuda_graphs_give_the_text_of_the_cpu(
    one_model: bool, tree: str, setting: str, with_mtp: Path, plain_of_mtp: list[list[int]]
) -> None:
    mtp = {"decoding_type": "MTP", "mtp_eagle_one_model": one_model} | TREES[tree]
    options = {"device": "cuda", "dtype": "float32", "cuda_graph_config": {"batch_sizes": [1, 3]}}
    found, acceptance_length = texts(
        with_mtp, speculative_config=mtp, **(SETTINGS[setting] | options)
    )
    assert found == plain_of_mtp
    assert acceptance_length > 1.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_gives_every_bit_of_a_request_alone(dtype: str, with_mtp: Path) -> None:
    mtp = {"decoding_type": "MTP", "max_draft_len": 2}
    runs: dict[str, dict[str, Any]] = {
        "alone": PLAIN | {"max_batch_size": 1, "cuda_graph_config": None},
        "together": {},
        "without graphs": {"cuda_graph_config": None},
        "in chunks": SETTINGS["chunks"],
        "with prefix hits": SETTINGS["prefix_reuse"],
        "preempted": SETTINGS["preemption"],
        "chains": {"speculative_config": mtp},
        "chains, two-model": {"speculative_config": mtp | {"mtp_eagle_one_model": False}},
        "trees": {"speculative_config": {"decoding_type": "MTP"} | TREES["dynamic"]},
        "trees in chunks": {"speculative_config": {"decoding_type": "MTP"} | TREES["static"]}
        | SETTINGS["chunks"],
    }
    params = [
        SamplingParams(
            max_tokens=40, ignore_eos=True, seed=i, temperature=0.4 * (i % 2), logprobs=2
        )
        for i in range(len(PROMPTS))
    ]
    expected: list[Any] = []
    for name, options in runs.items():
        sizes = {"max_batch_size": 3, "max_seq_len": 64, "cuda_graph_config": {"batch_sizes": [3]}}
        with LLM(
            str(with_mtp),
            device="cuda",
            dtype=dtype,
            skip_tokenizer_init=True,
            deterministic=True,
            **(sizes | options),
        ) as llm:
            outputs = llm.generate(PROMPTS, params) + llm.generate(PROMPTS, params)
            llm.check_integrity()
        found = [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]
        expected = expected or found
        for own, other in zip(found, expected, strict=True):
            assert own == other, name
        if "speculative_config" in options:
            stats = [each.speculative_decoding for each in outputs]
            assert max(each.acceptance_length for each in stats if each) > 1.3, name
