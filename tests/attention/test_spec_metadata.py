"""The hidden states that forwards of changing sizes leave for a draft head."""

import pytest
import torch

from tllm_spec.attention.interface import SpecMetadata, default_capture_layers

LAYERS, SIZE = (1, 4, 2), 6


def states(layer: int, num_rows: int) -> torch.Tensor:
    """Different numbers for every layer and row."""
    return torch.arange(num_rows * SIZE, dtype=torch.float32).view(num_rows, SIZE) + 1000.0 * layer


def forward(spec: SpecMetadata, num_rows: int) -> None:
    for layer in range(6):
        spec.maybe_capture_hidden_states(layer, states(layer, num_rows))


def test_captured_layers_are_concatenated_in_the_given_order() -> None:
    spec = SpecMetadata(LAYERS, SIZE, 8, torch.float32, torch.device("cpu"))
    for num_rows in (5, 1, 1, 8, 3):
        forward(spec, num_rows)
        assert torch.equal(
            spec.captured(num_rows), torch.cat([states(i, num_rows) for i in LAYERS], 1)
        )


def test_rows_after_those_of_a_forward_keep_their_values() -> None:
    spec = SpecMetadata(LAYERS, SIZE, 8, torch.float32, torch.device("cpu"))
    forward(spec, 8)
    before = spec.captured(8).clone()
    forward(spec, 2)
    assert torch.equal(spec.captured(8)[2:], before[2:])


def test_a_later_change_of_an_output_does_not_change_what_was_captured() -> None:
    spec = SpecMetadata((0,), SIZE, 8, torch.float32, torch.device("cpu"))
    hidden = states(0, 4)
    spec.maybe_capture_hidden_states(0, hidden)
    hidden += 1
    assert torch.equal(spec.captured(4), states(0, 4))


def test_a_model_with_too_few_layers_for_the_default_is_refused_with_the_option() -> None:
    assert default_capture_layers(32) == (1, 15, 28)
    with pytest.raises(ValueError, match="set eagle3_layers_to_capture"):
        default_capture_layers(6)
