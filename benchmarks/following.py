"""Acceptance and speed while the target changes: plain, with the head that it began with, and with
one that follows.

    python -m benchmarks.following [--quick] [--prompts 32] [--samples 3] [--target-steps 10]
        [--rate 1.5e-3] [--head-steps 16] [--head-rate 5e-4]

The zoo's target wrote code; it is trained on this repository's documents, and all engines are given
its weights after each of 5 parts. With each they complete pieces of these documents in two halves,
with equal texts (on a GPU but for ties). One records its texts and their hidden states; between the
halves `tllm-train head --follow` makes a turn on those of the first, whose head is swapped in. So
the head of the first half is one update old, and that of the second is of the present weights. The
rows with the first weights show what a head gains from this kind of text alone."""

import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
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
LENGTH, BATCH = 128, 8  # of the target's training
PROMPT_LEN, OUTPUT_LEN, MAX_BATCH = 24, 48, 64
SIDES = "plain", "stale", "followed"


class Target:
    """What changes: a model in transformers, and its folder, which has its latest weights."""

    def __init__(self, folder: Path, tokens: torch.Tensor, rate: float) -> None:
        """tokens `[T]`: that it learns."""
        self.folder, self._tokens = folder, tokens
        model = AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.float32)
        self._model: Any = model.to(tokens.device)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        model.save_pretrained(folder)

    def train(self, num_steps: int, seed: int) -> float:
        """Returns the mean loss."""
        generator, total = torch.Generator().manual_seed(seed), 0.0
        for _ in range(num_steps):
            starts = torch.randint(len(self._tokens) - LENGTH, (BATCH, 1), generator=generator)
            batch = self._tokens[(starts + torch.arange(LENGTH)).to(self._tokens.device)]
            loss = self._model(input_ids=batch, labels=batch).loss
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            total += loss.item()
        self._model.save_pretrained(self.folder)
        return total / num_steps


def completed(llm: LLM, prompts: Sequence[list[int]], samples: int) -> tuple[Any, float]:
    """The outputs, and the seconds."""
    own: dict[str, Any] = {"max_tokens": OUTPUT_LEN, "temperature": 0.7, "ignore_eos": True}
    own |= {"n": samples}
    params = [SamplingParams(seed=seed, **own) for seed in range(len(prompts))]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return outputs, time.perf_counter() - start


def acceptance(side: str, outputs: Sequence[RequestOutput]) -> Row:
    """Tokens a round, and the parts of the rounds that accept the first drafts up to each one."""
    stats = [output.speculative_decoding for output in outputs]
    total = sum((each for each in stats if each), SpeculativeStats())
    rates = [accepted / total.rounds for accepted in total.per_position_accepted]
    return {side: total.acceptance_length, f"{side}_by_position": rates}


def follower_of(llm: LLM, model: Path, options: Options) -> Follower:
    unset = ("kind", "format", "draft_vocab_size", "layers", "minutes", "checkpoint_steps")
    own = HeadOptions(
        model=str(model),
        data=model.with_name("traffic"),
        output=model.with_name("heads"),
        start=HEAD,
        norms=(),
        unroll=DRAFT_LEN,
        steps=options.more.head_steps,
        batch_tokens=None,
        learning_rate=options.more.head_rate,
        resume=False,
        dtype="float32",
        device=options.device,
        **dict.fromkeys(unset),
    )
    # Older texts are of older weights.
    newest = options.more.prompts // 2 * options.more.samples
    return Follower(own, lambda head: llm.load_draft_weights(head, force=True), newest)


def engines(folder: Path, options: Options, stack: ExitStack) -> dict[str, LLM]:
    """By side."""
    graphs = {"batch_sizes": [1, 8, 16, 32, MAX_BATCH]} if options.device == "cuda" else None
    # A cached prefix has no hidden states to record.
    kv = {"enable_block_reuse": False, "max_tokens": 1 << 15}
    own = {"device": options.device, "kv_cache_config": kv, "max_batch_size": MAX_BATCH}
    spec = {"decoding_type": "Eagle3", "speculative_model": HEAD, "max_draft_len": DRAFT_LEN}
    recorded = {"record_traffic": str(folder / "traffic"), "record_hidden_states": 1.0}
    given: list[dict[str, Any]] = [
        {},
        {"speculative_config": spec},
        {"speculative_config": spec} | recorded,
    ]
    return {
        side: stack.enter_context(LLM(MODEL, cuda_graph_config=graphs, **own, **more))
        for side, more in zip(SIDES, given, strict=True)
    }


def half(llms: Mapping[str, LLM], prompts: Sequence[list[int]], samples: int) -> Row:
    """What the sides make of the same prompts."""
    found = {side: completed(llm, prompts, samples) for side, llm in llms.items()}
    texts = [
        [each.token_ids for output in outputs for each in output.outputs]
        for outputs, _ in found.values()
    ]
    num_tokens = sum(map(len, texts[0]))
    rates = {f"{side}_rate": num_tokens / seconds for side, (_, seconds) in found.items()}
    equal = [len({tuple(each) for each in own}) == 1 for own in zip(*texts, strict=True)]
    row = {**rates, "equal_texts": sum(equal) / len(equal)}
    for side in SIDES[1:]:
        row |= acceptance(side, found[side][0])
    return row


def updates(options: Options) -> Iterator[Row]:
    more, draw = options.more, random.Random(0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        llms = engines(folder, options, stack)
        text = "".join(path.read_text("utf-8") for path in sorted(ROOT.glob("docs/*.md")))
        ids = llms["plain"].get_tokenizer().encode(text)
        tokens = torch.tensor(ids, device=options.device)
        target = Target(folder / "target", tokens, more.rate)
        follower, head, loss = follower_of(llms["followed"], target.folder, options), "first", None
        for update in range(1 + (2 if options.quick else NUM_UPDATES)):
            if update:
                loss = target.train(more.target_steps, update)
                for llm in llms.values():
                    llm.update_weights(target.folder, version=str(update))
            for is_fresh in (False, True):
                seconds = None
                if is_fresh:
                    follower.wait()
                    start = time.perf_counter()
                    follower.turn()
                    seconds, head = time.perf_counter() - start, str(update)
                starts = [draw.randrange(len(ids) - PROMPT_LEN) for _ in range(more.prompts // 2)]
                prompts = [ids[start : start + PROMPT_LEN] for start in starts]
                row = {"update": update, "head": head, "loss": loss, "turn_seconds": seconds}
                yield row | half(llms, prompts, more.samples)


def lines(rows: Sequence[Row]) -> list[str]:
    titles = ("update", "head of", "stale", "followed", "tokens/s plain", "stale", "followed")
    keys = ("stale", "followed", *(f"{side}_rate" for side in SIDES), "turn_seconds", "equal_texts")
    return table(
        (*titles, "seconds of the turn", "equal texts"),
        [(str(row["update"]), row["head"], *(number(row[key]) for key in keys)) for row in rows],
    )


SUBJECTS = [Subject("updates", "Tokens a round after updates of the target", updates, lines)]

if __name__ == "__main__":
    sizes: dict[str, Any] = {"prompts": 32, "samples": 3, "target_steps": 10, "head_steps": 16}
    sys.exit(main(SUBJECTS, __doc__, **sizes, rate=1.5e-3, head_rate=5e-4))
