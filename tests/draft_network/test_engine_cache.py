"""TensorRT engines are kept on disk by a hash of all that they are built of."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.draft_network.network_interpreter import PACKAGE, trt
from tests.draft_network.test_tensorrt import LIMITS, zoo_model
from tllm_spec.draft_network import tensorrt_build
from tllm_spec.draft_network.tensorrt_build import EngineLimits, engine_file, load_or_build
from tllm_spec.models.llama import CausalLM


class Runtime:
    """Loads what `build` returned, but no other bytes."""

    def __init__(self, logger: Any) -> None: ...

    def deserialize_cuda_engine(self, serialised: bytes) -> object | None:
        return "engine" if bytes(serialised) == b"built" else None


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[EngineLimits]:
    """What was built; engines are kept in a folder of the test."""
    made: list[EngineLimits] = []

    def stand_in(package: Any, model: CausalLM, limits: EngineLimits) -> bytes:
        made.append(limits)
        return b"built"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trt, "Runtime", Runtime)
    monkeypatch.setattr(tensorrt_build, "build", stand_in)
    return made


def test_an_engine_is_built_once_and_then_read_from_the_cache(
    builds: list[EngineLimits], caplog: pytest.LogCaptureFixture
) -> None:
    """A start says what it does before it takes minutes."""
    caplog.set_level(logging.INFO, tensorrt_build.__name__)
    for _ in range(2):
        assert load_or_build(PACKAGE, zoo_model(), LIMITS)[1] == "engine"
    assert builds == [LIMITS]
    building, took, read = caplog.messages
    assert building == f"{PACKAGE.name}: building the draft model's engine; this may take minutes"
    assert re.fullmatch(r"the engine took \d+\.\d s", took)
    path = engine_file(PACKAGE, zoo_model(), LIMITS)
    assert read == f"{PACKAGE.name}: the draft model's engine was read from {path}"


def test_a_kept_engine_that_does_not_load_is_built_again(builds: list[EngineLimits]) -> None:
    path = engine_file(PACKAGE, zoo_model(), LIMITS)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"broken")
    assert load_or_build(PACKAGE, zoo_model(), LIMITS)[1] == "engine"
    assert builds == [LIMITS] and path.read_bytes() == b"built"


def test_a_kept_engine_that_cannot_be_read_is_built_again(
    builds: list[EngineLimits], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.suffix == ".engine":
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    load_or_build(PACKAGE, zoo_model(), LIMITS)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert load_or_build(PACKAGE, zoo_model(), LIMITS)[1] == "engine"
    assert builds == [LIMITS] * 2


def test_whatever_an_engine_is_built_of_makes_another_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights, types, limits, configuration, device, the package's version, and the definition."""
    model = zoo_model()
    changed, rescaled = zoo_model(), zoo_model()
    changed.model.norm.weight[3] += 1
    rescaled.config = replace(model.config, rms_norm_eps=2 * model.config.rms_norm_eps)
    other_target = replace(PACKAGE, target=trt.ComputeCapability.SM120)
    newer = SimpleNamespace(__name__="tensorrt_rtx", __version__="99.0")
    files = [
        engine_file(PACKAGE, model, LIMITS),
        engine_file(PACKAGE, changed, LIMITS),
        engine_file(PACKAGE, zoo_model(torch.bfloat16), LIMITS),
        engine_file(PACKAGE, model, replace(LIMITS, max_batch_size=21)),
        engine_file(other_target, model, LIMITS),
        engine_file(PACKAGE, rescaled, LIMITS),
        engine_file(replace(PACKAGE, trt=newer), model, LIMITS),
        engine_file(replace(PACKAGE, target=None, device_name="H100"), model, LIMITS),
        engine_file(replace(PACKAGE, target=None, device_name="H200"), model, LIMITS),
    ]
    read_bytes = Path.read_bytes
    for source in ("decoder.py", "head_decoder.py", "tensorrt_emitter.py", "tensorrt_build.py"):
        with monkeypatch.context() as patched:
            patched.setattr(
                Path,
                "read_bytes",
                lambda path, name=source: read_bytes(path) + b"#" * (path.name == name),
            )
            files.append(engine_file(PACKAGE, model, LIMITS))
    assert len(set(files)) == len(files) and files[0] == engine_file(PACKAGE, zoo_model(), LIMITS)
