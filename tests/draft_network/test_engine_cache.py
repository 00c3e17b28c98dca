"""TensorRT engines are kept on disk by a hash of all that they are built of."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.draft_network.test_tensorrt import LIMITS, PACKAGE, trt, zoo_model
from tllm_spec.draft_network import tensorrt
from tllm_spec.draft_network.network import NetworkModel, StepNetwork
from tllm_spec.draft_network.tensorrt import (
    EngineLimits,
    TensorRTPackage,
    engine_file,
    load_or_build,
)


class Runtime:
    """Loads what `build` returned, but no other bytes."""

    def __init__(self, logger: Any) -> None: ...

    def deserialize_cuda_engine(self, serialised: bytes) -> object | None:
        return "engine" if bytes(serialised) == b"built" else None


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[EngineLimits]:
    """What was built; engines are kept in a folder of the test."""
    made: list[EngineLimits] = []

    def stand_in(package: Any, network: StepNetwork, limits: EngineLimits) -> bytes:
        made.append(limits)
        return b"built"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trt, "Runtime", Runtime)
    monkeypatch.setattr(tensorrt, "build", stand_in)
    return made


def test_an_engine_is_built_once_and_then_read_from_the_cache(
    builds: list[EngineLimits], caplog: pytest.LogCaptureFixture
) -> None:
    """A start says what it does before it takes minutes."""
    caplog.set_level(logging.INFO, tensorrt.__name__)
    for _ in range(2):
        assert load_or_build(PACKAGE, zoo_model(), LIMITS)[1] == "engine"
    assert builds == [LIMITS]
    building, took, read = caplog.messages
    assert building == f"{PACKAGE.name}: building the draft model's engine; this may take minutes"
    assert re.fullmatch(r"the engine took \d+\.\d s", took)
    path = engine_file(PACKAGE, StepNetwork.of(zoo_model()), LIMITS)
    assert read == f"{PACKAGE.name}: the draft model's engine was read from {path}"


def test_a_kept_engine_that_does_not_load_is_built_again(builds: list[EngineLimits]) -> None:
    path = engine_file(PACKAGE, StepNetwork.of(zoo_model()), LIMITS)
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
    """Weights, types, limits, configuration, device, the package's version, and the code."""

    def file_of(
        package: TensorRTPackage = PACKAGE,
        model: NetworkModel | None = None,
        limits: EngineLimits = LIMITS,
    ) -> Path:
        return engine_file(package, StepNetwork.of(model or zoo_model()), limits)

    changed, rescaled = zoo_model(), zoo_model()
    changed.model.norm.weight[3] += 1
    rescaled.config = replace(rescaled.config, rms_norm_eps=2 * rescaled.config.rms_norm_eps)
    newer = SimpleNamespace(__name__="tensorrt_rtx", __version__="99.0")
    files = [
        file_of(),
        file_of(model=changed),
        file_of(model=zoo_model(torch.bfloat16)),
        file_of(limits=replace(LIMITS, max_batch_size=21)),
        file_of(replace(PACKAGE, target=trt.ComputeCapability.SM120)),
        file_of(model=rescaled),
        file_of(replace(PACKAGE, trt=newer)),
        file_of(replace(PACKAGE, target=None, device_name="H100")),
        file_of(replace(PACKAGE, target=None, device_name="H200")),
    ]
    assert file_of() == files[0]
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path) + b"#")
    files.append(file_of())
    assert len(set(files)) == len(files)
