"""Acceptance while the target changes, with the head it began with and with one that follows.

    python -m benchmarks.following [--quick] [--texts 192] [--target-steps 60] [--head-steps 120]

The zoo's target is trained on this repository's documents, and both engines are given its weights
after each of 5 parts. They complete pieces of these documents, with equal texts (on a GPU but for
ties). One records its texts and their hidden states; between two updates `tllm-train head --follow`
makes a turn on the newest ones, whose head is swapped in."""

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness.report import ROOT, Options, Row, Subject, main, number, table
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput, SpeculativeStats
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.training.follow import Follower
from tllm_spec.training.head_run import HeadOptions
from tllm_spec.zoo.registry import resolve_model

MODEL, HEAD, DRAFT_LEN, NUM_UPDATES = "zoo:llama", "zoo:llama-eagle3", 3, 5
LENGTH, BATCH, LEARNING_RATE = 128, 8, 3e-4  # of the target's training
PROMPT_LEN, OUTPUT_LEN = 24, 64


def train_target(target: Any, tokens: torch.Tensor, num_steps: int, seed: int) -> None:
    """tokens `[T]`."""
    optimizer = torch.optim.AdamW(target.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=generator)
        batch = tokens[(starts + torch.arange(LENGTH)).to(tokens.device)]
        target(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def completed(llm: LLM, tokens: torch.Tensor, number: int, seed: int) -> list[RequestOutput]:
    draw = random.Random(seed)
    starts = [draw.randrange(len(tokens) - PROMPT_LEN) for _ in range(number)]
    prompts = [tokens[start : start + PROMPT_LEN].tolist() for start in starts]
    params = [
        SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.7, seed=start, ignore_eos=True)
        for start in starts
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert isinstance(outputs, list)
    return outputs


def acceptance(outputs: Sequence[RequestOutput]) -> float:
    stats = [output.speculative_decoding for output in outputs]
    return sum((each for each in stats if each), SpeculativeStats()).acceptance_length


def follower_of(llm: LLM, folder: Path, options: Options) -> Follower:
    unset = ("kind", "format", "draft_vocab_size", "layers", "minutes", "checkpoint_steps")
    own = HeadOptions(
        model=MODEL,
        data=folder / "traffic",
        output=folder / "heads",
        start=HEAD,
        norms=(),
        unroll=DRAFT_LEN,
        steps=options.more.head_steps,
        batch_tokens=None,
        learning_rate=5e-4,
        resume=False,
        dtype="float32",
        device=options.device,
        **dict.fromkeys(unset),
    )
    return Follower(own, lambda head: llm.load_draft_weights(head, force=True))


def updates(options: Options) -> Iterator[Row]:
    target = AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.float32)
    target.to(options.device)
    spec = {"decoding_type": "Eagle3", "speculative_model": HEAD, "max_draft_len": DRAFT_LEN}
    own = {"speculative_config": spec, "device": options.device}
    # A cached prefix has no hidden states to record.
    kv = {"enable_block_reuse": False, "max_tokens": 1 << 15}
    own |= {"kv_cache_config": kv, "max_batch_size": 64, "cuda_graph_config": None}
    num_texts, num_steps = options.more.texts, options.more.target_steps
    with TemporaryDirectory() as name:
        folder = Path(name)
        recorded = {"record_traffic": str(folder / "traffic"), "record_hidden_states": 1.0}
        with LLM(MODEL, **own) as stale, LLM(MODEL, **own, **recorded) as llm:
            text = "".join(path.read_text("utf-8") for path in sorted(ROOT.glob("docs/*.md")))
            tokens = torch.tensor(stale.get_tokenizer().encode(text), device=options.device)
            follower = follower_of(llm, folder, options)
            for update in range(1 + (2 if options.quick else NUM_UPDATES)):
                if update:
                    train_target(target, tokens, num_steps, update)
                    for each in (stale, llm):
                        each.update_weights(target.state_dict().items(), version=str(update))
                before, after = (
                    completed(each, tokens, num_texts, update) for each in (stale, llm)
                )
                equal = [
                    one.outputs[0].token_ids == other.outputs[0].token_ids
                    for one, other in zip(before, after, strict=True)
                ]
                yield {
                    "update": after[0].weight_version,
                    "stale": acceptance(before),
                    "followed": acceptance(after),
                    "equal_texts": sum(equal) / num_texts,
                }
                follower.wait()
                follower.turn()


def lines(rows: Sequence[Row]) -> list[str]:
    return table(
        ("update", "the first head", "following", "equal texts"),
        [
            (row["update"], *(number(row[key]) for key in ("stale", "followed", "equal_texts")))
            for row in rows
        ],
    )


SUBJECTS = [Subject("updates", "Tokens a round after updates of the target", updates, lines)]

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__, texts=192, target_steps=60, head_steps=120))
