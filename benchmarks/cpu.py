"""This engine against transformers' `generate`, speculation against plain decoding, and acceptance,
on a CPU.

    python -m benchmarks.cpu [transformers] [sampling] [trees] [matches] [windows]
        [--quick] [--output result.json]

transformers  held-out prompts of 256 tokens, 128 new tokens, float32, greedy. The zoo runs on one
              thread, which is also transformers' faster setting for it; a random-weight Llama of
              151 M parameters on all. The two sides of a row take turns; its ratio is the median
              over the turns
sampling      acceptance of Draft/Target at temperature 0.8 by how drafts are drawn: 80 prompts.
              Goals: coupled drafts at least 0.9 of rejection sampling's acceptance rate, and above
              that of argmax drafts
trees         acceptance length of draft trees, with 4 children a node, against chains of the same
              depth, greedy and at temperature 0.8: 40 prompts. NGram's chain is the newest
              continuation. Goal: an EAGLE-3 tree of 16 drafts at least 1.10 of the chain
matches       tokens a round of EAGLE-3, SA and both together (`sa_config`) with 5 drafts, of
              EAGLE-3 and both in trees of depth 5 with 16 drafts, and of a draft model in its own
              engine, alone and with SA: 16 edits of held-out code, and 16 pieces of such code as it
              is (benchmarks/harness/edited_code.py). Goals: 1.25 of the network alone and 1.02 of
              SA on edits, 0.99 of the network on the code as it is; a tree of both 1.02 of a chain
              of both on edits, 0.99 of EAGLE-3's tree on the code as it is
windows       acceptance length of the zoo's EAGLE-3 head after 6,144 tokens, by the window of the
              head: 5 texts, greedy, 4 drafts (benchmarks/harness/long_contexts.py)"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.harness.acceptance import DRAFT_TARGET, sampling, sampling_table, trees, trees_table
from benchmarks.harness.edited_code import matches, matches_table
from benchmarks.harness.engine import in_turns
from benchmarks.harness.long_contexts import windows, windows_table
from benchmarks.harness.report import Options, Row, Subject, main, table
from tllm_spec import LLM, SamplingParams
from tllm_spec.bench.break_even import FreeDrafts
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.zoo.corpus import heldout_files, read_source
from tllm_spec.zoo.registry import resolve_model

SMALL = {
    "device": "cpu", "max_batch_size": 8, "max_num_tokens": 4096,
    "kv_cache_config": {"enable_block_reuse": False},
}  # fmt: skip
NGRAM = {
    "decoding_type": "NGram", "max_draft_len": 8, "max_matching_ngram_size": 4,
    "is_use_oldest": False,
}  # fmt: skip
MEDIUM = {
    "hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 14,
    "num_attention_heads": 14, "num_key_value_heads": 14, "head_dim": 64, "vocab_size": 8192,
}  # fmt: skip


# The target never emits token 0.
NEVER_RIGHT = {"decoding_type": "User_Provided", "max_draft_len": 4, "drafter": FreeDrafts()}


@dataclass(frozen=True)
class Side:
    """`run` generates for every prompt and returns what is worth a note."""

    name: str
    prompts: list[list[int]]
    run: Callable[[list[list[int]], int], str]

    def tokens_per_s(self, new_tokens: int) -> float:
        start = time.perf_counter()
        self.run(self.prompts, new_tokens)
        return new_tokens * len(self.prompts) / (time.perf_counter() - start)


@dataclass(frozen=True)
class Bench:
    new_tokens: int
    repeats: int

    def compare(self, name: str, goal: float | None, ours: Side, other: Side) -> Row:
        sides = {s.name: partial(s.tokens_per_s, self.new_tokens) for s in (ours, other)}
        found = in_turns(sides, self.repeats)
        pairs = zip(found[ours.name], found[other.name], strict=True)
        return {
            "name": name,
            "contender": ours.name,
            "reference": other.name,
            "goal": goal,
            "ratio": statistics.median(own / reference for own, reference in pairs),
            "contender_tokens_per_s": statistics.median(found[ours.name]),
            "reference_tokens_per_s": statistics.median(found[other.name]),
            "note": ours.run(ours.prompts, self.new_tokens),
        }


def engine(name: str, llm: LLM, prompts: list[list[int]], *, at_once: bool = True) -> Side:
    def run(prompts: list[list[int]], new_tokens: int) -> str:
        greedy = SamplingParams(max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        batches = [prompts] if at_once else [[prompt] for prompt in prompts]
        outputs = [o for batch in batches for o in llm.generate(batch, greedy, use_tqdm=False)]
        assert not any(output.error for output in outputs)
        stats = (output.speculative_decoding for output in outputs)
        total = sum((each for each in stats if each), SpeculativeStats())
        return f"acceptance length {total.acceptance_length:.2f}" if total.rounds else ""

    return Side(name, prompts, run)


def transformers(name: str, model: Any, prompts: list[list[int]], **options: Any) -> Side:
    def run(prompts: list[list[int]], new_tokens: int) -> str:
        lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        for prompt in prompts:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            model.generate(ids, attention_mask=mask, do_sample=False, **lengths, **options)
        return ""

    return Side(name, prompts, run)


def load_transformers(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve_model(path), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def against_transformers(options: Options) -> Iterator[Row]:
    bench = Bench(8, 1) if options.quick else Bench(128, 7)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield from zoo_rows(bench)
    torch.set_num_threads(threads)
    if not options.quick:
        yield medium_row(bench)


def zoo_rows(bench: Bench) -> Iterator[Row]:
    tokenizer = load_tokenizer("zoo:llama")
    texts = [tokenizer.encode(read_source(path) or "") for path in heldout_files()]
    eight = [tokens[:256] for tokens in texts if len(tokens) > 600][:8]
    source = next(tokens for tokens in texts if len(tokens) > 600)[:300]
    one, copied = eight[:1], [source + source + source[:60]]  # like an edit of a file
    theirs, assistant = load_transformers("zoo:llama"), load_transformers("zoo:llama-draft")
    with ExitStack() as stack:

        def llm(speculation: dict[str, Any] | None) -> LLM:
            return stack.enter_context(LLM("zoo:llama", speculative_config=speculation, **SMALL))

        plain, draft_target, ngram = llm(None), llm(DRAFT_TARGET), llm(NGRAM)
        # 8 is the default; None shows what verifying windows in vain costs.
        pausing, stubborn = (llm(NEVER_RIGHT | {"max_rejected_rounds": n}) for n in (8, None))
        drafted = engine("Draft/Target", draft_target, eight, at_once=False)
        assisted = transformers("transformers assisted", theirs, eight, assistant_model=assistant)
        alone = engine("plain", plain, one)
        each = engine("plain", plain, eight, at_once=False)
        for name, goal, ours, other in (
            ("zoo, 1 request", 2.0, alone, transformers("transformers", theirs, one)),
            (
                "zoo, 8 requests",
                4.0,
                engine("plain x8", plain, eight),
                transformers("transformers x1", theirs, eight),
            ),
            ("zoo, 1 request", 1.3, drafted, each),
            ("zoo, 1 request", 1.0, drafted, assisted),
            ("zoo, copying", 1.3, engine("NGram", ngram, copied), engine("plain", plain, copied)),
            ("zoo, useless drafts", 0.8, engine("never right", pausing, one), alone),
            ("zoo, never pausing", None, engine("never right", stubborn, one), alone),
        ):
            yield bench.compare(name, goal, ours, other)


def medium_row(bench: Bench) -> Row:
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**MEDIUM)).save_pretrained(folder)
        theirs, prompts = load_transformers(folder), [list(range(256))]
        with LLM(folder, skip_tokenizer_init=True, max_seq_len=1024, **SMALL) as plain:
            ours = engine("plain", plain, prompts)
            other = transformers("transformers", theirs, prompts)
            return bench.compare("151 M, 1 request", 1.0, ours, other)


def ratios_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        speeds = [row[f"{side}_tokens_per_s"] for side in ("contender", "reference")]
        versus = f"{row['contender']} / {row['reference']}"
        goal = "–" if row["goal"] is None else f"{row['goal']:.1f}"
        ratio, speed = f"**{row['ratio']:.2f}**", " / ".join(f"{each:,.0f}" for each in speeds)
        lines.append([row["name"], versus, ratio, goal, speed, row["note"]])
    return table(("case", "", "ratio", "goal", "tok/s", ""), lines)


SUBJECTS = (
    Subject("transformers", "This engine and transformers", against_transformers, ratios_table),
    Subject("sampling", "Draft/Target at temperature 0.8", sampling, sampling_table),
    Subject("trees", "Trees and chains of depth 4", trees, trees_table),
    Subject("matches", "Matches in the text next to an EAGLE-3 head", matches, matches_table),
    Subject("windows", "Windows of a head after 6,144 tokens", windows, windows_table),
)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
