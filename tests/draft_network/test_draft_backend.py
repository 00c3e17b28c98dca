"""Which backends a draft model is refused on, and why."""

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.draft_network.eager_network import EagerNetwork
from tests.draft_network.head_pairs import load_head, load_target
from tests.executor.draft_caches import network_of
from tests.executor.harness import Harness
from tests.models.helpers import save_checkpoint
from tests.models.tiny_eagle import write_tiny_eagle
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tests.test_layout import PACKAGE_FILES
from tllm_spec.config.draft_shape import chain_of
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import DraftTargetDecodingConfig, Eagle3DecodingConfig
from tllm_spec.draft_network import tensorrt
from tllm_spec.draft_network.network import ExternalDraft
from tllm_spec.draft_network.tensorrt import EngineLimits, find_tensorrt, package_for
from tllm_spec.executor.building import draft_backend
from tllm_spec.executor.building.draft_backend import check_draft_backend, load_head_network
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.speculative.drafting.draft_net import HeadNet
from tllm_spec.executor.speculative.drafting.loaded_draft import LoadedDraft
from tllm_spec.executor.speculative.drafting.model_drafter import ModelDrafter
from tllm_spec.executor.speculative.modes import draft_plan_of
from tllm_spec.models.registry import model_config
from tllm_spec.zoo.quantise import Style, quantise
from tllm_spec.zoo.registry import resolve_model

LIBRARIES = ("onnx", "onnxruntime", "tensorrt", "tensorrt_rtx")
TARGETS = {"NONE": 0, "CURRENT": 1, "SM75": 75, "SM89": 89, "SM120": 120}


