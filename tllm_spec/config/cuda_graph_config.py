"""For which batch sizes a decoding round is captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, ClassVar

from pydantic import NonNegativeInt, PositiveInt, Strict, field_validator

from tllm_spec.config.config_base import ConfigModel, check
from tllm_spec.config.neighbours import CUDA_GRAPH_IGNORED, CUDA_GRAPH_RENAMED, Ignored, Renamed

DEFAULT_LARGEST_GRAPH = 128  # requests, as in TensorRT-LLM


class CudaGraphConfig(ConfigModel):
    """Batch sizes for which a decoding round is captured as a CUDA graph. No effect on a CPU."""

    batch_sizes: Annotated[tuple[PositiveInt, ...], Strict(False)] | None = None
    """Batch sizes to capture. null: 1, 2, 4, then steps of 8 up to 128 and of 64 above; without
    padding 1 to 32 and powers of two."""
    max_batch_size: NonNegativeInt | None = None
    """Largest batch size to capture if `batch_sizes` is null. null or 0 is 128."""
    enable_padding: bool = True
    """A batch between two captured sizes runs as the next larger one. False, TensorRT-LLM's
    default, runs it without a graph."""

    ignored: ClassVar[Ignored] = CUDA_GRAPH_IGNORED
    renamed: ClassVar[Mapping[str, Renamed]] = CUDA_GRAPH_RENAMED

    @field_validator("batch_sizes")
    @classmethod
    def _sort_sizes(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if sizes is not None and not sizes:
            raise ValueError(
                "it has no entry; null means the default sizes, cuda_graph_config: null no graphs"
            )
        return None if sizes is None else tuple(sorted(set(sizes)))

    @check
    def _check_largest(self) -> Iterator[str]:
        if self.batch_sizes and self.max_batch_size and self.max_batch_size != self.batch_sizes[-1]:
            yield (
                f"max_batch_size = {self.max_batch_size} contradicts batch_sizes = "
                f"{self.batch_sizes}; leave it out, or give the largest of them, "
                f"{self.batch_sizes[-1]}"
            )

    def sizes(self, limit: int, also: Iterable[int] = ()) -> tuple[int, ...]:
        """The batch sizes to capture, ascending.

        limit: the most requests that a round can have; a larger size is captured as this one.
        also: further sizes, such as the keys of `draft_len_schedule`; those above the largest are
        left out."""
        assert limit > 0
        largest = self.max_batch_size or DEFAULT_LARGEST_GRAPH
        wanted = self.batch_sizes or _default_sizes(largest, self.enable_padding)
        sizes = {min(size, limit) for size in wanted}
        return tuple(sorted(sizes | {size for size in also if 0 < size < max(sizes)}))


def _default_sizes(largest: int, enable_padding: bool) -> list[int]:
    """TensorRT-LLM's batch sizes up to `largest`, which is always one of them. Without padding a
    size that is not listed has no graph, so all small sizes are listed."""
    if enable_padding:
        sizes = [1, 2, 4, *range(8, 129, 8), *range(192, largest, 64)]
    else:
        sizes = [*range(1, 32), *(2**power for power in range(5, largest.bit_length()))]
    return [*(size for size in sizes if size < largest), largest]
