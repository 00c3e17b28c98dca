"""This engine against transformers' `generate`, and speculation against plain decoding, in one run
on one machine.

    python benchmarks/cpu_vs_transformers.py [--output result.json] [--repeat 5] [--new-tokens 128]
    [--only NAME]

Contenders of a row take turns, `--repeat` times, and the row's figure is the median of the ratios
of neighbouring turns, because machines are noisy. Everything runs in float32 with torch's default
number of threads, greedy, eos ignored."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tllm_spec import LLM, SamplingParams
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.tokenizer import load_tokenizer
from tllm_spec.zoo.corpus import heldout_files, read_source
from tllm_spec.zoo.registry import resolve_model

DRAFT_TARGET = {
    "decoding_type": "Draft_Target",
    "speculative_model": "zoo:llama-draft",
    "max_draft_len": 4,
}
NGRAM = {
    "decoding_type": "NGram",
    "max_draft_len": 8,
    "max_matching_ngram_size": 4,
    "is_use_oldest": False,
}
MEDIUM = {  # about 150 M parameters
    "hidden_size": 896,
    "intermediate_size": 2432,
    "num_hidden_layers": 14,
    "num_attention_heads": 14,
    "num_key_value_heads": 14,
    "head_dim": 64,
    "vocab_size": 8192,
}


class NeverRight(Drafter):
    """Drafts that the target never emits."""

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        for request in scheduled_requests.generation_requests:
            request.py_draft_tokens = [0] * request.num_drafts_wanted


@dataclass
class Row:
    """`ratio`: how many times faster `contender` is than `reference`; `bar`: what it must reach."""

    name: str
    contender: str
    reference: str
    ratio: float
    bar: float
    contender_tokens_per_s: float
    reference_tokens_per_s: float
    note: str = ""


class Bench:
    def __init__(self, new_tokens: int, repeat: int) -> None:
        self.new_tokens, self.repeat, self.num_threads = new_tokens, repeat, torch.get_num_threads()
        self.greedy = SamplingParams(max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        self.tokenizer = load_tokenizer("zoo:llama")
        texts = [self.tokenizer.encode(read_source(path) or "") for path in heldout_files()]
        self.prompts = [tokens[:256] for tokens in texts if len(tokens) > 600][:8]
        source = next(tokens for tokens in texts if len(tokens) > 600)[:300]
        self.copy_prompt = (
            source + source + source[:60]
        )  # "edit this file": the text so far repeats

    def compare(
        self,
        name: str,
        bar: float,
        contender: tuple[str, Callable[[], str]],
        reference: tuple[str, Callable[[], str]],
        num_tokens: int,
    ) -> Row:
        """Turns of both after one warm-up each. Callables return a note."""
        times: dict[str, list[float]] = {contender[0]: [], reference[0]: []}
        note = contender[1]()
        reference[1]()
        for _ in range(self.repeat):
            for label, run in (contender, reference):
                start = time.perf_counter()
                run()
                times[label].append(time.perf_counter() - start)
        pairs = zip(times[reference[0]], times[contender[0]], strict=True)
        speed = {label: num_tokens / statistics.median(values) for label, values in times.items()}
        ratio = statistics.median(slow / fast for slow, fast in pairs)
        row = Row(
            name,
            contender[0],
            reference[0],
            ratio,
            bar,
            speed[contender[0]],
            speed[reference[0]],
            note,
        )
        print(format_row(row), flush=True)
        return row

    def engine(self, prompts: list[list[int]], llm: LLM) -> Callable[[], str]:
        def run() -> str:
            outputs = llm.generate(prompts, self.greedy, use_tqdm=False)
            assert isinstance(outputs, list) and not any(output.error for output in outputs)
            stats = outputs[0].speculative_decoding
            return "" if stats is None else f"acceptance length {stats.acceptance_length:.2f}"

        return run

    def transformers(
        self, model: Any, prompts: list[list[int]], **options: Any
    ) -> Callable[[], str]:
        def run() -> str:
            for prompt in prompts:
                ids = torch.tensor([prompt], device=model.device)
                mask = torch.ones_like(ids)
                length = self.new_tokens
                model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=length,
                    min_new_tokens=length,
                    **options,
                )
            return ""

        return run

    def zoo_rows(self) -> list[Row]:
        torch.set_num_threads(1)  # the faster setting for transformers, too, at this size
        model, assistant = load_transformers("zoo:llama"), load_transformers("zoo:llama-draft")
        one, eight, length = self.prompts[:1], self.prompts, self.new_tokens
        rows = []
        with LLM("zoo:llama", **SMALL) as plain:
            ours, theirs = self.engine(one, plain), self.transformers(model, one)
            rows.append(
                self.compare(
                    "zoo, 1 request", 2.0, ("plain", ours), ("transformers", theirs), length
                )
            )
            ours, theirs = self.engine(eight, plain), self.transformers(model, eight)
            rows.append(
                self.compare(
                    "zoo, 8 requests",
                    4.0,
                    ("plain x8", ours),
                    ("transformers x1", theirs),
                    8 * length,
                )
            )
            with LLM("zoo:llama", speculative_config=DRAFT_TARGET, **SMALL) as draft_target:
                rows += self.draft_target_rows(plain, draft_target, model, assistant)
            with LLM("zoo:llama", speculative_config=NGRAM, **SMALL) as ngram:
                copy = [self.copy_prompt]
                contender, reference = self.engine(copy, ngram), self.engine(copy, plain)
                rows.append(
                    self.compare(
                        "zoo, copying", 1.3, ("NGram", contender), ("plain", reference), length
                    )
                )
            # 8 is the default; None shows what a verified window costs where nothing is ever
            # accepted.
            for patience, bar in ((8, 0.8), (None, 0.0)):
                never = {
                    "decoding_type": "User_Provided",
                    "max_draft_len": 4,
                    "drafter": NeverRight(),
                }
                options = {
                    "speculative_config": {**never, "max_rejected_rounds": patience},
                    **SMALL,
                }
                with LLM("zoo:llama", **options) as useless:
                    contender, reference = self.engine(one, useless), self.engine(one, plain)
                    name = "zoo, useless drafts" if patience else "zoo, never pausing"
                    pair = ("never right", contender), ("plain", reference)
                    rows.append(self.compare(name, bar, *pair, length))
        return rows

    def draft_target_rows(
        self, plain: LLM, draft_target: LLM, model: Any, assistant: Any
    ) -> list[Row]:
        """All eight prompts, one after another: one prompt's acceptance says little."""
        num_tokens = self.new_tokens * len(self.prompts)
        assisted = self.transformers(model, self.prompts, assistant_model=assistant)

        def in_turn(llm: LLM) -> Callable[[], str]:
            def run() -> str:
                handles = [
                    llm.generate_async(prompt, self.greedy).result() for prompt in self.prompts
                ]
                stats = [
                    handle.speculative_decoding for handle in handles if handle.speculative_decoding
                ]
                if not stats:
                    return ""
                total = sum(stats[1:], stats[0])
                return f"acceptance length {total.acceptance_length:.2f}, rate {total.draft_acceptance_rate:.2f}"

            return run

        contender = ("Draft/Target", in_turn(draft_target))
        return [
            self.compare("zoo, 1 request", 1.3, contender, ("plain", in_turn(plain)), num_tokens),
            self.compare(
                "zoo, 1 request", 1.0, contender, ("transformers assisted", assisted), num_tokens
            ),
        ]

    def medium_rows(self) -> list[Row]:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(self.num_threads)
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(**MEDIUM)).to(torch.bfloat16).save_pretrained(folder)
            model = load_transformers(folder)
            prompt = [self.prompts[0]]
            with LLM(folder, skip_tokenizer_init=True, max_seq_len=1024, **SMALL) as plain:
                ours, theirs = self.engine(prompt, plain), self.transformers(model, prompt)
                name = f"{model.num_parameters() / 1e6:.0f} M, 1 request"
                return [
                    self.compare(
                        name, 1.0, ("plain", ours), ("transformers", theirs), self.new_tokens
                    )
                ]


SMALL = {
    "max_batch_size": 8,
    "max_num_tokens": 4096,
    "kv_cache_config": {"enable_block_reuse": False},
}


def load_transformers(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(resolve_model(path), dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None
    return model


def format_row(row: Row) -> str:
    verdict = "ok  " if row.ratio >= row.bar else "MISS"
    speeds = f"{row.contender_tokens_per_s:7.0f} vs {row.reference_tokens_per_s:7.0f} tok/s"
    versus = f"{row.contender} / {row.reference}"
    return f"{verdict} {row.name:<20} {versus:<38} {row.ratio:5.2f}x (bar {row.bar:.2f})  {speeds}  {row.note}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="where the rows go as JSON")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--only", choices=("zoo", "medium"))
    args = parser.parse_args()
    bench = Bench(args.new_tokens, args.repeat)
    rows = [] if args.only == "medium" else bench.zoo_rows()
    rows += [] if args.only == "zoo" else bench.medium_rows()
    if args.output:
        report = {
            "threads": bench.num_threads,
            "torch": torch.__version__,
            "rows": [asdict(row) for row in rows],
        }
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(row.ratio >= row.bar for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
