"""How many pages the cache gets: `max_tokens` and memory, whichever is less."""

import json
import logging
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.harness import Harness, draft_target
from tests.models.mtp_reference import save_with_mtp
from tests.models.published import GPT_OSS_20B
from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.distributed.communicator import SINGLE_RANK, Communicator
from tllm_spec.executor.building import kv_formats, memory
from tllm_spec.executor.building.engines import build_engines
from tllm_spec.executor.building.memory import check_free_memory
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.engine.memory_plan import (
    DUMMY_PAGES,
    GroupPlan,
    free_bytes,
    machine_bytes,
    own_groups,
    plan_num_pages,
    round_bytes,
)
from tllm_spec.executor.resources.kv_cache import SpanRoom
from tllm_spec.kernels.attention.kv_codes import UNSCALED, KVScales
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.kernels.gemm.int4_weights import MXFP4_GROUP
from tllm_spec.kernels.gemm.scaled_linear import MAX_BYTES
from tllm_spec.llm import LLM
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.formats.quantisation import PLAIN, FourBitGroups, Quantisation
from tllm_spec.models.formats.stacked_weight import WIDE_BYTES
from tllm_spec.models.formats.weight_format import CpuWeight
from tllm_spec.models.linear import Linear
from tllm_spec.models.registry import model_config_of

GEOMETRY = AttentionGeometry(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)
ROOM = SpanRoom(page_size=32, ahead=10, in_context=128)
FLOAT32 = KVFormat(torch.float32)
GROUP = GroupPlan(((GEOMETRY, FLOAT32),), None)
PAGE_BYTES = KVPool.page_bytes(GEOMETRY, 32, FLOAT32)
GIB = 1 << 30


def model_of(hidden: int, intermediate: int, vocab: int, dtype: torch.dtype) -> Any:
    """What the plan looks at in a model on a GPU."""
    config = SimpleNamespace(
        indexer=None,
        hidden_size=hidden,
        mlp_row_elements=4 * intermediate,
        vocab_size=vocab,
        quantisation=PLAIN,
    )
    on_cuda = torch.device("cuda")
    return SimpleNamespace(config=config, dtype=dtype, device=on_cuda, num_logits=vocab)


def on_a_gpu_with(free: int, monkeypatch: pytest.MonkeyPatch, total: int = 0, own: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total or free))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own)


@pytest.mark.parametrize(
    ("share", "num_pages"),
    [
        ({"gpu_memory_utilization": 0.5}, 500 - 300 - 50),
        ({"gpu_memory_utilization": 1.0}, 400 - 50),  # no more than is free
        ({"mem_fraction_static": 0.5}, 500 - 300),
        ({"mem_fraction_static": 0.9}, 400 - 50),
        ({"free_gpu_memory_fraction": 0.5}, (400 - 50) // 2),
    ],
)
def test_a_neighbours_share_is_of_all_memory_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, share: dict[str, float], num_pages: int
) -> None:
    """In pages: of 1,000 this process has 300, others have 300, and its rounds will take 50."""
    args = LlmArgs(model="m", max_num_tokens=64, kv_cache_config=share)
    model = model_of(8, 8, 8, torch.float32)
    reserved = 50 * PAGE_BYTES - round_bytes(args, [model])
    sizes = (each * PAGE_BYTES for each in (400, 1000, 300))
    on_a_gpu_with(next(sizes), monkeypatch, *sizes)
    found = plan_num_pages(args, [GROUP], [model], 1 << 16, ROOM, reserved_bytes=reserved)
    assert found == [num_pages + DUMMY_PAGES]


def test_two_shares_are_refused_together() -> None:
    cache = {"gpu_memory_utilization": 0.9, "free_gpu_memory_fraction": 0.8}
    with pytest.raises(ValueError, match=r"gpu_memory_utilization = 0\.9 are exclusive"):
        LlmArgs(model="m", kv_cache_config=cache)


