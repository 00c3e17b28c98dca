"""A draft model outside torch on a GPU: in TensorRT where the device is served, else its refusal;
and everything but TensorRT with the same network definition run in torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.draft_network.eager_network import EagerNetwork
from tests.lossless.cases import GPU_TOLERANCE, Case, assert_same, generate
from tests.lossless.oracle import Oracle
from tllm_spec.draft_network.network import Network, NetworkModel
from tllm_spec.draft_network.tensorrt import find_tensorrt
from tllm_spec.executor.building import draft_backend
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.speculative.drafting.model_drafter import ModelDrafter
from tllm_spec.llm import LLM
from tllm_spec.models.eagle3 import Eagle3Head
from tllm_spec.outputs import RequestOutput

pytestmark = pytest.mark.gpu
SPECULATIONS = {
    "model": {"decoding_type": "Draft_Target", "speculative_model": "zoo:llama-draft"},
    "head": {
        "decoding_type": "Eagle3",
        "speculative_model": "zoo:llama-eagle3",
        "eagle3_one_model": False,
    },
}
OPTIONS = {"max_draft_len": 3, "draft_backend": "tensorrt"}


@pytest.fixture(params=SPECULATIONS)
def speculation(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SPECULATIONS[request.param] | OPTIONS


def why_not_served() -> str | None:
    try:
        find_tensorrt(torch.device("cuda"))
    except ValueError as error:
        return str(error)
    return None


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def reference(request: pytest.FixtureRequest, cases: list[Case]) -> tuple[str, list[RequestOutput]]:
    """Plain decoding, one request after the other, without graphs."""
    with LLM("zoo:llama", dtype=request.param, cuda_graph_config=None, max_batch_size=1) as llm:
        return request.param, generate(llm, cases, 1)


def check(
    speculation: dict[str, Any],
    reference: tuple[str, list[RequestOutput]],
    cases: list[Case],
    oracle: Callable[[], Oracle],
) -> None:
    """Prompts in chunks next to windows, graphs and overlap, and a prefix of each prompt cached."""
    dtype, plain = reference
    options = {"max_num_tokens": 64, "enable_chunked_prefill": True, "max_batch_size": 3}
    with LLM("zoo:llama", dtype=dtype, speculative_config=speculation, **options) as llm:
        generate(llm, [Case("", case.prompt[:40], case.params) for case in cases[:3]], 3)
        outputs = generate(llm, cases, 3)
        llm.check_integrity()
        drafter, rounds = llm._executor.parts.drafter, llm._executor.parts.runner.graphs
        assert rounds is not None
        drafting = drafter.graphs if isinstance(drafter, ModelDrafter) else rounds.tails
        assert drafting is not None and drafting.tiers
    for case, output, alone in zip(cases, outputs, plain, strict=True):
        assert_same(case, output, alone, oracle, GPU_TOLERANCE[dtype], at_edges=dtype == "bfloat16")
    stats = [output.speculative_decoding for output in outputs]
    assert sum(each.acceptance_length for each in stats if each) / len(stats) > 1.3


def test_an_engine_gives_plain_decodings_text(
    speculation: dict[str, Any],
    reference: tuple[str, list[RequestOutput]],
    cases: list[Case],
    oracle: Callable[[], Oracle],
) -> None:
    if reason := why_not_served():
        pytest.skip(reason)
    check(speculation, reference, cases, oracle)


def test_a_device_that_is_not_served_is_refused_with_its_compute_capability(
    speculation: dict[str, Any],
) -> None:
    if (reason := why_not_served()) is None:
        pytest.skip("TensorRT serves this device")
    with pytest.raises(ValueError) as refusal:
        LLM("zoo:llama", speculative_config=speculation)
    print(refusal.value)
    assert reason in str(refusal.value)


def test_the_definition_in_torch_drafts_in_cuda_graphs(
    speculation: dict[str, Any],
    reference: tuple[str, list[RequestOutput]],
    cases: list[Case],
    oracle: Callable[[], Oracle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_torch(model: NetworkModel, plan: BuildPlan) -> Network:
        return EagerNetwork(model)

    monkeypatch.setattr(Eagle3Head, "leave_fuse", lambda _: None)  # torch runs its layers
    monkeypatch.setattr(draft_backend, "find_tensorrt", lambda device: None)
    monkeypatch.setattr(draft_backend, "_tensorrt", in_torch)
    check(speculation, reference, cases, oracle)
