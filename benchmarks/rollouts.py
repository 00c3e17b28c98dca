"""What a trainer's engine takes: an update of its weights, sleep, and rollouts with drafts.

    python -m benchmarks.rollouts [weights] [rollout] [--layers 32] [--prompts 512] [--samples 8]

weights  seconds of a copy of the model's bytes from locked host memory; of making a folder in
         memory of tensors, which an update from tensors does first; of an update from this folder,
         and for how long no round ran; without --quick of sleep and waking; and the device memory
         in use after each, by all processes
rollout  tokens per second of samples of all prompts, plain, with EAGLE-3 whose head is stale, and
         with one that follows: with the acceptance of both that --stale and --followed give by
         position, which `benchmarks.following` measures. Each half of the prompts is a turn

An 8B Llama's shape with random weights and random prompts. The text means nothing. On a CPU it is
a tiny shape, which only shows that it runs."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.harness.dummy_models import TINY_EAGLE3, TINY_LLAMA
from benchmarks.harness.engine import release, synchronize
from benchmarks.harness.models import EAGLE3_8B, LLAMA_8B, Config
from benchmarks.harness.report import Options, Row, Subject, main, number, table
from tllm_spec.executor.sampling.acceptance_rules import synthetic_acceptance
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput, SpeculativeStats
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.target_update import folder_of

DRAFT_LEN, PROMPT_LEN, COPIED_AT_ONCE = 3, 32, 1 << 28
STALE, FOLLOWED = "0.32,0.13,0.06", "0.45,0.23,0.12"  # means after the updates of the zoo


def shape_of(options: Options) -> Config:
    if options.device == "cpu":
        return TINY_LLAMA
    return {**LLAMA_8B, "num_hidden_layers": options.more.layers}


def dummy_folder(folder: Path, config: Config) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def dummy_llm(folder: str, device: str, batch_size: int, **options: Any) -> LLM:
    cache = {"max_tokens": batch_size * 512, "enable_block_reuse": True}
    sizes = [each for each in (1, 8, 16, 32) if each < batch_size]
    graphs = {"batch_sizes": [*sizes, batch_size]} if device == "cuda" else None
    own = {"skip_tokenizer_init": True, "load_format": "dummy", "device": device}
    own |= {"cuda_graph_config": graphs}
    own |= {"kv_cache_config": cache, "max_batch_size": batch_size, "max_seq_len": 512}
    return LLM(folder, **own, **options)


def checkpoint(config: Config) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a Llama with the names of its checkpoint. Layers share theirs."""
    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    head = hidden // config["num_attention_heads"]
    keys = head * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    dtype = getattr(torch, config["torch_dtype"])
    layer = {name: torch.full(shape, 0.02, dtype=dtype) for name, shape in shapes.items()}
    for index in range(config["num_hidden_layers"]):
        yield from ((f"model.layers.{index}.{k}.weight", v) for k, v in layer.items())
    yield "model.norm.weight", torch.ones(hidden, dtype=dtype)
    embedding = torch.full((vocab, hidden), 0.02, dtype=dtype)
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", embedding


