"""A world that serves LoRA adapters, loads and replaces them while requests run, for tests.

    python -m tests.distributed.adapter_world NUM_RANKS MODEL ADAPTERS OTHER_ADAPTERS BROKEN
    python -m tests.distributed.adapter_world NUM_RANKS DRAFT_ADAPTERS

It prints the texts. The second has drafts, of which it prints how many were accepted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.adapters import draft_adapters
from tests.adapters.tiny_adapters import LORA, NAMES
from tests.lossless.engines import MODES
from tllm_spec.llm import LLM
from tllm_spec.lora_request import LoRARequest

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PARAMS = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.5, "seed": 7}


def texts(llm: LLM, requests: list[LoRARequest | None]) -> list[list[int]]:
    found = llm.generate([PROMPT] * len(requests), PARAMS, False, lora_request=requests)
    assert isinstance(found, list)
    return [each.outputs[0].token_ids for each in found]


def with_drafts(number: str, root: str) -> None:
    """Requests with an adapter that has its own draft head, with one without, and with none."""
    names = [name for name in draft_adapters.NAMES if name is not None]
    lora = {"lora_dir": {name: f"{root}/{name}" for name in names}, "max_loras": 2}
    lora |= dict.fromkeys(("max_lora_rank", "max_draft_lora_rank"), draft_adapters.RANK)
    spec = MODES["eagle3"] | {"max_draft_len": 4, "speculative_model": f"{root}/head"}
    requests = [name and LoRARequest(name) for name in draft_adapters.NAMES]
    with LLM(
        draft_adapters.TARGET,
        tensor_parallel_size=int(number),
        speculative_config=spec,
        lora_config=lora,
        device="cpu",
        max_batch_size=3,
    ) as llm:
        for prompt in draft_adapters.TEXTS:
            for each in llm.generate([prompt] * 3, PARAMS, False, lora_request=requests):
                stats = each.speculative_decoding
                print("drafts", each.outputs[0].token_ids, stats.num_accepted_tokens, flush=True)
        llm.check_integrity()


def with_texts(number: str, model: str, adapters: str, others: str, broken: str) -> None:
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
    (with_drafts if len(sys.argv) == 3 else with_texts)(*sys.argv[1:])
