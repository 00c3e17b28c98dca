"""A world whose draft weights are swapped while requests run, and then its target's, for tests.

    python -m tests.distributed.swapping_world OTHER_HEAD NARROW_HEAD OTHER_TARGET BROKEN_TARGET

It prints the texts before, during and after the swap, how many tokens their rounds had, and the
texts of the other target."""

from __future__ import annotations

import json
import sys
from typing import Any

from tllm_spec.llm import LLM

HEAD = "zoo:llama-eagle3"
PROMPTS = [list(range(first, first + 20)) for first in (300, 500, 700)]
PARAMS = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.5, "seed": 7}


def make_llm(head: str, num_ranks: int, target: str = "zoo:llama") -> LLM:
    spec = {"decoding_type": "Eagle3", "speculative_model": head, "max_draft_len": 3}
    options = {"skip_tokenizer_init": True, "device": "cpu", "max_batch_size": 4}
    return LLM(target, speculative_config=spec, tensor_parallel_size=num_ranks, **options)


def outputs(llm: LLM) -> tuple[list[list[int]], list[Any]]:
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    stats = [each.speculative_decoding for each in found]
    return [each.outputs[0].token_ids for each in found], [
        (each.rounds, each.per_position_accepted) for each in stats if each is not None
    ]


def main() -> None:
    other, narrow, target, broken = sys.argv[1:]
    llm = make_llm(HEAD, 2)
    texts, counts = outputs(llm)
    try:
        llm.load_draft_weights(narrow)
    except ValueError as error:
        print("refused", error, flush=True)
    streams = [llm.generate_async(prompt, PARAMS, streaming=True) for prompt in PROMPTS]
    for stream in streams:
        next(stream)
    version = llm.load_draft_weights(other)["version"]
    during = [stream.result().outputs[0].token_ids for stream in streams]
    after = outputs(llm)
    llm.check_integrity()
    print("texts", texts == during == after[0], "version", version, flush=True)
    print("counts", json.dumps([counts, after[1]]), flush=True)
    try:
        llm.update_weights(broken)
    except ValueError as error:
        print("refused", error, flush=True)
    llm.pause("retract")
    told = llm.update_weights(target, "b")
    llm.resume()
    texts = outputs(llm)[0]
    llm.sleep()
    llm.wake_up(["kv_cache"])
    llm.wake_up()
    assert outputs(llm)[0] == texts
    print("updated", json.dumps([told["version"], texts]), flush=True)
    llm.check_integrity()
    llm.shutdown()


if __name__ == "__main__":
    main()