def copy_seconds(num_bytes: int, device: str) -> float:
    """Copies to the device, from locked memory if it is a GPU."""
    is_cuda = device == "cuda"
    host = torch.empty(min(num_bytes, COPIED_AT_ONCE), dtype=torch.uint8, pin_memory=is_cuda)
    own = host.to(device)
    own.copy_(host)
    synchronize()
    start = time.perf_counter()
    for _ in range(max(1, num_bytes // COPIED_AT_ONCE)):
        own.copy_(host, non_blocking=True)
    synchronize()
    return time.perf_counter() - start


def memory_gib(device: str) -> float | None:
    """In use on the device."""
    if device != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def weights(options: Options) -> Iterator[Row]:
    device, config = options.device, shape_of(options)
    tensors = dict(checkpoint(config))
    num_bytes = sum(each.nbytes for each in tensors.values())

    def row(what: str, call: Callable[[], Any]) -> Row:
        start = time.perf_counter()
        told = call()
        synchronize()
        own = {"what": what, "seconds": time.perf_counter() - start, "gib": memory_gib(device)}
        return own | {"stopped": (told or {}).get("stopped_seconds")}

    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = dummy_folder(root / "model", config)
        llm = stack.enter_context(dummy_llm(model, device, 8, enable_sleep_mode=True))
        gib = memory_gib(device)
        about = {"what": f"serving {num_bytes / 2**30:.1f} GiB of weights", "gib": gib}
        yield about | {"seconds": None, "stopped": None}
        copied = copy_seconds(num_bytes, device)
        yield {"what": "a copy of them", "seconds": copied, "stopped": copied, "gib": gib}
        folders: list[str] = []
        yield row(
            "host tensors become a folder",
            lambda: folders.append(stack.enter_context(folder_of(tensors.items(), model))),
        )
        yield row("an update from the folder", lambda: llm.update_weights(folders[0]))
        if options.quick:
            return
        for turn in ("first", "second"):
            yield row(f"{turn} sleep", llm.sleep)
            yield row("waking", llm.wake_up)
        yield row("sleep at level 2", lambda: llm.sleep(2))
        yield row("waking", llm.wake_up)


def table_of_weights(rows: Sequence[Row]) -> list[str]:
    return table(
        ("", "seconds", "no round for, s", "device memory, GiB"),
        [
            (row["what"], *(number(row[key]) for key in ("seconds", "stopped", "gib")))
            for row in rows
        ],
    )


def set_acceptance(llm: LLM, rates: Sequence[float]) -> None:
    """Changes an engine with synthetic acceptance. Graphs read the tensor that is written."""
    synthetic = llm._executor.parts.sampler._synthetic
    assert synthetic is not None
    new = synthetic_acceptance(tuple(rates), synthetic.seeds)
    assert new is not None
    synthetic.bounds.copy_(new.bounds)


def rollout(options: Options) -> Iterator[Row]:
    device, config, more = options.device, shape_of(options), options.more
    head = TINY_EAGLE3 if device == "cpu" else EAGLE3_8B
    rates = {
        name: [float(each) for each in options.text(name, "").split(",")]
        for name in ("stale", "followed")
    }
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = dummy_folder(root / "model", config)
        spec = {
            "decoding_type": "Eagle3",
            "speculative_model": dummy_folder(root / "head", head),
            "max_draft_len": DRAFT_LEN,
            "load_format": "dummy",
            "synthetic_acceptance_rates": rates["stale"],
        }
        plain, drafting = (
            stack.enter_context(dummy_llm(model, device, more.batch_size, speculative_config=given))
            for given in (None, spec)
        )
        draw = Random(0)
        for turn in range(-1, 2):
            number = more.prompts // 2 if turn >= 0 else 4
            prompts = [
                draw.choices(range(config["vocab_size"]), k=PROMPT_LEN) for _ in range(number)
            ]
            for side, llm in (("plain", plain), ("stale", drafting), ("followed", drafting)):
                if side in rates:
                    set_acceptance(llm, rates[side])
                found = sampled(llm, prompts, more.samples, more.tokens)
                if turn >= 0:
                    yield {"turn": turn, "side": side} | found
        del plain, drafting
    release()


def sampled(llm: LLM, prompts: Sequence[list[int]], num_samples: int, num_tokens: int) -> Row:
    """Samples of all prompts, in one call."""
    own: dict[str, Any] = {
        "temperature": 1.0,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "n": num_samples,
    }
    params = [SamplingParams(seed=index, **own) for index in range(len(prompts))]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert isinstance(outputs, list)
    tokens = sum(each.length for output in outputs for each in output.outputs)
    assert tokens == len(prompts) * num_samples * num_tokens
    return {"tokens": tokens, "seconds": seconds, "tokens_per_round": tokens_per_round(outputs)}


def tokens_per_round(outputs: Sequence[RequestOutput]) -> float:
    stats = [output.speculative_decoding for output in outputs]
    total = sum((each for each in stats if each), SpeculativeStats())
    return total.acceptance_length if total.rounds else 1.0


def table_of_rollout(rows: Sequence[Row]) -> list[str]:
    """Over all turns."""
    lines = []
    for side in dict.fromkeys(row["side"] for row in rows):
        own = [row for row in rows if row["side"] == side]
        rate = sum(row["tokens"] for row in own) / sum(row["seconds"] for row in own)
        length = sum(row["tokens_per_round"] for row in own) / len(own)
        lines.append((side, number(rate), number(length)))
    return table(("", "tokens per second", "tokens a round"), lines)


SUBJECTS = (
    Subject("weights", "Updates and sleep of an engine", weights, table_of_weights),
    Subject("rollout", "Rollouts with drafts", rollout, table_of_rollout),
)

DEFAULTS: dict[str, Any] = {
    "layers": 32, "prompts": 512, "samples": 8, "tokens": 64, "batch_size": 64,
    "stale": STALE, "followed": FOLLOWED,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__, **DEFAULTS))
