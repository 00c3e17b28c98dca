"""Models with FP8 or 4-bit weights, or activations in FP8: every drafter leaves the target's text
alone, and that of weights is that of the dequantised ones."""

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.harness.flips import flips
from tests.lossless.cases import (
    GPU_TOLERANCE,
    Case,
    NearTie,
    assert_same,
    fixed_length_cases,
    generate,
    heldout_prompts,
)
from tests.lossless.engines import DRAFT_MODEL, engine
from tests.lossless.oracle import Oracle
from tests.lossless.small_models import (
    NGRAM,
    ON_GPU,
    SETTINGS,
    TREES,
    TextsOf,
    by_default,
    plain_texts,
    texts,
    write_head,
)
from tests.lossless.test_families import STATES
from tests.models import fp8_checkpoint, qwen3_next
from tests.models.fp8_checkpoint import keeping_int4
from tests.models.fp8_checkpoint import quantise as in_fp8
from tests.models.fp8_transcription import transcribed
from tests.models.helpers import save_checkpoint
from tests.models.test_qwen3_next_formats import SIZES as QWEN_SIZES
from tests.models.test_qwen3_next_formats import as_modelopt, is_published
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.zoo.quantise import Style, quantise
from tllm_spec.zoo.registry import resolve_model

PLAIN: dict[str, Any] = {
    "kv_cache_config": {"enable_block_reuse": False},
    "disable_overlap_scheduler": True,
    "max_batch_size": 1,
}
MODES = ("plain", "ngram_tree", "draft_target", "eagle3", "eagle3_two_model", "eagle3_tree")
MTP = {"decoding_type": "MTP", "max_draft_len": 3}
BY_DEFAULT = (("int4", "eagle3"),)
KEEPING = {"fp8": fp8_checkpoint.keeping_fp8, "int4": keeping_int4}  # on CPUs, too
# Activations in FP8: one dynamic scale a token; for 128 inputs of it; static.
ACTIVATIONS = ("row", "deepseek", "modelopt")
OF_ACTIVATIONS = ("plain", "ngram", "eagle3")
FORMATS_OF_LAYERS = dict.fromkeys(KEEPING, MODES) | dict.fromkeys(ACTIVATIONS, OF_ACTIVATIONS)


def copied(model: str, folder: Path) -> Path:
    shutil.copytree(resolve_model(model), folder)
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The zoo's target `llama` and draft model `draft` in a format, and in `plain` the target's own
    values. Of formats of activations there is `llama` only."""

    @cache
    def get(name: str) -> Path:
        root = tmp_path_factory.mktemp(name)
        target = copied("zoo:llama", root / "llama")
        if name in ACTIVATIONS:
            fp8_checkpoint.quantise(target, granularity=name)
            return root
        draft = copied(DRAFT_MODEL, root / "draft")
        if name == "fp8":
            values = fp8_checkpoint.quantise(target)
            fp8_checkpoint.quantise(draft)
        else:
            values = quantise(target, Style("gptq", is_ordered=True))
            quantise(draft, Style("awq"))
        plain = copied("zoo:llama", root / "plain")
        save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
        return root

    return get


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[Case]:
    return fixed_length_cases(tokenizer, heldout_prompts(tokenizer, 8, 60))[::3]


@pytest.fixture(scope="module")
def expected_of(
    folder_of: Callable[[str], Path], requests: list[Case]
) -> Callable[[str], list[RequestOutput]]:
    """The dequantised weights' answers, one request after the other; with quantised activations,
    plain decoding's."""

    @cache
    def get(name: str) -> list[RequestOutput]:
        folder = folder_of(name) / ("llama" if name in ACTIVATIONS else "plain")
        with LLM(folder, **PLAIN) as llm:
            return generate(llm, requests, 1)

    return get


@pytest.fixture(scope="module")
def oracle_of(folder_of: Callable[[str], Path]) -> Callable[[str], Oracle]:
    @cache
    def get(name: str) -> Oracle:
        from transformers import AutoModelForCausalLM

        is_plain = name in ACTIVATIONS
        path = resolve_model("zoo:llama") if is_plain else folder_of(name) / "plain"
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return Oracle(transcribed(model, folder_of(name) / "llama") if is_plain else model)

    return get


