"""An FP8 KV cache: every drafter leaves the text of plain decoding alone, which is the text of
transformers' model over keys and values that are rounded to E4M3 before any query reads them."""

import inspect
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from tests.lossless.cases import Case, assert_same, fixed_length_cases, generate, heldout_prompts
from tests.lossless.engines import engine
from tests.lossless.oracle import GetOracle, Oracle
from tests.lossless.test_quantised_weights import MTP, PLAIN, copied
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.zoo.registry import resolve_model

# Numbers of the zoo's keys and values go up to about 10 and 4.
KEY_SCALE, VALUE_SCALE = 0.03, 0.007
# A last bit that depends on the shape of a batch moves one of some 50,000 numbers to the next code,
# a sixteenth of its value away. GPUs in bfloat16 do so more often.
TOLERANCE, GPU_TOLERANCE = 0.02, 0.5
FP8 = {"dtype": "fp8"}
SETTINGS: dict[str, dict[str, Any]] = {
    "undisturbed": {"kv_cache_config": FP8 | {"enable_block_reuse": False}},
    "prefix_reuse": {"kv_cache_config": FP8 | {"tokens_per_block": 16}},
    "chunks_of_16": {
        "kv_cache_config": FP8 | {"tokens_per_block": 32},
        "enable_chunked_prefill": True,
        "max_num_tokens": 16,
        "max_batch_size": 2,
    },
    "preemption": {
        "kv_cache_config": FP8 | {"tokens_per_block": 16, "max_tokens": 288},
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    },
}
RUNS = (("ngram", "preemption"), ("eagle3_tree", "chunks_of_16"))
MODES = (
    "plain",
    "ngram",
    "ngram_tree",
    "draft_target",
    "eagle3",
    "eagle3_two_model",
    "eagle3_tree",
)


class StoredCache(DynamicCache):
    """Keeps keys and values as an FP8 cache does, and gives them to every query so, those of the
    prompt included."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = (key_states, KEY_SCALE), (value_states, VALUE_SCALE)
        rounded = (rounded_to_codes(*pair) for pair in pairs)
        return super().update(*rounded, *args, **options)


def rounded_to_codes(numbers: torch.Tensor, scale: float) -> torch.Tensor:
    codes = (numbers / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.to(numbers.dtype) * scale


def with_scales(folder: Path) -> Path:
    """Gives the checkpoint an FP8 cache as llm-compressor describes it."""
    raw = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    raw["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(raw["num_hidden_layers"]):
        below = f"model.layers.{layer}.self_attn"
        tensors[f"{below}.k_scale"] = torch.tensor([KEY_SCALE])
        tensors[f"{below}.v_scale"] = torch.tensor(VALUE_SCALE)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_scales(copied("zoo:llama", tmp_path_factory.mktemp("fp8_kv") / "llama"))


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[Case]:
    return fixed_length_cases(tokenizer, heldout_prompts(tokenizer, 8, 60))[::3]


@pytest.fixture(scope="module")
def expected(folder: Path, requests: list[Case]) -> list[RequestOutput]:
    """Plain decoding, one request after the other, with the checkpoint's own setting."""
    with LLM(folder, **PLAIN) as llm:
        return generate(llm, requests, 1)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> GetOracle:
    @cache
    def get() -> Oracle:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            resolve_model("zoo:llama"), dtype=torch.float32
        )
        # transformers renames it.
        names = inspect.signature(model.forward).parameters
        name = "cache" if "cache" in names else "past_key_values"

        def over_codes(tokens: torch.Tensor) -> Any:
            return model(tokens, **{name: StoredCache()}, use_cache=True)

        return Oracle(over_codes)

    return get


def test_plain_text_is_that_of_transformers_over_rounded_keys_and_values(
    requests: list[Case], expected: list[RequestOutput], oracle: GetOracle
) -> None:
    for case, output in zip(requests, expected, strict=True):
        tokens = output.outputs[0].token_ids
        for place, token in list(enumerate(tokens))[::16]:
            gap = oracle().gap(case.params, case.prompt, tokens[:place], (token, token))
            assert gap < TOLERANCE, f"{case.name}: token {place}"


