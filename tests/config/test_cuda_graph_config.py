"""Which batch sizes `CudaGraphConfig` captures."""

from pathlib import Path

import pytest

from tllm_spec.config.llm_args import CudaGraphConfig, LlmArgs

STEPS_OF_8 = tuple(range(8, 129, 8))


@pytest.mark.parametrize(
    ("options", "limit", "sizes"),
    [
        ({}, 1, (1,)),
        ({}, 3, (1, 2, 3)),
        ({}, 20, (1, 2, 4, 8, 16, 20)),
        ({}, 2048, (1, 2, 4, *STEPS_OF_8)),
        ({"max_batch_size": 0}, 2048, (1, 2, 4, *STEPS_OF_8)),
        ({"max_batch_size": 7}, 2048, (1, 2, 4, 7)),
        ({"max_batch_size": 256}, 2048, (1, 2, 4, *STEPS_OF_8, 192, 256)),
        ({"max_batch_size": 300}, 2048, (1, 2, 4, *STEPS_OF_8, 192, 256, 300)),
        ({"max_batch_size": 300}, 200, (1, 2, 4, *STEPS_OF_8, 192, 200)),
        ({"enable_padding": False}, 2048, (*range(1, 32), 32, 64, 128)),
        ({"enable_padding": False}, 20, tuple(range(1, 21))),
        (
            {"enable_padding": False, "max_batch_size": 600},
            999,
            (*range(1, 33), 64, 128, 256, 512, 600),
        ),
        (
            {"enable_padding": False, "max_batch_size": 512},
            2048,
            (*range(1, 32), 32, 64, 128, 256, 512),
        ),
        ({"batch_sizes": [9, 3, 9]}, 2048, (3, 9)),
        ({"batch_sizes": [3, 9], "max_batch_size": 9}, 2048, (3, 9)),
        ({"batch_sizes": [3, 9, 30, 40]}, 20, (3, 9, 20)),
        ({"batch_sizes": [30]}, 20, (20,)),
    ],
)
def test_captured_batch_sizes_ascend_to_the_largest_that_can_occur(
    options: dict[str, object], limit: int, sizes: tuple[int, ...]
) -> None:
    assert CudaGraphConfig(**options).sizes(limit) == sizes


def test_further_batch_sizes_are_captured_up_to_the_largest() -> None:
    schedule = {1: 3, 6: 2, 8: 1, 21: 0}
    assert CudaGraphConfig().sizes(20, also=schedule) == (1, 2, 4, 6, 8, 16, 20)
    assert CudaGraphConfig(batch_sizes=[4]).sizes(20, also=schedule) == (1, 4)


def test_cuda_graphs_with_padding_are_on_unless_null_turns_them_off(tmp_path: Path) -> None:
    yaml_file = tmp_path / "options.yaml"
    assert LlmArgs.from_kwargs("m").cuda_graph_config == CudaGraphConfig(enable_padding=True)
    yaml_file.write_text("cuda_graph_config: null\n")
    assert LlmArgs.from_yaml(yaml_file, model="m").cuda_graph_config is None
    yaml_file.write_text(
        "cuda_graph_config: {enable_padding: false, batch_sizes: [2, 1], mode: decode}\n"
    )
    expected = CudaGraphConfig(enable_padding=False, batch_sizes=(1, 2))
    assert LlmArgs.from_yaml(yaml_file, model="m").cuda_graph_config == expected
