"""How much of everything `h200.py` measures. Measures nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from benchmarks.h200_parts.figures import Figure
from benchmarks.harness.models import Models

Report = Callable[[Figure], None]


@dataclass(frozen=True)
class Scale:
    """Lengths are tokens. `large_batch`: plain decoding only, with prompts of `large_prompt_len`.

    `room`: tokens that a request may generate while its rounds are timed; three times as many with
    drafts. `serving_loads`: requests at a time, and in all."""

    prompt_len: int = 1024
    output_len: int = 256
    batch_sizes: tuple[int, ...] = (1, 8, 64)
    large_batch: int = 256
    large_prompt_len: int = 512
    draft_len: int = 3
    other_draft_lens: tuple[int, ...] = (1, 5, 7)
    rounds: int = 40  # of each of three timings, of which the median counts
    long_prompt_len: int = 8192
    repeats: int = 3
    single_repeats: int = 8  # requests at batch 1, because one request's acceptance says little
    serving_input_len: int = 512
    serving_output_len: int = 256
    serving_loads: tuple[tuple[int, int], ...] = ((1, 2), (8, 16), (64, 128), (256, 256))
    room: int = 512

    @property
    def serving_batch(self) -> int:
        return max(at_a_time for at_a_time, _ in self.serving_loads)


SCALES: Mapping[str, Scale] = {
    "llama-8b": Scale(),
    "zoo": Scale(
        prompt_len=48, output_len=8, batch_sizes=(1, 2), large_batch=3, large_prompt_len=16,
        other_draft_lens=(1,), rounds=3, long_prompt_len=96, repeats=2, single_repeats=1,
        serving_input_len=16, serving_output_len=6, serving_loads=((1, 1), (2, 3), (3, 3)),
        room=320,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """One run. `points`: those of `figures.POINTS` that are asked for."""

    models: Models
    quick: bool
    points: frozenset[int]

    @property
    def scale(self) -> Scale:
        scale = SCALES[self.models.shape]
        if not self.quick:
            return scale
        loads = tuple((n, max(n, total // 2)) for n, total in scale.serving_loads)
        return replace(scale, rounds=min(15, scale.rounds), repeats=2, serving_loads=loads)
