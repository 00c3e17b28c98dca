"""Which functions of the product one request runs through: counted by a profiler."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tllm_spec import LLM, SamplingParams
from tllm_spec.executor.py_executor import PyExecutor
from tllm_spec.models.llama import CausalLM

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tllm_spec", "executor", "kernels")
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
EAGLE3 = {"decoding_type": "Eagle3", "speculative_model": "zoo:llama-eagle3", "max_draft_len": 3}
# Ways of decoding, by name.
WALKS: Mapping[str, Mapping[str, Any] | None] = {
    "plain": None,
    "EAGLE-3": EAGLE3,
    "EAGLE-3 tree + SA": EAGLE3
    | {
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "max_total_draft_tokens": 8,
        "sa_config": {},
    },
}
Place = tuple[str, str, int]  # a function: its file, its name, its first line


@dataclass
class Walk:
    """`functions` of the product that ran, without comprehensions and module bodies. `to_forward`:
    the stack from `PyExecutor.step` to the target's forward in a round of windows."""

    functions: set[Place] = field(default_factory=set)
    to_forward: list[Place] = field(default_factory=list)

    @property
    def files(self) -> set[str]:
        return {file for file, _, _ in self.functions}


class Watch:
    """A profiler that fills `walk`. The checks of an idle loop do not count."""

    def __init__(self) -> None:
        self.walk = Walk()
        self._is_checking = False
        self._seen: dict[CodeType, Place | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code is PyExecutor.check_integrity.__code__:
            self._is_checking = event == "call"
        if event != "call" or self._is_checking:
            return
        place = self._place(frame.f_code)
        if place is not None:
            self.walk.functions.add(place)
        if frame.f_code is CausalLM.forward.__code__:
            self.walk.to_forward = self._stack(frame)

    def _place(self, code: CodeType) -> Place | None:
        """None: no function of the product."""
        if code not in self._seen:
            path = Path(code.co_filename).resolve()
            is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS
            is_function = not code.co_name.startswith("<")
            found = (path.relative_to(ROOT).as_posix() if is_ours else "", code.co_name)
            self._seen[code] = (*found, code.co_firstlineno) if is_ours and is_function else None
        return self._seen[code]

    def _stack(self, frame: FrameType | None) -> list[Place]:
        places: list[Place] = []
        while frame is not None:
            if (place := self._place(frame.f_code)) is not None:
                places.append(place)
            if frame.f_code is PyExecutor.step.__wrapped__.__code__:
                break
            frame = frame.f_back
        return places[::-1]


def walk(speculative: Mapping[str, Any] | None) -> Walk:
    """One `LLM.generate` of 24 tokens, in the caller's thread and the executor's."""
    config, watch = None if speculative is None else dict(speculative), Watch()
    with LLM("zoo:llama", device="cpu", speculative_config=config) as llm:
        llm._worker.call(lambda: sys.setprofile(watch))
        sys.setprofile(watch)
        try:
            llm.generate(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True))
        finally:
            sys.setprofile(None)
            llm._worker.call(lambda: sys.setprofile(None))
    return watch.walk