@pytest.mark.parametrize(
    ("max_tokens", "num_pages"), [(320, 10), (321, 11), (10**6, 100), (None, 100)]
)
def test_a_gpus_cache_has_the_tokens_asked_for_as_far_as_the_share_of_memory_goes(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int | None, num_pages: int
) -> None:
    cache = {"max_tokens": max_tokens, "free_gpu_memory_fraction": 0.5}
    args = LlmArgs(model="m", max_num_tokens=64, kv_cache_config=cache)
    model = model_of(8, 8, 8, torch.float32)
    free = round_bytes(args, [model]) + 200 * PAGE_BYTES  # room for 200 pages
    on_a_gpu_with(free, monkeypatch)
    assert plan_num_pages(args, [GROUP], [model], 2048, ROOM) == [num_pages + DUMMY_PAGES]


@pytest.mark.parametrize(
    ("max_tokens", "num_pages"), [(32 * 20, [20, 20]), (None, [89, 10]), (32 * 60, [60, 10])]
)
def test_groups_share_the_memory_by_what_the_longest_request_holds_of_each(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int | None, num_pages: list[int]
) -> None:
    """A request of 2,048 tokens holds 64 pages, and in the window of 64 tokens 5 of them: those of
    74 tokens and two more. Prompts need 4 more."""
    cache = {"max_tokens": max_tokens, "free_gpu_memory_fraction": 1.0}
    args = LlmArgs(model="m", max_num_tokens=64, kv_cache_config=cache)
    model = model_of(8, 8, 8, torch.float32)
    free = round_bytes(args, [model]) + 100 * PAGE_BYTES
    on_a_gpu_with(free, monkeypatch)
    groups = [GROUP, replace(GROUP, span=KeySpan(64, slides=True))]
    found = plan_num_pages(args, groups, [model], 2048, ROOM)
    assert [number - DUMMY_PAGES for number in found] == num_pages