def options_of(mode: str, folder: Path) -> dict[str, Any]:
    options = engine(mode, 3)
    if mode == "draft_target":  # the draft model is quantised, too
        options["speculative_config"]["speculative_model"] = str(folder / "draft")
    return options


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in BY_DEFAULT else pytest.mark.slow)
        for name, modes in FORMATS_OF_LAYERS.items()
        for mode in modes
    ],
)
def test_every_drafter_leaves_the_text_alone_which_is_that_of_dequantised_weights(
    name: str,
    mode: str,
    folder_of: Callable[[str], Path],
    requests: list[Case],
    expected_of: Callable[[str], list[RequestOutput]],
    oracle_of: Callable[[str], Oracle],
) -> None:
    folder = folder_of(name)
    keeping = KEEPING.get(name, nullcontext)
    with (
        keeping() as asked,
        LLM(folder / "llama", max_batch_size=3, **options_of(mode, folder)) as llm,
    ):
        found = generate(llm, requests, 3)
        llm.check_integrity()
    # Each model is asked for its need of memory, and when it is loaded.
    assert asked is None or asked.call_count == 2 * (1 + (mode == "draft_target"))
    for case, output, plain in zip(requests, found, expected_of(name), strict=True):
        assert_same(case, output, plain, lambda: oracle_of(name))
    if mode != "plain":
        stats = [each.speculative_decoding for each in found if each.speculative_decoding]
        assert max(each.acceptance_length for each in stats) > 1.2


@pytest.mark.slow
def test_mtp_modules_in_fp8_leave_the_text_alone(tmp_path: Path, requests: list[Case]) -> None:
    folder = copied("zoo:deepseek", tmp_path / "deepseek")
    fp8_checkpoint.quantise(folder)
    options: list[dict[str, Any]] = [PLAIN, {"max_batch_size": 3, "speculative_config": MTP}]
    texts = []
    with fp8_checkpoint.keeping_fp8() as asked:
        for option in options:
            with LLM(folder, **option) as llm:
                found = generate(llm, requests, option["max_batch_size"])
            texts.append([each.outputs[0].token_ids for each in found])
    assert asked.call_count == 2 * 3  # two targets and the modules, as above
    assert texts[0] == texts[1]
    stats = [each.speculative_decoding for each in found if each.speculative_decoding]
    assert max(each.acceptance_length for each in stats) > 1.3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype", "deterministic"),
    [
        ("fp8", "bfloat16", False),
        ("fp8", "float32", False),
        ("int4", "bfloat16", False),
        ("int4", "bfloat16", True),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_drafts_leave_the_text_alone(
    mode: str,
    name: str,
    dtype: str,
    deterministic: bool,
    folder_of: Callable[[str], Path],
    requests: list[Case],
    oracle_of: Callable[[str], Oracle],
) -> None:
    folder, options = folder_of(name), {"dtype": dtype, "device": "cuda"}
    more = {"deterministic": True} if deterministic else {}
    with LLM(folder / "llama", max_batch_size=1, cuda_graph_config=None, **options, **more) as llm:
        alone = generate(llm, requests, 1)
    own = options | more | options_of(mode, folder)
    with LLM(folder / "llama", max_batch_size=3, **own) as llm:
        found = generate(llm, requests, 3)
    for case, output, plain in zip(requests, found, alone, strict=True):
        if deterministic:
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        tolerance, at_edges = GPU_TOLERANCE[dtype], dtype != "float32"
        assert_same(case, output, plain, lambda: oracle_of(name), tolerance, at_edges=at_edges)


# Experts that compute in FP8, or have 4 bits, through the engine: drafts, prefix reuse, chunked
# prefill and preemption change no text.


SIZES = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 160}
# Activations with a scale a token, of blocks, and static; weights of 4 bits.
FORMATS = ("row", "deepseek", "modelopt", "awq", "mxfp4")
HEAD = {"decoding_type": "Eagle3", "eagle3_layers_to_capture": [0, 1], "max_draft_len": 3}
SPECULATION = {"none": None, "ngram": NGRAM, "eagle3": HEAD | TREES["dynamic"]}
QUICK = [("deepseek", "chunks", "ngram")]