@pytest.mark.parametrize(
    ("mode", "setting"),
    [
        pytest.param(mode, setting, marks=() if (mode, setting) in RUNS else pytest.mark.slow)
        for mode in MODES
        for setting in SETTINGS
    ],
)
def test_no_drafter_chunk_prefix_hit_or_preemption_changes_the_text(
    mode: str,
    setting: str,
    folder: Path,
    requests: list[Case],
    expected: list[RequestOutput],
    oracle: GetOracle,
) -> None:
    options = {"max_batch_size": 3} | SETTINGS[setting] | engine(mode, 3)
    with LLM(folder, **options) as llm:
        found = generate(llm, requests, options["max_batch_size"])
        again = generate(llm, requests, 3) if setting == "prefix_reuse" else []
        llm.check_integrity()
        preempted = llm._executor.scheduler.num_preemptions > 0
    assert preempted == (setting == "preemption")
    for output in filter(None, (found, again)):
        for case, own, plain in zip(requests, output, expected, strict=True):
            assert_same(case, own, plain, oracle, TOLERANCE)
    if mode != "plain":
        stats = [each.speculative_decoding for each in found if each.speculative_decoding]
        assert max(each.acceptance_length for each in stats) > 1.2


@pytest.mark.thinned(3)
@pytest.mark.parametrize("size", [7, 1, 64])
def test_prompts_in_chunks_of_any_size_give_the_same_text(
    size: int, folder: Path, requests: list[Case], expected: list[RequestOutput], oracle: GetOracle
) -> None:
    options = PLAIN | {"enable_chunked_prefill": True, "max_num_tokens": size}
    with LLM(folder, **options) as llm:
        found = generate(llm, requests[:2], 1)
    for case, own, plain in zip(requests, found, expected, strict=False):
        assert_same(case, own, plain, oracle, TOLERANCE)


@pytest.fixture(scope="module")
def short(requests: list[Case]) -> list[Case]:
    """The first two, with half of their tokens."""
    return [replace(case, params=replace(case.params, max_tokens=24)) for case in requests[:2]]


@pytest.mark.thinned
@pytest.mark.parametrize("mtp", [MTP, None], ids=["mtp", "plain"])
def test_latents_in_fp8_give_the_same_text_with_and_without_mtp(
    mtp: dict[str, Any] | None, short: list[Case], latents_alone: list[list[int]]
) -> None:
    options = {"max_batch_size": 3, "kv_cache_config": FP8 | {"tokens_per_block": 16}}
    with LLM("zoo:deepseek", speculative_config=mtp, **options) as llm:
        found = generate(llm, short, 3)
        llm.check_integrity()
    assert [each.outputs[0].token_ids for each in found] == latents_alone
    if mtp:
        stats = [each.speculative_decoding for each in found if each.speculative_decoding]
        assert max(each.acceptance_length for each in stats) > 1.3


@pytest.fixture(scope="module")
def latents_alone(short: list[Case]) -> list[list[int]]:
    with LLM("zoo:deepseek", **PLAIN | {"kv_cache_config": FP8}) as llm:
        return [each.outputs[0].token_ids for each in generate(llm, short, 1)]


@pytest.mark.parametrize("dtype", [pytest.param("fp8", marks=pytest.mark.slow), "model"])
def test_a_draft_model_has_a_type_of_its_own(
    dtype: str, folder: Path, requests: list[Case], expected: list[RequestOutput], oracle: GetOracle
) -> None:
    options = engine("draft_target", 3, kv_cache_dtype=dtype)
    with LLM(folder, max_batch_size=3, **options) as llm:
        found = generate(llm, requests, 3)
        state = llm.server_info()["internal_states"][0]["kv_cache"]
    assert state["dtype"] == "fp8"
    for case, own, plain in zip(requests, found, expected, strict=True):
        assert_same(case, own, plain, oracle, TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("model", ["zoo:llama", "zoo:deepseek"])
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_drafts_leave_the_text_alone(
    mode: str,
    model: str,
    deterministic: bool,
    folder: Path,
    requests: list[Case],
    oracle: GetOracle,
) -> None:
    is_mla = model == "zoo:deepseek"
    if is_mla and mode not in ("plain", "ngram", "ngram_tree"):
        pytest.skip("its drafts come from MTP modules")
    path = model if is_mla else folder
    options = {"dtype": "bfloat16", "device": "cuda", "deterministic": deterministic}
    options["kv_cache_config"] = FP8
    with LLM(path, max_batch_size=1, cuda_graph_config=None, **options) as llm:
        alone = generate(llm, requests, 1)
    with LLM(path, max_batch_size=3, **options, **engine(mode, 3)) as llm:
        found = generate(llm, requests, 3)
    for case, output, plain in zip(requests, found, alone, strict=True):
        if deterministic:
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        elif not is_mla:
            assert_same(case, output, plain, oracle, GPU_TOLERANCE, at_edges=True)