def pages_for(
    budget: int, config: ModelConfig, max_len: int, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """The tokens of each group of a published model, with the usual size of prompts."""
    args = LlmArgs(model="m", kv_cache_config={"free_gpu_memory_fraction": 1.0})
    model = model_of(8, 8, 8, torch.bfloat16)
    free = round_bytes(args, [model]) + budget
    on_a_gpu_with(free, monkeypatch)
    room = SpanRoom(page_size=32, ahead=24, in_context=2 * args.max_num_tokens)
    groups = own_groups(config.layer_groups(SINGLE_RANK), KVFormat(torch.bfloat16))
    found = plan_num_pages(args, groups, [model], max_len, room)
    return [number - DUMMY_PAGES for number in found]


def test_requests_of_8k_tokens_of_gpt_oss_take_about_half_of_what_full_layers_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, length = model_config_of(GPT_OSS_20B), 8192
    (full,) = pages_for(40 * GIB, config.within(1), length, monkeypatch)
    windows, mixed = pages_for(40 * GIB, config, length, monkeypatch)
    assert full / mixed < 0.55
    assert windows > 7 * mixed // (length // 32)  # 128 tokens and the rounds ahead of each request


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_cache_in_fp8_has_as_many_more_tokens_as_its_numbers_are_smaller(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, factor: int
) -> None:
    args = LlmArgs(model="m", max_num_tokens=64, kv_cache_config={"free_gpu_memory_fraction": 1.0})
    model = model_of(8, 8, 8, dtype)
    free = round_bytes(args, [model]) + 100 * PAGE_BYTES
    on_a_gpu_with(free, monkeypatch)
    wide, codes = (
        GroupPlan(((GEOMETRY, KVFormat(dtype, scales)),), None) for scales in (None, (UNSCALED,))
    )
    pages = [plan_num_pages(args, [own], [model], 2048, ROOM) for own in (wide, codes)]
    number, more = (own[0] - DUMMY_PAGES for own in pages)
    assert more == factor * number


def test_a_slice_of_an_fp8_weight_has_room() -> None:
    args, model = LlmArgs(model="m"), model_of(8, 8, 8, torch.bfloat16)
    plain = round_bytes(args, [model])
    model.config.quantisation = Quantisation("block")
    assert round_bytes(args, [model]) - plain == 2 * 2 * MAX_BYTES


@pytest.mark.parametrize(("size", "is_widened"), [(MXFP4_GROUP, True), (16, False)])
def test_experts_in_mxfp4_have_room_in_16_bits(size: int, is_widened: bool) -> None:
    args, model = LlmArgs(model="m"), model_of(8, 8, 8, torch.bfloat16)
    groups = FourBitGroups(size, is_float=True)
    model.config.quantisation = Quantisation(four_bit=groups)
    model.config.moe = None
    dense = round_bytes(args, [model])
    model.config.moe = object()
    assert round_bytes(args, [model]) - dense == WIDE_BYTES * is_widened


class SharedDevice(Communicator):
    """One of several ranks on a device."""

    def __init__(self, ranks_on_device: int, steps: list[str]) -> None:
        self.ranks_on_device, self._steps = ranks_on_device, steps

    def gather(self, value: Any) -> list[Any]:
        self._steps.append("gather")
        return [value]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_on_one_gpu_divide_its_free_memory(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    args = LlmArgs(model="m", max_num_tokens=64, kv_cache_config={"free_gpu_memory_fraction": 0.5})
    model, reserved, steps = model_of(8, 8, 8, torch.float32), 12345, list[str]()
    free = num_ranks * (round_bytes(args, [model]) + reserved + 200 * PAGE_BYTES)

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        steps.append("look")
        return free, free

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: steps.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    communicator = SharedDevice(num_ranks, steps)
    parts = args, [GROUP], [model], 2048, ROOM, communicator, reserved
    assert plan_num_pages(*parts) == [100 + DUMMY_PAGES]
    # Every rank has loaded its weights and freed what it can before any rank looks.
    assert steps == ["empty", "gather", "look"]


def test_ranks_on_one_host_divide_its_memory() -> None:
    model = model_of(8, 8, 8, torch.float32)
    model.device = torch.device("cpu")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cache = {"max_tokens": int(0.6 * machine) // PAGE_BYTES * 32}
    args = LlmArgs(model="m", kv_cache_config=cache)
    num_pages = cache["max_tokens"] // 32 + DUMMY_PAGES
    assert plan_num_pages(args, [GROUP], [model], 2048, ROOM) == [num_pages]
    half = f"{machine / 2 / GIB:.1f} GiB"
    with pytest.raises(ValueError, match=f"; the machine has {half} for each of 2 ranks"):
        plan_num_pages(args, [GROUP], [model], 2048, ROOM, SharedDevice(2, []))


def test_the_weights_of_target_and_draft_are_compared_with_the_free_memory_before_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def speculate(kind: str, **more: object) -> dict[str, object]:
        return {"decoding_type": kind, "max_draft_len": 2, **more}

    head = "zoo:llama-eagle3"
    options = {"max_seq_len": 64, "load_format": "dummy", "device": "cpu"}
    for model, spec, more in (
        ("zoo:llama", None, ""),
        (
            "zoo:llama",
            speculate("Draft_Target", speculative_model="zoo:llama-draft"),
            " and the draft model's",
        ),
        ("zoo:llama", speculate("Eagle3", speculative_model=head), " and the drafter's"),
        ("zoo:deepseek", speculate("MTP"), " and the drafter's"),
    ):
        plan = BuildPlan(LlmArgs(model=model, speculative_config=spec, **options))
        engines = build_engines(plan, None)
        modules = [each for network in engines.models for each in network.modules()]
        tensors = [each for network in engines.models for each in network.parameters()]
        tables = [n.model.cos_sin for n in engines.models if hasattr(n, "model")]
        forms = [each.weight_format for each in modules if isinstance(each, Linear)]
        copies = [form.packed for form in forms if getattr(form, "packed", None) is not None]
        copies += [
            form.matrix
            for form in forms
            if isinstance(form, CpuWeight) and form.matrix.data_ptr() != form.weight.data_ptr()
        ]
        size = sum(each.numel() * each.dtype.itemsize for each in tensors + tables + copies)
        problem = f"the weights of {model}{more} take 0.0 GiB on cpu .* 0.0 GiB are free; use a"
        with monkeypatch.context() as patch:
            patch.setattr(memory, "free_bytes", lambda device, size=size: size)
            check_free_memory(plan)
            patch.setattr(memory, "free_bytes", lambda device, size=size: size - 1)
            with pytest.raises(ValueError, match=problem):
                build_engines(plan, None)


def test_the_free_memory_of_a_host_is_within_the_limit_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    assert 0 < free_bytes(cpu) <= machine_bytes()
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * page
    for more in (64 << 20, -1):
        limit = used + more
        monkeypatch.setattr(resource, "getrlimit", lambda what, limit=limit: (limit, limit))
        assert 0 <= free_bytes(cpu) <= max(more, 0)


def test_the_default_options_of_an_8b_model_leave_most_of_a_40_gb_card_to_weights_and_pages() -> (
    None
):
    target = model_of(4096, 14336, 128256, torch.bfloat16)
    head = model_of(4096, 14336, 32000, torch.bfloat16)
    eagle3 = {"decoding_type": "Eagle3", "speculative_model": "head", "max_draft_len": 3}
    plain = round_bytes(LlmArgs(model="m"), [target])
    speculating = round_bytes(LlmArgs(model="m", speculative_config=eagle3), [target, head])
    logits = 128256 * torch.bfloat16.itemsize
    assert 2048 * logits < plain < 8 * GIB  # 2048 requests, a row each
    assert 8192 * logits < speculating < 12 * GIB  # and 4 rows each


def test_a_bitmask_of_every_sampled_row_is_set_aside_unless_grammars_are_refused() -> None:
    target = model_of(64, 64, 128256, torch.bfloat16)
    eagle3 = {"decoding_type": "Eagle3", "speculative_model": "head", "max_draft_len": 3}
    sizes = {"max_batch_size": 8, "speculative_config": eagle3}
    with_masks, without = (
        round_bytes(LlmArgs(model="m", guided_decoding_backend=backend, **sizes), [target])
        for backend in ("llguidance", None)
    )
    assert with_masks - without == 8 * (1 + 3) * (1 + 4008) * 4  # a number, and 4,008 words


def test_rows_that_are_never_sampled_cost_activations_and_no_logits() -> None:
    target = model_of(4096, 14336, 128256, torch.bfloat16)
    few, many = (
        round_bytes(LlmArgs(model="m", max_batch_size=8, max_num_tokens=rows), [target])
        for rows in (8192, 16384)
    )
    assert many - few == 8192 * (8 * 4096 + 4 * 14336) * 2


def test_a_cache_larger_than_the_machine_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"kv_cache_config.max_tokens = 1000000000000000 takes \d+\.\d GiB"
    ):
        LLM("zoo:llama", kv_cache_config={"max_tokens": 10**15})


# Which pools of an engine have FP8 codes, with which scales, and what the log says.


FP8 = {"kv_cache_config": {"dtype": "fp8"}}
OWN_TYPE = "the KV cache has the model's own type"


def asking(folder: Path, scheme: dict[str, Any] | str, scales: dict[str, float]) -> Path:
    """The checkpoint with a `kv_cache_scheme` and scales by the names of their tensors."""
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    own = {f"model.layers.{name}": torch.tensor([scale]) for name, scale in scales.items()}
    save_file(tensors | own, folder / "model.safetensors")
    return folder


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def scales_of(harness: Harness, group: int = 0) -> list[tuple[KVScales, ...] | None]:
    """An entry for each pool of a group: the target's, then those of its draft layers."""
    kv = harness.executor.parts.kv
    return [pool.kv_format.scales for pool in kv.groups[group].pools]


EIGHT_BITS = {"num_bits": 8, "type": "float"}
SCALES = {"0.self_attn.k_scale": 0.5, "0.self_attn.v_scale": 0.25}


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", KVScales(0.5, 0.25)), ("fp8", KVScales(0.5, 0.25)), ("model", None)],
)
def test_a_checkpoint_may_ask_for_an_fp8_cache_and_its_scales_are_used(
    dtype: str, expected: KVScales | None, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asking(copy, EIGHT_BITS, SCALES)
    harness = Harness(copy, kv_cache_config={"dtype": dtype})
    [found] = scales_of(harness)
    assert (found and found[0]) == expected
    assert ("in FP8 (E4M3) with the checkpoint's scales" in caplog.text) == (expected is not None)
    state = harness.executor.state()["kv_cache"]
    assert state["dtype"] == ("float32" if expected is None else "fp8")
    assert f"{state['bytes_per_token']} bytes a token" in caplog.text


def test_without_a_setting_a_cache_has_the_models_type_and_fp8_has_scales_of_one(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sizes = []
    for options, expected in ({}, None), (FP8, UNSCALED):
        harness = Harness(tiny, **options)
        [found] = scales_of(harness)
        assert (found and set(found)) == (expected and {expected})
        sizes.append(harness.executor.state()["kv_cache"]["bytes_per_token"])
    assert sizes[0] == 4 * sizes[1]
    assert caplog.text.count("in FP8 (E4M3) with scales of 1.0") == 1


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (EIGHT_BITS | {"strategy": "attn_head"}, "strategy is 'attn_head'"),
        ({"num_bits": 8, "type": "int"}, "type is 'int'"),
    ],
)
def test_a_setting_that_is_not_served_leaves_the_models_type_and_is_said(
    scheme: dict[str, Any], reason: str, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    [found] = scales_of(Harness(asking(copy, scheme, {})))
    assert found is None
    [line] = [line for line in caplog.messages if OWN_TYPE in line]
    assert "not that of kv_cache_scheme" in line and reason in line


def test_a_device_that_does_not_convert_fp8_refuses_it_only_where_it_is_asked_for_by_name(
    copy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kv_formats, "_why_no_codes", lambda device: "it converts no FP8")
    with pytest.raises(ValueError, match=r"kv_cache_config\.dtype = 'fp8': it converts no FP8"):
        Harness(copy, **FP8)
    with pytest.raises(ValueError, match=r"speculative_config\.kv_cache_dtype = 'fp8': it conv"):
        Harness(copy, **draft_target(copy, kv_cache_dtype="fp8"))
    [found] = scales_of(Harness(asking(copy, "static", SCALES)))
    assert found is None and "it converts no FP8" in caplog.text


@pytest.mark.parametrize(
    ("own", "has_codes"), [(None, True), ("auto", False), ("model", False), ("fp8", True)]
)
def test_a_draft_model_has_the_targets_option_or_its_own(
    own: str | None, has_codes: bool, tiny: Path, tiny_draft: Path
) -> None:
    options = draft_target(tiny_draft, draft_target_one_model=True, kv_cache_dtype=own)
    target, draft = scales_of(Harness(tiny, **FP8, **options))
    assert target is not None and (draft is not None) == has_codes


def test_an_option_of_a_network_outside_of_torch_is_refused(tiny: Path, tiny_draft: Path) -> None:
    options = draft_target(tiny_draft, draft_backend="onnxruntime", kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="its network reads no FP8 KV cache"):
        Harness(tiny, **options)


def test_mtp_modules_follow_the_target_with_scales_of_their_own(tmp_path: Path) -> None:
    save_with_mtp(tmp_path)
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    asking(tmp_path, EIGHT_BITS, {f"{layers}.self_attn.k_scale": 0.5})
    mtp = {"decoding_type": "MTP", "max_draft_len": 2}
    target, draft = scales_of(Harness(tmp_path, max_seq_len=64, speculative_config=mtp))
    assert target == (UNSCALED,) * layers and draft == (KVScales(0.5, 0.5),)
