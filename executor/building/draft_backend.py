"""A draft model whose network runs outside torch: what is refused, and how it is loaded."""

from pathlib import Path

import torch

from tllm_spec.draft_network.network import DraftNetwork
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.device_choice import cpu_threads, pick_dtype
from tllm_spec.executor.speculative.drafting.loaded_draft import draft_folder
from tllm_spec.executor.speculative.modes import DraftModel
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.llama import LlamaForCausalLM
from tllm_spec.models.registry import load_model

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def check_draft_backend(plan: BuildPlan) -> None:
    """Raises ValueError, with all reasons in one sentence, where the backend cannot run."""
    draft = plan.draft_plan
    if draft is None or draft.backend == "torch":
        return
    config = ModelConfig.from_pretrained(draft_folder(draft))
    reasons = []
    if config.architecture not in ARCHITECTURES:
        reasons.append(
            f"its network is a dense decoder ({', '.join(ARCHITECTURES)}), and the draft model is "
            f"{config.architecture}"
        )
    if (size := plan.mapping.world_size) > 1:
        reasons.append(f"it runs on one device, and tensor_parallel_size is {size}")
    dtype = pick_dtype(plan.args.dtype, config.dtype, plan.device)
    reasons += _why_no_onnxruntime(plan.device, dtype)
    if reasons:
        raise ValueError(
            f"speculative_config.draft_backend = {draft.backend!r} is refused: {'; '.join(reasons)}"
        )


def load_network(plan: BuildPlan, draft: DraftModel, folder: Path) -> DraftNetwork:
    """Loads the weights on the host and builds the network from them."""
    from tllm_spec.draft_network.onnxruntime_network import OnnxRuntimeNetwork

    config = ModelConfig.from_pretrained(folder)
    model = load_model(
        folder,
        dtype=pick_dtype(plan.args.dtype, config.dtype, plan.device),
        device=torch.device("cpu"),
        load_format=draft.load_format,
        max_positions=plan.max_len,
    )
    assert isinstance(model, LlamaForCausalLM)
    num_threads = cpu_threads(model) or torch.get_num_threads()
    network = OnnxRuntimeNetwork(model, num_threads)
    return DraftNetwork(config, model.dtype, plan.device, network)


def _why_no_onnxruntime(device: torch.device, dtype: torch.dtype) -> list[str]:
    reasons = []
    if device.type != "cpu":
        reasons.append(f"it runs on a CPU, and device is {device.type!r}")
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        reasons.append(f"it runs in float32, and dtype is {name!r}")
    return reasons
