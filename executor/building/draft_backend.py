"""A draft model or head whose network runs outside torch: what is refused, and how it is loaded."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from tllm_spec.draft_network.network import (
    ALIGNMENT,
    ExternalDraft,
    Network,
    NetworkModel,
    OnnxRuntimeNetwork,
)
from tllm_spec.draft_network.tensorrt import (
    EngineLimits,
    TensorRTNetwork,
    find_tensorrt,
    load_or_build,
    max_kv_rows,
)
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.device.device_choice import cpu_threads, pick_dtype
from tllm_spec.executor.speculative.drafting.heads import (
    HEADS,
    DraftPlan,
    draft_folder,
    kind_of_head,
)
from tllm_spec.executor.speculative.drafting.loaded_draft import LoadedDraft
from tllm_spec.executor.speculative.drafting.network_drafter import BACKLOG_LEN
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.eagle3 import Eagle3Head
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.registry import load_model, model_config

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def check_draft_backend(plan: BuildPlan) -> None:
    """Raises ValueError, with all reasons in one sentence, where the backend cannot run."""
    draft = plan.draft_plan
    if draft is None or draft.backend == "torch":
        return
    folder, dtype = draft_folder(draft), plan.dtype
    reasons, config = [], plan.config
    if draft.is_head:
        kind = kind_of_head(draft, folder)
        head = HEADS[kind]
        if head.runs_outside:
            config = head.read_config(draft, folder)
            if config.mask_token is not None:
                reasons.append(
                    "its network makes one draft after the other, and a P-EAGLE head all at once"
                )
            if config.mla is not None:
                reasons.append("its network has keys and values, and the head latents (MLA)")
        else:
            reasons.append(f"its network is an EAGLE-3 head, and the head is {kind}")
    else:
        config = model_config(folder)
        dtype = pick_dtype(plan.args.dtype, config.dtype, plan.device)
        if config.architecture not in ARCHITECTURES:
            reasons.append(
                f"its network is a dense decoder ({', '.join(ARCHITECTURES)}), and the draft model "
                f"is {config.architecture}"
            )
        if config.quantisation.packing not in (None, "gguf"):  # hosts dequantise GGUF
            reasons.append("its network has weights of 16 or 32 bits, and the draft model's have 4")
    window = draft.option("draft_window_size") or config.sliding_window
    if window is not None and window < plan.max_seq_len:
        reasons.append(f"its network sees all keys, and the draft network's window is {window}")
    if (size := plan.mapping.world_size) > 1:
        reasons.append(f"it runs on one device, and tensor_parallel_size is {size}")
    if draft.backend == "onnxruntime":
        reasons += _why_no_onnxruntime(plan.device, dtype)
    else:
        reasons += _why_no_tensorrt(plan, config, dtype)
    if reasons:
        raise ValueError(
            f"speculative_config.draft_backend = {draft.backend!r} is refused: {'; '.join(reasons)}"
        )


def load_network(plan: BuildPlan, draft: DraftPlan, folder: Path) -> ExternalDraft:
    """Loads the weights on the host and builds the network from them. Raises ValueError where that
    fails."""
    config = model_config(folder).within(plan.max_seq_len)
    model = load_model(
        folder,
        dtype=pick_dtype(plan.args.dtype, config.dtype, plan.device),
        device=torch.device("cpu"),
        load_format=draft.option("load_format") or plan.args.load_format,
        max_positions=plan.max_len,
        fp8_activations=False,  # the network multiplies dequantised weights
    )
    return ExternalDraft(config, model.dtype, plan.device, _network(model, plan, draft))


def load_head_network(plan: BuildPlan, loaded: LoadedDraft) -> LoadedDraft:
    """Builds the network of a loaded head. Raises ValueError where that fails."""
    head = loaded.model
    assert isinstance(head, Eagle3Head)
    network = _network(head, plan, loaded.plan)
    if plan.graph_sizes and plan.device.type == "cuda" and not network.may_be_captured:
        raise ValueError(
            f"speculative_config.draft_backend = {loaded.plan.backend!r} is refused: TensorRT does "
            "not allow CUDA graphs of the head's network; set cuda_graph_config: null, or use "
            "draft_backend: torch"
        )
    head.leave_fuse()
    net = ExternalDraft(head.config, head.dtype, head.device, network, head)
    return replace(loaded, model=net)


def check_pool(draft: LoadedDraft | None, num_rows: int) -> None:
    """Raises ValueError if TensorRT cannot address a KV pool of so many tokens."""
    if draft is None or draft.plan.backend != "tensorrt":
        return
    if num_rows > (most := max_kv_rows(draft.model.config)):
        raise ValueError(
            f"the KV cache has {num_rows} tokens, and with draft_backend = 'tensorrt' it has at "
            f"most {most} of this drafter's; set kv_cache_config.max_tokens"
        )


def _network(model: NetworkModel, plan: BuildPlan, draft: DraftPlan) -> Network:
    if draft.backend == "tensorrt":
        return _tensorrt(model, plan)
    return OnnxRuntimeNetwork(model, cpu_threads(model) or torch.get_num_threads())


def _tensorrt(model: NetworkModel, plan: BuildPlan) -> Network:
    package = find_tensorrt(plan.device)
    limits = EngineLimits(
        max_batch_size=plan.slots.max_batch_size,
        max_window=_max_window(model, plan),
        max_chunk=plan.args.max_num_tokens,
        max_cached=-(-plan.max_len // plan.page_size) * plan.page_size,
        page_size=plan.page_size,
    )
    loaded = load_or_build(package, model, limits)
    try:
        return TensorRTNetwork(package.trt, loaded, limits, plan.device)
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(
            "out of memory for contexts and scratch memory of the draft engine, which grow with "
            f"max_batch_size = {limits.max_batch_size} times max_seq_len = {plan.max_seq_len}; "
            "lower one of them, or use draft_backend: torch"
        ) from error


def _max_window(model: NetworkModel, plan: BuildPlan) -> int:
    """A draft model reads two tokens in the first step of a round. A head reads what the round has
    emitted, or what rounds without drafts have left."""
    if isinstance(model, CausalLM):
        return 2
    return max(plan.shapes.longest.path, BACKLOG_LEN)


def _why_no_tensorrt(plan: BuildPlan, config: ModelConfig, dtype: torch.dtype) -> list[str]:
    reasons = _missing("tllm_spec[tensorrt]", "onnx")
    try:
        find_tensorrt(plan.device)
    except ValueError as error:
        reasons.append(str(error))
    page_bytes = plan.page_size * config.num_kv_heads * config.head_dim * dtype.itemsize
    if page_bytes % ALIGNMENT:
        reasons.append(
            f"keys of a page have {page_bytes} bytes with kv_cache_config.tokens_per_block = "
            f"{plan.page_size}, and TensorRT needs a multiple of {ALIGNMENT}"
        )
    return reasons


def _missing(extra: str, *packages: str) -> list[str]:
    """A reason for each package that is not installed."""
    return [
        f"the package {name} is missing; pip install {extra}"
        for name in packages
        if find_spec(name) is None
    ]


def _why_no_onnxruntime(device: torch.device, dtype: torch.dtype) -> list[str]:
    reasons = _missing("tllm_spec[onnxruntime]", "onnx", "onnxruntime")
    if device.type != "cpu":
        reasons.append(f"it runs on a CPU, and device is {device.type!r}")
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        reasons.append(f"it runs in float32, and dtype is {name!r}")
    return reasons
