"""What two ranks tell each other, for tests: what they gather in order to sample, and how many of
them use a device."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.distributed.cases import TINY_EAGLE3, TOKEN_PROMPTS
from tllm_spec.distributed.process_group import ProcessGroup
from tllm_spec.executor.sampling.sharded_sampler import ShardedDraftSampling, ShardedSampler
from tllm_spec.llm import LLM
from tllm_spec.ranks import release_ranks

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "filtered": {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    "penalised": {"presence_penalty": 0.5},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
}
LASTING = {"max_tokens": 6, "ignore_eos": True}


def gathered_bytes(folder: str, num_ranks: int) -> list[dict[str, dict[str, Any]]]:
    """For each way of sampling the tokens, and how many bytes a row `all_gather` returned: where
    ranks exchange their best tokens, and where they gather all logits. How many rows a round has
    depends on when requests arrive."""
    row_bytes, all_gather = set[int](), ProcessGroup.all_gather

    def counted(group: ProcessGroup, values: torch.Tensor) -> torch.Tensor:
        gathered = all_gather(group, values)
        row_bytes.add(gathered.shape[1] * gathered.element_size())
        return gathered

    with mock.patch.object(ProcessGroup, "all_gather", counted):
        exchanged = generate(folder, num_ranks, row_bytes)
        with ExitStack() as stack:
            always_gather(stack)
            return [exchanged, generate(folder, num_ranks, row_bytes)]


def always_gather(stack: ExitStack) -> None:
    make = ShardedDraftSampling.__init__

    def making(sampling: Any, *arguments: Any) -> None:
        make(sampling, *arguments)
        sampling._always_gathers = True

    stack.enter_context(mock.patch.object(ShardedSampler, "_needs_all", lambda *_: True))
    stack.enter_context(mock.patch.object(ShardedDraftSampling, "__init__", making))


def generate(folder: str, num_ranks: int, row_bytes: set[int]) -> dict[str, dict[str, Any]]:
    found = {}
    options: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True}
    options["speculative_config"] = TINY_EAGLE3 | {"speculative_model": f"{folder}/eagle3"}
    model = f"{folder}/gpt-oss-mxfp4"
    with suppress(SystemExit), LLM(model, tensor_parallel_size=num_ranks, **options) as llm:
        for name, way in WAYS.items():
            row_bytes.clear()
            outputs = llm.generate(TOKEN_PROMPTS[:3], way | LASTING, use_tqdm=False)
            tokens = [each.outputs[0].token_ids for each in outputs]
            found[name] = {"tokens": tokens, "row_bytes": sorted(row_bytes)}
        release_ranks()
    return found


def ranks_on_devices(folder: str, num_ranks: int) -> list[list[Any]]:
    """How many ranks use each rank's device and whether CUDA graphs hold its sums: on the CPU, on
    one GPU, and on a GPU each."""
    from mpi4py import MPI

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"GPU {device.index}")

    found, rank = [], MPI.COMM_WORLD.rank
    with (
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
        mock.patch.object(torch.cuda, "get_device_properties", properties),
        mock.patch.object(dist, "init_process_group", lambda *_, **__: None),  # needs the devices
        mock.patch.object(ProcessGroup, "_choose_sums", lambda *_: None),
    ):
        for kind, index in (("cpu", None), ("cuda", 0), ("cuda", rank)):
            group = ProcessGroup(MPI.COMM_WORLD)
            group.join(torch.device(kind, index))
            found.append(group.gather((group.ranks_on_device, group.captures)))
            group.close()
    return found
