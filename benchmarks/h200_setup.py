"""On what, and how much of it, `h200.py` measures: models, sizes, repeats. Knows no measurement."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from h200_figures import Figure
from model_shapes import RATES

Report = Callable[[Figure], None]

NO_REUSE: Mapping[str, Any] = {"enable_block_reuse": False}
ZOO_KV_TOKENS = 4096


@dataclass(frozen=True)
class Scale:
    """Lengths are tokens. `large_batch` is plain decoding only, with `large_prompt_len` in."""

    prompt_len: int = 1024
    output_len: int = 256
    batch_sizes: tuple[int, ...] = (1, 8, 64)
    large_batch: int = 256
    large_prompt_len: int = 512
    draft_len: int = 3
    other_draft_lens: tuple[int, ...] = (1, 5, 7)
    rounds: int = 40  # in each of three timings, of which the median counts
    traced_rounds: int = 40
    long_prompt_len: int = 8192
    repeats: int = 3
    single_repeats: int = 8  # one request's acceptance varies: so many requests one after the other
    serving_input_len: int = 512
    serving_output_len: int = 256
    serving_loads: tuple[tuple[int, int], ...] = (
        (1, 2),
        (8, 16),
        (64, 128),
        (256, 256),
    )  # at a time, in all
    room: int = 512  # for what requests generate while their rounds are timed; three times as much with drafts

    @property
    def serving_batch(self) -> int:
        return max(concurrency for concurrency, _ in self.serving_loads)


SCALES: Mapping[str, Scale] = {
    "llama-8b": Scale(),
    "zoo": Scale(
        prompt_len=48,
        output_len=8,
        batch_sizes=(1, 2),
        large_batch=3,
        large_prompt_len=16,
        other_draft_lens=(1,),
        rounds=3,
        traced_rounds=3,
        long_prompt_len=96,
        repeats=2,
        single_repeats=1,
        serving_input_len=16,
        serving_output_len=6,
        serving_loads=((1, 1), (2, 3), (3, 3)),
        room=320,
    ),
}


@dataclass(frozen=True)
class Setup:
    """One run. `folder` has the 8B shape's configurations; `points` are those that are asked
    for."""

    shape: str
    device: str
    quick: bool
    points: frozenset[int]
    folder: Path

    @property
    def scale(self) -> Scale:
        scale = SCALES[self.shape]
        if not self.quick:
            return scale
        loads = tuple(
            (at_a_time, max(at_a_time, total // 2)) for at_a_time, total in scale.serving_loads
        )
        return replace(
            scale,
            rounds=min(15, scale.rounds),
            traced_rounds=min(15, scale.traced_rounds),
            repeats=2,
            serving_loads=loads,
        )

    @property
    def is_8b(self) -> bool:
        return self.shape == "llama-8b"

    @property
    def target(self) -> str:
        return str(self.folder / "target") if self.is_8b else "zoo:llama"

    @property
    def options(self) -> dict[str, Any]:
        """Of `LlmArgs`, for every engine: no prompt is cached."""
        if self.is_8b:
            return {
                "device": self.device,
                "kv_cache_config": dict(NO_REUSE),
                "load_format": "dummy",
            }
        return {"device": self.device, "kv_cache_config": {**NO_REUSE, "max_tokens": ZOO_KV_TOKENS}}

    def eagle3(self, draft_len: int, **options: Any) -> dict[str, Any]:
        return self._drafting("Eagle3", "eagle3", "zoo:llama-eagle3", draft_len) | options

    def draft_target(self, draft_len: int, **options: Any) -> dict[str, Any]:
        return self._drafting("Draft_Target", "draft", "zoo:llama-draft", draft_len) | options

    def _drafting(self, kind: str, name: str, of_zoo: str, draft_len: int) -> dict[str, Any]:
        own = {"load_format": "dummy"} if self.is_8b else {}
        return {
            "decoding_type": kind,
            "speculative_model": str(self.folder / name) if self.is_8b else of_zoo,
            "max_draft_len": draft_len,
            "synthetic_acceptance_rates": RATES[:draft_len],
            **own,
        }
