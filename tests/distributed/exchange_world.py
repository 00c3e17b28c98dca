"""Counts what two ranks gather in order to sample, for tests.

    mpirun -n 2 python -m tests.distributed.exchange_world RESULTS

For each way of sampling, rank 0 writes to RESULTS, as JSON, the tokens and how many bytes a row
`all_gather` returned: where ranks exchange their best tokens, and where they gather all logits.
How many rows a round has depends on when requests arrive."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.distributed.cases import EAGLE3, TOKEN_PROMPTS
from tllm_spec.distributed.process_group import ProcessGroup
from tllm_spec.executor.sampling.sharded_sampler import ShardedDraftSampling, ShardedSampler
from tllm_spec.llm import LLM

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "filtered": {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    "penalised": {"presence_penalty": 0.5},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
}
LASTING = {"max_tokens": 6, "ignore_eos": True}


class Counter:
    """Of the bytes a row that `all_gather` returns."""

    def __init__(self) -> None:
        self.row_bytes, all_gather = set[int](), ProcessGroup.all_gather

        def counted(group: ProcessGroup, values: torch.Tensor) -> torch.Tensor:
            gathered = all_gather(group, values)
            self.row_bytes.add(gathered.shape[1] * gathered.element_size())
            return gathered

        patched: Any = ProcessGroup
        patched.all_gather = counted


def always_gather() -> None:
    sampler: Any = ShardedSampler
    sampler._needs_all = lambda self, group: True
    sampling: Any = ShardedDraftSampling
    make = sampling.__init__

    def making(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self._always_gathers = True

    sampling.__init__ = making


def generate(counter: Counter) -> dict[str, dict[str, Any]]:
    found = {}
    # Without a tokenizer, which would take longer to import than all rounds.
    options: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True}
    options["speculative_config"] = EAGLE3
    with suppress(SystemExit), LLM("zoo:llama", tensor_parallel_size=2, **options) as llm:
        for name, way in WAYS.items():
            counter.row_bytes.clear()
            outputs = llm.generate(TOKEN_PROMPTS[:3], way | LASTING, use_tqdm=False)
            tokens = [each.outputs[0].token_ids for each in outputs]
            found[name] = {"tokens": tokens, "row_bytes": sorted(counter.row_bytes)}
    return found


def main() -> None:
    counter = Counter()
    exchanged = generate(counter)
    always_gather()
    gathered = generate(counter)
    if gathered:
        Path(sys.argv[1]).write_text(json.dumps([exchanged, gathered]))


if __name__ == "__main__":
    main()