def imported_packages(path: Path) -> set[str]:
    """The top-level names that a file imports, at any depth."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def harness(
    draft: str | Path = "zoo:llama-draft", draft_backend: str = "onnxruntime", **options: Any
) -> Harness:
    spec = {
        "decoding_type": "Draft_Target",
        "speculative_model": str(draft),
        "max_draft_len": 3,
        "draft_backend": draft_backend,
    }
    return Harness("zoo:llama", speculative_config=spec, **options)


def package(name: str, version: str, *, targets: bool = False) -> SimpleNamespace:
    """A stand-in for an installed TensorRT."""
    found = SimpleNamespace(__name__=name, __version__=version)
    if targets:
        found.ComputeCapability = SimpleNamespace(__members__=TARGETS)
    return found


def install(monkeypatch: pytest.MonkeyPatch, *packages: SimpleNamespace) -> None:
    """Only these packages can be imported."""
    installed = {each.__name__: each for each in packages}

    def import_module(name: str) -> SimpleNamespace:
        if name not in installed:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return installed[name]

    monkeypatch.setattr(tensorrt, "import_module", import_module)


@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime"])
def test_a_backend_outside_torch_drafts_chains_before_the_round(backend: str) -> None:
    options = {"max_draft_len": 3, "speculative_model": "d", "draft_backend": backend}
    assert DraftTargetDecodingConfig(**options).draft_backend == backend
    with pytest.raises(ValueError) as refusal:
        DraftTargetDecodingConfig(
            **options, draft_target_one_model=True, use_dynamic_tree=True, dynamic_tree_max_topK=2
        )
    for sentence in (f"draft_backend = {backend!r}", "chains, not trees", "'torch'", "one_model"):
        assert sentence in str(refusal.value)


@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime"])
def test_a_head_outside_torch_drafts_chains_in_launches_of_its_own(backend: str) -> None:
    options = {"max_draft_len": 3, "speculative_model": "d", "draft_backend": backend}
    served = Eagle3DecodingConfig(**options, eagle3_one_model=False)
    assert served.draft_backend == backend
    with pytest.raises(ValueError) as refusal:
        Eagle3DecodingConfig(**options, use_dynamic_tree=True, dynamic_tree_max_topK=2)
    for sentence in (
        f"draft_backend = {backend!r} is refused",
        "eagle3_one_model = True drafts in the target's own round",
        "its network drafts chains, not trees",
    ):
        assert sentence in str(refusal.value)


@pytest.mark.parametrize("decoding_type", ["MTP", "NGram"])
def test_other_drafters_have_no_backend(decoding_type: str) -> None:
    config = {"decoding_type": decoding_type, "max_draft_len": 1, "draft_backend": "tensorrt"}
    with pytest.raises(ValueError, match="is an option of Draft_Target and Eagle3 and Eagle, not"):
        LlmArgs.from_kwargs("m", speculative_config=config)


def head_harness(**options: Any) -> Harness:
    spec = {
        "decoding_type": "Eagle3",
        "speculative_model": "zoo:llama-eagle3",
        "max_draft_len": 3,
        "eagle3_one_model": False,
        "draft_backend": "onnxruntime",
    }
    return Harness("zoo:llama", speculative_config=spec | options.pop("spec", {}), **options)


def test_a_head_is_refused_as_a_draft_model_is() -> None:
    with pytest.raises(ValueError) as refusal:
        head_harness(spec={"draft_backend": "tensorrt"}, kv_cache_config={"tokens_per_block": 1})
    assert str(refusal.value) == (
        "speculative_config.draft_backend = 'tensorrt' is refused: it runs on CUDA, and device is "
        "'cpu'"
    )
    with pytest.raises(ValueError, match="it runs in float32, and dtype is 'bfloat16'"):
        head_harness(dtype="bfloat16")


def test_a_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_tiny_eagle(tmp_path)
    spec = {"decoding_type": "Eagle", "speculative_model": str(tmp_path)}
    with pytest.raises(ValueError, match=r"an EAGLE-3 head, and the head is EAGLE-1/2$"):
        head_harness(spec=spec)
    head_harness(spec={"decoding_type": "Eagle"}).submit([1, 2], max_tokens=9)


def test_a_head_with_latents_is_refused(tmp_path: Path) -> None:
    write_tiny_eagle3(tmp_path, latent=True)
    with pytest.raises(ValueError, match=r"has keys and values, and the head latents \(MLA\)$"):
        head_harness(spec={"speculative_model": str(tmp_path)})


def test_of_a_head_outside_torch_only_fuse_is_kept() -> None:
    net = network_of(head_harness()).net
    assert isinstance(net, HeadNet)
    assert {name for name, _ in net.head.named_parameters()} == {"fc.weight"}


def engines_of(monkeypatch: pytest.MonkeyPatch, network: Callable[..., object]) -> None:
    """A stand-in for TensorRT, which serves any device. network: made as `TensorRTNetwork`, but of
    the model."""
    monkeypatch.setattr(draft_backend, "find_tensorrt", lambda device: SimpleNamespace(trt=None))
    monkeypatch.setattr(draft_backend, "load_or_build", lambda package, model, limits: model)
    monkeypatch.setattr(draft_backend, "TensorRTNetwork", network)


@pytest.mark.parametrize("make", [harness, head_harness])
def test_a_pool_that_tensorrt_cannot_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Harness]
) -> None:
    """Not when the first request runs."""
    engines_of(monkeypatch, lambda trt, model, limits, device: EagerNetwork(model))
    monkeypatch.setattr(draft_backend, "max_kv_rows", lambda config: 500)
    own = {"draft_backend": "tensorrt"}
    options: dict[str, Any] = own if make is harness else {"spec": own}
    make(**options, kv_cache_config={"tokens_per_block": 32, "max_tokens": 400})
    with pytest.raises(ValueError, match=r"has 544 tokens, .* at most 500 of this"):
        make(**options, kv_cache_config={"tokens_per_block": 32, "max_tokens": 512})


def test_the_engine_of_a_head_is_built_for_its_longest_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has accepted tokens, or what rounds without drafts have left."""
    built: list[EngineLimits] = []

    def in_torch(_: object, loaded: object, limits: EngineLimits, device: object) -> object:
        built.append(limits)
        return EagerNetwork(loaded)  # type: ignore[arg-type] # `load_or_build` below

    engines_of(monkeypatch, in_torch)
    for draft_len in (3, 20):
        head_harness(spec={"draft_backend": "tensorrt", "max_draft_len": draft_len})
    harness(draft_backend="tensorrt")
    assert [limits.max_window for limits in built] == [16, 21, 2]


def test_a_heads_engine_that_cuda_graphs_cannot_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = SimpleNamespace(may_be_captured=False)
    monkeypatch.setattr(draft_backend, "_network", lambda *_: network)
    plan: Any = SimpleNamespace(device=torch.device("cuda"), graph_sizes=(1, 2))
    head = load_head(resolve_model("zoo:llama-eagle3"), load_target(resolve_model("zoo:llama")), 3)
    options = {"max_draft_len": 3, "speculative_model": "d", "draft_backend": "tensorrt"}
    draft = draft_plan_of(Eagle3DecodingConfig(**options, eagle3_one_model=False))
    assert draft is not None
    with pytest.raises(ValueError, match="set cuda_graph_config: null, or use draft_backend: torc"):
        load_head_network(plan, LoadedDraft(draft, head, None))
    plan.graph_sizes = ()
    loaded = load_head_network(plan, LoadedDraft(draft, head, None))
    assert isinstance(loaded.model, ExternalDraft) and loaded.model.num_logits == 1024


