"""Rounds of a model whose layers have recurrent states, with the experts that are really hit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.harness import models
from benchmarks.harness.dummy_models import QWEN3_NEXT, TINY_QWEN3_NEXT, dummy_engine
from benchmarks.harness.expert_rounds import MTP_RATES, experts_hit, slowness
from benchmarks.harness.models import WEIGHT_BYTES, Config
from benchmarks.harness.report import Options, Row
from tllm_spec.models.registry import model_config_of

# Times of the floor, by batch size: of plain rounds, and of those with three drafts of MTP.
GOALS = {0: {1: 2.0, 8: 1.5, 64: 1.4}, 3: {1: 1.6, 8: 1.6, 64: 1.6}}


@dataclass(frozen=True)
class RoundSize:
    """Requests, tokens in the cache of all of them, and drafts of each."""

    batch: int
    num_tokens: float
    draft_len: int


def qwen3_next(draft_len: int) -> Callable[[Options], Iterator[Row]]:
    """The rows of one draft length of the model's MTP layer."""

    def run(options: Options) -> Iterator[Row]:
        is_full = options.device == "cuda"
        config = QWEN3_NEXT if is_full else TINY_QWEN3_NEXT
        sizes, prompt_len, num_rounds = ((1, 8, 64), 1024, 40) if is_full else ((1, 2), 16, 3)
        rates = {"synthetic_acceptance_rates": MTP_RATES[:draft_len]}
        mtp = {"decoding_type": "MTP", "max_draft_len": draft_len} | rates
        engine = dummy_engine(
            config,
            batch_sizes=sizes,
            prompt_len=prompt_len,
            device=options.device,
            speculation=mtp if draft_len else None,
            attn_backend=options.text("attn_backend", "auto"),
        )
        for batch_size in sizes:
            engine.start(batch_size, prompt_len)
            timings = [engine.timed(num_rounds) for _ in range(1 if options.quick else 3)]
            timed = sorted(timings, key=lambda each: each.round_ms)[len(timings) // 2]
            hit = experts_hit(engine, batch_size * (1 + draft_len))
            later = experts_hit(engine, batch_size) if draft_len > 1 else hit
            size = RoundSize(batch_size, batch_size * timed.context, draft_len)
            floor = models.read_ms(round_bytes(config, size, hit, later)) * slowness()
            what = f"batch {batch_size}, {draft_len} drafts"
            goal = GOALS[draft_len].get(batch_size) if is_full else None
            yield {"what": what, "value": timed.round_ms, "floor": floor, "goal": goal, "hit": hit}
        engine.stop()
        for number in () if draft_len else (1, sizes[-1]):
            ms = [engine.prompts_ms(number, prompt_len) for _ in range(3)][-1]
            yield {"what": f"{number} prompts of {prompt_len}", "value": ms, "floor": None}

    return run


def round_bytes(raw: Config, size: RoundSize, hit: float, later: float) -> float:
    """What a round reads and writes at least: weights, the experts hit, keys and values, and each
    state twice. The MTP layer is read once for each draft; `later`: experts hit after the first."""
    config = model_config_of(dict(raw))
    delta, moe, hidden = config.delta, config.moe, config.hidden_size
    assert delta is not None and moe is not None
    heads, num_states = delta.heads, len(delta.layers)
    net = hidden * (heads.num_projected + heads.num_value_heads * heads.value_dim)
    q_size, kv_size = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    attention = hidden * (3 * q_size + 2 * kv_size)
    kept = 2 * kv_size * size.num_tokens

    def experts(number: float) -> float:
        shared = moe.shared_intermediate_size
        own = 3 * (number * moe.intermediate_size + shared)
        return hidden * (own + moe.num_experts + 1)

    elements = num_states * net + (config.num_layers - num_states) * (attention + kept)
    elements += config.num_layers * experts(hit) + config.vocab_size * hidden
    for draft in range(size.draft_len):
        elements += attention + kept + experts(later if draft else hit) + 2 * hidden * hidden
        elements += config.vocab_size * hidden
    state = 2 * 4 * heads.num_value_heads * heads.key_dim * heads.value_dim
    return WEIGHT_BYTES * elements + size.batch * num_states * state