@pytest.fixture(scope="module")
def quantised_experts_folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def get(name: str) -> Path:
        folder = tmp_path_factory.mktemp("experts")
        save_checkpoint(folder, "Qwen3Moe", head_dim=16, norm_topk_prob=True, **SIZES)
        if name in ("awq", "mxfp4"):
            quantise(folder, Style(name))
        else:
            in_fp8(folder, granularity=name)
        return folder

    return get


@pytest.fixture(scope="module")
def plain_of(quantised_experts_folder_of: Callable[[str], Path], exact_attention: None) -> TextsOf:
    @cache
    def get(name: str) -> list[list[int]]:
        with keeping(name):
            return plain_texts(quantised_experts_folder_of(name))

    return get


def keeping(name: str) -> object:
    return keeping_int4() if name in ("awq", "mxfp4") else nullcontext()


@pytest.mark.parametrize(
    ("name", "setting", "drafter"), by_default(QUICK, FORMATS, SETTINGS, SPECULATION)
)
def test_the_text_is_the_same_with_and_without_drafts(
    name: str,
    setting: str,
    drafter: str,
    quantised_experts_folder_of: Callable[[str], Path],
    plain_of: TextsOf,
    tmp_path: Path,
) -> None:
    expected, config = plain_of(name), SPECULATION[drafter]
    if drafter == "eagle3":
        config = config | {"speculative_model": str(write_head(tmp_path))}
    with keeping(name):
        found, length = texts(
            quantised_experts_folder_of(name), speculative_config=config, **SETTINGS[setting]
        )
    assert found == expected
    assert length > 1.1 or drafter != "ngram", "no draft was accepted"


# Recurrent states: Qwen3.5, whose layer for a further token is quantised as the others are.


OF_STATES: dict[str, dict[str, Any]] = {"fp8": {"fp8_activations": False}, "modelopt": {}}
OWN_DRAFTERS = {"none": None, "ngram": NGRAM, "mtp": MTP, "mtp tree": MTP | TREES["dynamic"]}


@contextmanager
def keeping_both() -> Iterator[None]:
    with fp8_checkpoint.keeping_fp8(), keeping_int4():
        yield


@pytest.fixture(scope="module")
def qwen_folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def get(name: str) -> Path:
        folder = tmp_path_factory.mktemp("states")
        qwen3_next.save_predictable(folder, family="Qwen3_5Moe", **QWEN_SIZES)
        if name == "modelopt":
            as_modelopt(folder, wants=is_published)
        else:
            in_fp8(folder, is_published, "deepseek")
        return folder

    return get


@pytest.fixture(scope="module")
def qwen_plain_of(qwen_folder_of: Callable[[str], Path]) -> TextsOf:
    @cache
    def get(name: str) -> list[list[int]]:
        with keeping_both():
            return plain_texts(qwen_folder_of(name), **OF_STATES[name])

    return get