def test_onnxruntime_is_refused_with_every_reason_at_once(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    save_checkpoint(tmp_path, "Qwen3Moe", head_dim=32, **experts)
    with pytest.raises(ValueError) as refusal:
        harness(tmp_path, dtype="bfloat16")
    text = str(refusal.value)
    assert text.startswith("speculative_config.draft_backend = 'onnxruntime' is refused: ")
    assert "the draft model is Qwen3MoeForCausalLM" in text
    assert "it runs in float32, and dtype is 'bfloat16'" in text


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_a_draft_model_in_4_bits_is_refused(backend: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Llama")
    quantise(tmp_path, Style("awq"))
    with pytest.raises(ValueError, match="16 or 32 bits, and the draft model's have 4"):
        harness(tmp_path, backend)


def test_tensorrt_is_refused_on_a_cpu_and_with_pages_that_it_cannot_address() -> None:
    with pytest.raises(ValueError) as refusal:
        harness(draft_backend="tensorrt", kv_cache_config={"tokens_per_block": 1})
    assert str(refusal.value) == (
        "speculative_config.draft_backend = 'tensorrt' is refused: it runs on CUDA, and device is "
        "'cpu'; keys of a page have 128 bytes with kv_cache_config.tokens_per_block = 1, and "
        "TensorRT needs a multiple of 256"
    )


def test_onnxruntime_is_refused_on_a_gpu_and_on_several_devices() -> None:
    options = {"max_draft_len": 3, "speculative_model": "zoo:llama-draft"}
    spec = DraftTargetDecodingConfig(**options, draft_backend="onnxruntime")
    plan: Any = SimpleNamespace(
        args=LlmArgs.from_kwargs("zoo:llama", dtype="float32"),
        config=model_config(resolve_model("zoo:llama")),
        device=torch.device("cuda"),
        draft_plan=draft_plan_of(spec),
        dtype=torch.float32,
        max_len=100,
        mapping=SimpleNamespace(world_size=2),
    )
    with pytest.raises(ValueError) as refusal:
        check_draft_backend(plan)
    assert str(refusal.value) == (
        "speculative_config.draft_backend = 'onnxruntime' is refused: it runs on one device, and "
        "tensor_parallel_size is 2; it runs on a CPU, and device is 'cuda'"
    )


@pytest.mark.parametrize(
    ("package_name", "backend"),
    [("onnxruntime", "onnxruntime"), ("onnx", "onnxruntime"), ("onnx", "tensorrt")],
)
def test_a_missing_package_is_refused_with_what_installs_it(
    package_name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package_name, None)
    with pytest.raises(ValueError) as refusal:
        harness(draft_backend=backend)
    missing = f"the package {package_name} is missing; pip install tllm_spec[{backend}]"
    assert missing in str(refusal.value)


def test_a_device_without_a_target_is_refused_with_package_version_and_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, package("tensorrt_rtx", "1.7.1.116", targets=True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    with pytest.raises(ValueError) as refusal:
        find_tensorrt(torch.device("cuda"))
    assert str(refusal.value) == (
        "tensorrt cannot be imported (No module named 'tensorrt'), and tensorrt_rtx 1.7.1.116 has "
        "no target for compute capability 9.0 (it has 7.5, 8.9, 12.0); "
        "pip install tllm_spec[tensorrt]"
    )


def test_the_first_package_that_serves_the_device_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rtx = package("tensorrt_rtx", "1.7.1.116", targets=True)
    install(monkeypatch, package("tensorrt", "10.13.2.6"), rtx)
    assert package_for((9, 0), "H100").name == "tensorrt 10.13.2.6"
    assert package_for((9, 0), "H100").target is None
    install(monkeypatch, package("tensorrt", "8.6.1"), rtx)
    assert package_for((12, 0), "RTX 5090").target == TARGETS["SM120"]
    with pytest.raises(ValueError, match=r"tensorrt 8\.6\.1 is older than 10\.13, and"):
        package_for((9, 0), "H100")


def test_an_engine_whose_scratch_memory_does_not_fit_is_refused_by_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_large(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError

    engines_of(monkeypatch, too_large)
    with pytest.raises(ValueError, match="max_batch_size = 8 times max_seq_len = 256; lower one"):
        harness(draft_backend="tensorrt")


def test_drafts_are_made_without_graphs_where_the_engine_allows_none() -> None:
    drafter = harness().parts.drafter
    assert isinstance(drafter, ModelDrafter)
    key = GraphKey(1, chain_of(3), False)
    drafter.capture_graphs(SlotGraphs(lambda *_: None, 1, torch.device("cpu")), [key])
    assert drafter.graphs is not None and key not in drafter.graphs


def test_only_the_network_of_a_backend_imports_its_library() -> None:
    found = {
        module for module, path in PACKAGE_FILES.items() if imported_packages(path) & set(LIBRARIES)
    }
    assert found == {"tllm_spec.draft_network.network"}


@pytest.mark.slow  # the test above says who could
def test_a_draft_model_in_torch_loads_none_of_the_libraries() -> None:
    code = (
        "import sys\n"
        "from tests.draft_network.test_draft_backend import LIBRARIES, harness\n"
        "harness(draft_backend='torch')\n"
        "print([name for name in LIBRARIES if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
