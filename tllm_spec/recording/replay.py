"""How many drafts of another configuration recorded traffic would have had accepted: `tllm-bench
replay`.

The text of a request does not depend on the drafter. So the engine drafts and verifies with a
target whose choice at each position is the recorded token (`ReplayedSampler`), and its counts are
those of serving. No layer of the target runs in these rounds. A head reads recorded hidden states,
or those of one pass over the texts in large chunks (`ReplayedEngine`). Drafts that come from the
text, or from a draft model, do not depend on them: then the target is one small layer (`STAND_IN`),
and its weights are not loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from tllm_spec.config.engine_config import SchedulerConfig
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import DecodingBaseConfig
from tllm_spec.executor.build import BuiltExecutor, build_executor
from tllm_spec.executor.engine.replayed_engine import ReplayedEngine
from tllm_spec.executor.request import (
    DecodingRules,
    DraftCounters,
    LlmRequest,
    RequestPause,
    StopMatch,
)
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.executor.resources.kv_cache import ROUNDS_AHEAD
from tllm_spec.executor.speculative.draft_length.adaptive import rows_with_contexts
from tllm_spec.executor.speculative.modes import draft_plan_of
from tllm_spec.grammar.guided_decoding import compiler_name
from tllm_spec.lora_request import name_of_version, target_version
from tllm_spec.models.registry import model_config
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.progress import progress
from tllm_spec.recording.traffic_folder import read_states_file
from tllm_spec.recording.traffic_record import TrafficRecord
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import tokenizer_of
from tllm_spec.zoo.registry import resolve_model

# Of a replay, whatever was served: they change no count.
MAX_BATCH_SIZE = 64
MAX_TOKENS = 1 << 15  # in the KV cache, unless a text is longer
NUM_WITH_STATES = 256  # texts whose hidden states are in the host's memory together
STEPS_OF_PROGRESS = 32  # after so many, it is looked how many requests have ended
PLAIN_RULES = DecodingRules.from_params(SamplingParams(), vocab_size=1, end_ids=(), encode=None)
STAND_IN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@dataclass
class Replayed:
    """What a configuration would have done. requests: in the records' order. simulated: why these
    counts may differ from those of serving; empty: they are equal."""

    requests: list[SpeculativeStats]
    simulated: list[str] = field(default_factory=list)

    @property
    def total(self) -> SpeculativeStats:
        return sum(self.requests, SpeculativeStats())


@dataclass
class EndOfText:
    """Ends a request where it ended when it was recorded, by a stop string or by its client."""

    num_left: int

    def feed(self, token: int) -> StopMatch | None:
        self.num_left -= 1
        return StopMatch("", "", 0) if self.num_left <= 0 else None


def replay(
    records: Sequence[TrafficRecord],
    args: LlmArgs,
    states: Mapping[str, Path] = MappingProxyType({}),
) -> Replayed:
    """states: as `states_files`, of the same model. Raises ValueError for arguments that cannot be
    replayed, and for records that do not fit the model."""
    spec = args.speculative_config
    if spec is None:
        raise ValueError("speculative_config = None: nothing to replay, as no round has drafts")
    _check(args, spec)
    simulated = why_simulated(records, args)
    texts = {index: [*each.prompt, *each.output] for index, each in enumerate(records)}
    longest = max(map(len, texts.values()), default=0)
    vocab_size = model_config(resolve_model(args.model)).vocab_size
    for record in records:
        record.check_tokens(vocab_size)
    with _target_of(_replayable(args, spec, longest)) as built_args:
        tokenizer = tokenizer_of(args)
        built = build_executor(built_args, tokenizer, lambda responses: None, texts=texts)
    requests = [request_of(number, each, built.limits) for number, each in enumerate(records)]
    built.executor.enter_thread()
    engine = built.executor.parts.runner.engine
    if isinstance(engine, ReplayedEngine) and _use_adapters(built, requests, records, states):
        simulated.append("some requests had a LoRA adapter that lora_dir does not have")
    if not isinstance(engine, ReplayedEngine):
        run_to_end(built, requests, "replay")
    else:
        for first in range(0, len(requests), NUM_WITH_STATES):
            part = slice(first, first + NUM_WITH_STATES)
            _find_states(built, engine, requests[part], records[part], states)
            run_to_end(built, requests[part], "replay")
    if any(map(_needs_host, records)) and any(each.draft_pause.num_pauses for each in requests):
        simulated.append("next to logits processors, pauses of drafts begin a round earlier")
    return Replayed([request.counters.stats() for request in requests], simulated)


def run_to_end(built: BuiltExecutor, requests: Sequence[LlmRequest], title: str = "") -> None:
    """title: of its progress; none is shown without. Raises ValueError if a request fails."""
    built.queue.put(list(requests))
    with progress(title, len(requests), "requests", every=5, is_shown=bool(title)) as bar:
        running, num_steps = list(requests), 0
        while built.executor.step():
            num_steps += 1
            if title and num_steps % STEPS_OF_PROGRESS == 0:
                number = len(running)
                running = [each for each in running if not each.is_finished]
                bar.advance(number - len(running))
    for request in requests:
        if request.error is not None:
            raise ValueError(f"a recorded request cannot be replayed: {request.error}")


def _use_adapters(
    built: BuiltExecutor,
    requests: Sequence[LlmRequest],
    records: Sequence[TrafficRecord],
    states: Mapping[str, Path],
) -> bool:
    """Gives the requests their adapters, with which a target's hidden states are read. Returns
    whether some are not loaded, and the states were not recorded."""
    slots = built.executor.parts.adapters
    infos = () if slots is None else slots.infos.values()
    loaded, are_missing = {target_version(info.version) for info in infos}, False
    for request, record in zip(requests, records, strict=True):
        if record.adapter is None:
            continue
        if target_version(record.adapter) in loaded:
            request.adapter = name_of_version(record.adapter)
        else:
            are_missing |= record.id not in states
    return are_missing


def _find_states(
    built: BuiltExecutor,
    engine: ReplayedEngine,
    requests: Sequence[LlmRequest],
    records: Sequence[TrafficRecord],
    states: Mapping[str, Path],
) -> None:
    """Gives the engine the hidden states of these requests, the recorded ones or else by reading
    the texts."""
    assert engine.spec is not None
    layers, num_layers = engine.spec.layers, engine.model.config.num_layers
    engine.states.clear()
    readers = []
    for request, record in zip(requests, records, strict=True):
        file = states.get(record.id)
        found = None
        if file is not None:
            recorded = read_states_file(file)
            if recorded.record.prompt + recorded.record.output != record.prompt + record.output:
                raise ValueError(f"{file} has hidden states of another text than {record.place}")
            found = recorded.of_layers(layers, num_layers)
        if found is not None and found.shape[1] != engine.spec.buffer.shape[1]:
            raise ValueError(f"{file}: the hidden states are of another model")
        if found is not None:
            engine.states[request.request_id] = found
        else:
            text = [*record.prompt, *record.output][:-1]  # nothing reads the last token
            whole: dict[str, Any] = {"tokens": text, "max_tokens": 1, "draft_limit": 0}
            readers.append(replace(request, stop_checker=None, **whole))
    engine.is_reading = True
    run_to_end(built, readers, "hidden states" if readers else "")
    engine.is_reading = False
    # The requests have the same ids.
    built.executor.parts.sampler.groups.forget()


def why_simulated(records: Sequence[TrafficRecord], args: LlmArgs) -> list[str]:
    """What makes counts of serving differ from those of a replay."""
    spec = args.speculative_config
    assert spec is not None
    search = spec.text_search(args.max_batch_size)
    causes = {
        "rejection sampling accepts by chance": spec.use_rejection_sampling,
        "relaxed acceptance accepts other tokens": spec.relaxed_rule is not None,
        "a public pool depends on the order of requests": (
            search is not None and search.num_shared > 0
        ),
        "the draft length follows the load": spec.length_varies,
        "the rows of a round follow the load": spec.verify_budget is not None,
        "a request without drafts may leave those that join it without drafts for a round": any(
            each.draft_limit == 0 for each in records
        ),
        "what sa_config has learned depends on the order of requests": _learns(spec),
        "some requests had a grammar or a budget": any(each.guided for each in records),
        "some grammars were another compiler's, which gives a seed other texts": any(
            each.guided not in (False, "thinking_budget")
            and not str(each.guided).endswith(compiler_name())
            for each in records
        ),
        "some requests were preempted": any(each.num_preemptions for each in records),
        "pages of the draft model may be missing": _may_lack_pages(records, args),
        "max_num_tokens cuts the drafts of large batches": _cuts_drafts(records, args, spec),
    }
    return [cause for cause, holds in causes.items() if holds]


@contextmanager
def _target_of(args: LlmArgs) -> Iterator[LlmArgs]:
    """The arguments with a target that gives the drafter what it reads: a stand-in where that is
    the text only."""
    draft = draft_plan_of(args.speculative_config)
    if draft is not None and draft.is_head:
        yield args
        return
    with TemporaryDirectory() as folder:
        config = model_config(resolve_model(args.model))
        own = {
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_positions,
            "torch_dtype": str(config.dtype).removeprefix("torch."),
        }
        (Path(folder) / "config.json").write_text(json.dumps(STAND_IN | own))
        yield args.model_copy(
            update={
                "model": folder,
                "load_format": "dummy",
                "deterministic": False,
                "lora_config": None,
            }
        )


def _check(args: LlmArgs, spec: DecodingBaseConfig) -> None:
    if args.tensor_parallel_size > 1:
        raise ValueError(
            f"tensor_parallel_size = {args.tensor_parallel_size} is not replayed; 1 is accepted"
        )
    if spec.synthetic_acceptance_rates is not None:
        raise ValueError("synthetic_acceptance_rates: nothing to replay, as they say what happens")


def _replayable(args: LlmArgs, spec: DecodingBaseConfig, longest: int) -> LlmArgs:
    """The same drafter, whose drafts are accepted where they equal the text, on a KV cache of
    limited size. longest: tokens of a text. There are only so many requests at once that all have
    rows for their drafts, and pages, also for rounds that are scheduled ahead."""
    window, cache = spec.shapes.longest.window, args.kv_cache_config
    of_request = longest + (ROUNDS_AHEAD + 2) * window + 2 * cache.tokens_per_block
    max_tokens = max(MAX_TOKENS, of_request)
    num_windows = rows_with_contexts(args.max_num_tokens) // window
    at_once = min(MAX_BATCH_SIZE, num_windows, max_tokens // of_request)
    off: dict[str, object] = {"use_rejection_sampling": False}
    if spec.relaxed_rule is not None:
        off["use_relaxed_acceptance_for_thinking"] = False
    return args.model_copy(
        update={
            "speculative_config": spec.model_copy(update=off),
            "guided_decoding_backend": None,
            "record_traffic": None,
            "record_hidden_states": 0.0,
            # Another engine of the process may be running, which forbids captures.
            "cuda_graph_config": None,
            "enable_chunked_prefill": True,
            "prefill_cuda_graph_backend": "disabled",
            "max_batch_size": max(1, at_once),
            "kv_cache_config": cache.model_copy(
                update={"max_tokens": max_tokens, "enable_block_reuse": False}
            ),
            "scheduler_config": SchedulerConfig(),  # no request is preempted
        }
    )


def request_of(number: int, record: TrafficRecord, limits: RequestLimits) -> LlmRequest:
    """The recorded request. What changes the target's choice is left out. Raises ValueError for one
    that the engine cannot run."""
    wanted, longest = record.draft_limit, limits.max_draft_len
    sampling = record.sampling
    rules = replace(
        PLAIN_RULES,
        temperature=sampling["temperature"],
        top_k=sampling["top_k"],
        top_p=sampling["top_p"],
        min_p=sampling["min_p"],
        end_ids=frozenset(sampling["end_ids"]),
        stop_token_ids=frozenset(sampling["stop_token_ids"]),
    )
    if (length := len(record.prompt) + len(record.output)) > limits.max_seq_len:
        raise ValueError(
            f"{record.place}: the text has {length} tokens, and the engine of a replay runs "
            f"{limits.max_seq_len}"
        )
    return LlmRequest(
        request_id=number,
        tokens=list(record.prompt),
        rules=rules,
        seed=record.seed,
        arrival=number,
        max_tokens=min(record.max_tokens, limits.max_seq_len - len(record.prompt)),
        draft_limit=longest if wanted is None else min(wanted, longest),
        cache_salt=record.adapter,  # apart from others, as served
        counters=DraftCounters(longest),
        draft_pause=RequestPause(limits.pause_patience),
        stop_checker=EndOfText(len(record.output)),
    )


def _needs_host(record: TrafficRecord) -> bool:
    """Whether the host had to see each token of the request, so that no rounds overlapped."""
    return bool(record.sampling.get("edits") or record.sampling.get("bad_sequences"))


def _cuts_drafts(records: Sequence[TrafficRecord], args: LlmArgs, spec: DecodingBaseConfig) -> bool:
    """Only the largest batch leaves no rows for prompts."""
    most, window = min(_most_at_once(records), args.max_batch_size), spec.shapes.longest.window
    others, room = min(most, args.max_batch_size - 1), args.max_num_tokens
    return most * window > room or others * window > rows_with_contexts(room)


def _may_lack_pages(records: Sequence[TrafficRecord], args: LlmArgs) -> bool:
    """A round has no drafts where a draft model's own pages do not suffice."""
    draft, max_tokens = draft_plan_of(args.speculative_config), args.kv_cache_config.max_tokens
    if draft is None or draft.shares_pages or max_tokens is None:
        return False
    longest = max((len(each.prompt) + len(each.output) for each in records), default=0)
    return _most_at_once(records) * longest > max_tokens


def _learns(spec: DecodingBaseConfig) -> bool:
    match = getattr(spec, "sa_config", None)
    return match is not None and match.threshold is None


def _most_at_once(records: Sequence[TrafficRecord]) -> int:
    """The largest number of requests that were in the engine together."""
    changes = []
    for record in records:
        last = record.rounds[-1][0] if record.rounds else 0
        changes += [(record.arrived_us, 1), (record.arrived_us + (last or 0), -1)]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
