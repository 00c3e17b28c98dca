"""Which layers are tuned, and that the next start does not measure again."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import pytest
import torch
from torch import nn

from tests.models.helpers import CPU
from tllm_spec.distributed.communicator import SINGLE_RANK, Communicator, Mapping
from tllm_spec.kernels.gemm.tuned_linear import GemmGroup, LinearTable, TunedGemms, key_of
from tllm_spec.models import linear as linear_tuning
from tllm_spec.models.formats import weight_format as plain_weights
from tllm_spec.models.formats.weight_format import CudaWeight
from tllm_spec.models.layers import Placement
from tllm_spec.models.linear import ColumnLinear, Linear, RowLinear, tune_linears

CUDA, BFLOAT16 = torch.device("cuda"), torch.bfloat16
AnyLinear = TypeVar("AnyLinear", bound=Linear)
ALGORITHM = bytes(64)


def layer(in_features: int, out_features: int, **placed: Any) -> ColumnLinear:
    placement = Placement(placed.pop("dtype", BFLOAT16), CPU, SINGLE_RANK, **placed)
    made = ColumnLinear(in_features, {"part": out_features}, bias=False, placement=placement)
    return made if placement.batch_invariant else as_on_cuda(made)


def sum_layer(in_features: int, out_features: int) -> RowLinear:
    placement = Placement(BFLOAT16, CPU, SINGLE_RANK)
    return as_on_cuda(RowLinear(in_features, out_features, bias=False, placement=placement))


def as_on_cuda(layer: AnyLinear) -> AnyLinear:
    layer.use(CudaWeight(layer.weight, layer.bias))
    return layer


class FakeLt:
    version = 130100

    def __init__(self, library: object, device: torch.device) -> None:
        assert (library, device) == ("library", CUDA)


class Tuned(list[tuple[list[GemmGroup], list[int]]]):
    """Groups and numbers of rows of each call; replaces `tune_missing`."""

    def __call__(
        self, table: LinearTable, lt: FakeLt, groups: list[GemmGroup], rows: Iterable[int]
    ) -> int:
        self.append((groups, list(rows)))
        missing = [
            key
            for group in groups
            for count in rows
            if (key := key_of(group.sizes(count))) not in table
        ]
        for key in missing:
            table[key] = ALGORITHM
        return len(missing)


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    tuned = Tuned()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(linear_tuning, "shared_library", lambda: "library")
    monkeypatch.setattr(linear_tuning, "CublasLt", FakeLt)
    monkeypatch.setattr(linear_tuning, "tune_missing", tuned)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    return tuned


def test_layers_of_all_models_are_grouped_by_shape_and_share_one_table(tuned: Tuned) -> None:
    model = nn.Sequential(layer(1024, 2048), layer(1024, 2048), layer(2048, 1024))
    head = nn.Sequential(layer(2048, 1024), sum_layer(2048, 1024))
    tune_linears([model, head], [32], CUDA)
    ((groups, rows),) = tuned
    assert rows == [32]
    found = [(tuple(each.weights[0].shape), len(each.weights), each.adds) for each in groups]
    assert found == [((2048, 1024), 2, False), ((1024, 2048), 2, False), ((1024, 2048), 1, True)]
    (table,) = {id(layer.weight_format.tuned_gemms) for part in (model, head) for layer in part}
    assert table is not None and isinstance(head[0].weight_format.tuned_gemms, TunedGemms)


def test_the_second_start_does_not_measure_and_a_new_size_is_added(
    tuned: Tuned, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(*rows: int) -> LinearTable:
        caplog.clear()
        model = nn.Sequential(layer(1024, 2048))
        with caplog.at_level(logging.INFO):
            tune_linears([model], rows, CUDA)
        assert isinstance(model[0].weight_format.tuned_gemms, TunedGemms)
        return model[0].weight_format.tuned_gemms.table

    first = start(32, 64)
    assert "tuned 2 GEMMs" in caplog.text
    (file,) = (tmp_path / "tllm_spec").iterdir()
    assert "a_device-cublasLt130100" in file.name
    assert start(32, 64) == first and not caplog.records
    assert len(start(32, 128)) == 3 and "tuned 1 GEMMs" in caplog.text
    file.write_text("{")
    assert len(start(32)) == 1 and "measured again" in caplog.text
    assert start(32) and not caplog.records


class Second(Communicator):
    """Rank 1, to which rank 0 sends its choices."""

    mapping = Mapping(1, 2, 2)

    def __init__(self, choices: dict[str, bytes]) -> None:
        self._choices = choices

    def broadcast(self, message: bytes) -> bytes:
        assert message == b""
        return msgpack.packb(self._choices)


def test_another_rank_measures_nothing_and_takes_rank_0s_choices(tuned: Tuned) -> None:
    model, choices = nn.Sequential(layer(1024, 2048)), {"of rank 0": ALGORITHM}
    tune_linears([layer(1024, 2048)], [32], CUDA)  # leaves this machine's own choices
    tuned.clear()
    tune_linears([model], [32], CUDA, Second(choices))
    assert not tuned and isinstance(model[0].weight_format.tuned_gemms, TunedGemms)
    assert model[0].weight_format.tuned_gemms.table == choices


def test_small_float32_and_batch_invariant_layers_are_not_tuned(tuned: Tuned) -> None:
    small, exact = layer(64, 64), layer(1024, 2048, batch_invariant=True)
    single = layer(1024, 2048, dtype=torch.float32)
    tune_linears([nn.Sequential(small, exact, single)], [32], CUDA)
    assert not tuned
    assert all(found.weight_format.tuned_gemms is None for found in (small, single))


def test_nothing_is_tuned_on_a_cpu_or_without_cublaslt(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(layer(1024, 2048))
    tune_linears([model], [32], CPU)
    monkeypatch.setattr(linear_tuning, "shared_library", lambda: None)
    with caplog.at_level(logging.INFO):
        tune_linears([model], [32], CUDA)
    assert not tuned and "libcublasLt was not found" in caplog.text
    assert isinstance(model[0], Linear) and model[0].weight_format.tuned_gemms is None


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_tuned_layer_uses_tuned_linear_for_every_form(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TunedGemms] = []

    def spy(x: torch.Tensor, weight: torch.Tensor, tuned: TunedGemms, **forms: Any) -> torch.Tensor:
        asked.append(tuned)
        output = torch.nn.functional.linear(x, weight, forms["bias"])
        return output if forms.get("add_to") is None else forms["add_to"].add_(output)

    monkeypatch.setattr(plain_weights, "tuned_linear", spy)
    placement = Placement(torch.float32, CPU, SINGLE_RANK)
    found = as_on_cuda(RowLinear(64, 48, bias=bias, placement=placement))
    for parameter in found.parameters():
        parameter.normal_()
    x, total = torch.randn(9, 64), torch.randn(9, 48)
    plain, expected = found.forward(x), total.clone()
    found.add_to(expected, x)
    assert not asked
    no_library: Any = None
    found.weight_format.tuned_gemms = TunedGemms(no_library, LinearTable())
    torch.testing.assert_close(found.forward(x), plain)
    found.add_to(total, x)
    torch.testing.assert_close(total, expected)
    assert asked == [found.weight_format.tuned_gemms] * 2