@pytest.mark.slow  # of layers of each format, tests/models compares logits
@pytest.mark.parametrize("drafter", OWN_DRAFTERS)
@pytest.mark.parametrize("setting", STATES)
@pytest.mark.parametrize("name", OF_STATES)
def test_texts_of_qwen3_5_are_the_same_with_and_without_drafts(
    name: str,
    setting: str,
    drafter: str,
    qwen_folder_of: Callable[[str], Path],
    qwen_plain_of: TextsOf,
) -> None:
    expected, config = qwen_plain_of(name), OWN_DRAFTERS[drafter]
    options = STATES[setting] | OF_STATES[name]
    with keeping_both():
        found, length = texts(qwen_folder_of(name), speculative_config=config, **options)
    assert found == expected
    assert length > 1.1 or config is None, "no draft was accepted"


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_STATES)
def test_dummy_weights_of_qwen3_5_need_only_the_config(
    name: str, qwen_folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copy(qwen_folder_of(name) / "config.json", tmp_path)
    options = {"load_format": "dummy"} | OF_STATES[name]
    with keeping_both():
        plain, _ = texts(tmp_path, **options)
        speculated, _ = texts(tmp_path, speculative_config=MTP, **options)
    assert speculated == plain and all(len(set(tokens)) > 1 for tokens in plain)


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", OWN_DRAFTERS)
@pytest.mark.parametrize("name", OF_STATES)
def test_deterministic_texts_of_qwen3_5_on_a_gpu_are_the_same_with_drafts(
    name: str, drafter: str, qwen_folder_of: Callable[[str], Path]
) -> None:
    options = ON_GPU | {"dtype": "bfloat16", "deterministic": True} | STATES["prefix_reuse"]
    expected, _ = texts(qwen_folder_of(name), **(options | {"max_batch_size": 1}))
    found, _ = texts(qwen_folder_of(name), speculative_config=OWN_DRAFTERS[drafter], **options)
    assert found == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_deterministic_texts_on_a_gpu_are_the_same_with_drafts(
    name: str, quantised_experts_folder_of: Callable[[str], Path]
) -> None:
    options = ON_GPU | {"dtype": "bfloat16", "deterministic": True} | SETTINGS["prefix_reuse"]
    expected, _ = texts(quantised_experts_folder_of(name), **(options | {"max_batch_size": 1}))
    found, _ = texts(quantised_experts_folder_of(name), speculative_config=NGRAM, **options)
    assert found == expected


# Quantised activations on a GPU.


NUM_TEXTS, TEXT_LEN, BATCH = 64, 64, 8


def texts_of(folder: Path, cases: list[Case], mode: str, batch_size: int, **options: Any) -> Any:
    """The tokens of each text, `[texts, tokens]`, from a GPU."""
    with LLM(
        folder, max_batch_size=batch_size, dtype="bfloat16", device="cuda", **options,
        **engine(mode, 3),
    ) as llm:  # fmt: skip
        outputs = generate(llm, cases, batch_size)
        llm.check_integrity()
    return torch.tensor([output.outputs[0].token_ids for output in outputs])


@pytest.fixture(scope="module")
def many(tokenizer: Tokenizer) -> list[Case]:
    """Half of them greedy, half sampled."""
    prompts = heldout_prompts(tokenizer, NUM_TEXTS, 40)
    params = ({"temperature": 0.8 * (i % 2), "seed": i} for i in range(NUM_TEXTS))
    return [
        Case(str(i), prompt, SamplingParams(max_tokens=TEXT_LEN, ignore_eos=True, **own))
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("mode", OF_ACTIVATIONS)
def test_deterministic_texts_on_a_gpu_have_no_flips(
    mode: str, name: str, folder_of: Callable[[str], Path], many: list[Case]
) -> None:
    cases, options = many[:8], {"deterministic": True}
    expected = texts_of(
        folder_of(name) / "llama", cases, "plain", 1, cuda_graph_config=None, **options
    )
    assert torch.equal(texts_of(folder_of(name) / "llama", cases, mode, 3, **options), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_on_a_gpu_drafts_flip_no_more_tokens_than_another_batch_size_does(
    name: str, folder_of: Callable[[str], Path], many: list[Case]
) -> None:
    """By default the order of sums depends on the rows of a round, so texts part at near ties. A
    drafted round of BATCH requests has four times as many rows, so the plain rate is the larger one
    of two batch sizes: some kernels have the same bits for 1 and for 8 rows. The number of texts
    that part has a Poisson distribution; rates with drafts may be three deviations higher."""
    folder = folder_of(name) / "llama"
    alone = texts_of(folder, many, "plain", 1)
    batches = (texts_of(folder, many, "plain", size) for size in (BATCH, 4 * BATCH))
    parted, tokens = max((flips(texts, alone) for texts in batches), key=lambda each: each[0])
    for mode in ("ngram", "eagle3"):
        found, until = flips(texts_of(folder, many, mode, BATCH), alone)
        message = (
            f"{name}: a text parts after {until / max(found, 1):.0f} tokens with {mode}, after "
            f"{tokens / max(parted, 1):.0f} with plain batches"
        )
        warnings.warn(message, NearTie, stacklevel=1)
        deviation = (max(found, 1) / until**2 + max(parted, 1) / tokens**2) ** 0.5
        assert found / until <= parted / tokens + 3 * deviation, message
