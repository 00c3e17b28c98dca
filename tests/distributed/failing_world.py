"""A world whose rounds fail, for tests: `all` ranks raise for one request, `one` rank raises, or
none does.

    python -m tests.distributed.failing_world MODEL_FOLDER (all | one | none | ends) [DEVICE RANKS]

It prints the requests' errors. For `none` it prints the process ids of its ranks, and has running
requests until one fails. For `ends` nothing fails until it shuts down."""

from __future__ import annotations

import sys
from typing import Any

from tests.distributed.cases import TOKEN_PROMPTS
from tllm_spec.distributed.mpirun import mpirun_rank
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.llm import LLM

PARAMS = {"max_tokens": 8, "ignore_eos": True}
LASTING = {"max_tokens": 10**6, "ignore_eos": True}
PENALISED = PARAMS | {"presence_penalty": 1.0}


def break_penalised(ranks: tuple[int, ...]) -> None:
    start = Sampler.start

    def broken(self: Sampler, request: Any) -> None:
        if request.rules.presence and mpirun_rank() in ranks:
            raise MemoryError("no room for counts")
        start(self, request)

    Sampler.start = broken  # type: ignore[method-assign] # this process is for nothing else


def main() -> None:
    folder, kind, device, ranks = (*sys.argv[1:], "cpu", "2")[:4]
    break_penalised({"all": (0, 1), "one": (1,), "none": (), "ends": ()}[kind])
    llm = LLM(folder, skip_tokenizer_init=True, device=device, tensor_parallel_size=int(ranks))
    if kind == "none":
        found = llm.server_info()["internal_states"][0]["ranks"]
        print("processes", *(rank["process"] for rank in found), flush=True)
        while (error := llm.generate_async(TOKEN_PROMPTS[0], LASTING).result().error) is None:
            pass
        print(f"error {error}", flush=True)  # at once: others print, too
    failed = llm.generate_async(TOKEN_PROMPTS[0], PENALISED)
    print(f"error {failed.result().error}", flush=True)
    others = [llm.generate(prompt, PARAMS).outputs[0] for prompt in TOKEN_PROMPTS]
    print("others", [len(each.token_ids) for each in others], flush=True)
    llm.check_integrity()
    llm.shutdown()


if __name__ == "__main__":
    main()
