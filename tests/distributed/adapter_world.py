"""A world that serves LoRA adapters, loads and replaces them while requests run, for tests.

    python -m tests.distributed.adapter_world NUM_RANKS MODEL ADAPTERS OTHER_ADAPTERS BROKEN

It prints the texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.adapters.tiny_adapters import LORA, NAMES
from tllm_spec.llm import LLM
from tllm_spec.lora_request import LoRARequest

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PARAMS = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.5, "seed": 7}


def texts(llm: LLM, requests: list[LoRARequest | None]) -> list[list[int]]:
    found = llm.generate([PROMPT] * len(requests), PARAMS, False, lora_request=requests)
    assert isinstance(found, list)
    return [each.outputs[0].token_ids for each in found]


def main() -> None:
    number, model, adapters, others, broken = sys.argv[1:]
    options = {"skip_tokenizer_init": True, "device": "cpu", "max_batch_size": 4}
    llm = LLM(model, tensor_parallel_size=int(number), lora_config=LORA, **options)
    requests = [None, *(LoRARequest(name, 0, Path(adapters, name)) for name in NAMES)]
    found = texts(llm, requests)
    try:
        llm.load_adapter("broken", broken)
    except ValueError as error:
        print("refused", error, flush=True)
    stream = llm.generate_async(PROMPT, PARAMS, streaming=True, lora_request=LoRARequest("a"))
    next(stream)
    llm.load_adapter("a", Path(others, "a"), replace=True)
    found += [stream.result().outputs[0].token_ids, *texts(llm, [LoRARequest("a")])]
    llm.unload_adapter("b")
    llm.check_integrity()
    print("texts", json.dumps(found), "adapters", [each.name for each in llm.adapters], flush=True)
    llm.shutdown()


if __name__ == "__main__":
    main()
