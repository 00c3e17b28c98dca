"""The table of speculative modes: one frozen row each. Nobody else asks which mode it is.

A row says what `build.py` plugs into the loop: the draft weights to load, if any, and how the
drafter is made."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.kv_cache import KVCacheManager
from tllm_spec.executor.resources.ngram_pool import NGramPool
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.speculative.draft_length.unverified_drafts import UnverifiedDrafts
from tllm_spec.executor.speculative.drafting.deferred_drafter import DeferredDrafter
from tllm_spec.executor.speculative.drafting.draft_backlog import DraftBacklog
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers
from tllm_spec.executor.speculative.drafting.drafter import Drafter, NoDrafter, OneModelDrafter
from tllm_spec.executor.speculative.drafting.graph_drafter import GraphDrafter
from tllm_spec.executor.speculative.drafting.host_drafter import HostDrafter
from tllm_spec.executor.speculative.drafting.model_drafter import DraftKVManager, ModelDrafter
from tllm_spec.executor.speculative.drafting.ngram import NGramDrafter, NGramPoolManager
from tllm_spec.executor.speculative.drafting.worker import DraftWorker, RoundEnd
from tllm_spec.models.registry import LoadFormat
from tllm_spec.speculative_config import (
    DecodingBaseConfig,
    DraftModelDecodingConfig,
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    NGramDecodingConfig,
    UserProvidedDecodingConfig,
)


@dataclass(frozen=True)
class DraftEngine:
    """A draft model ready to run, with its own cache."""

    engine: ModelEngine
    kv: KVCacheManager


@dataclass(frozen=True)
class Surroundings:
    """What a mode may build on. `draft` and `layers` are there for modes with such draft
    weights."""

    slots: SlotState
    sampler: Sampler
    max_num_tokens: int
    dummy_slot: int
    draft: DraftEngine | None
    layers: DraftLayers | None


@dataclass(frozen=True)
class Speculation:
    """What a mode adds to the executor. `round_end` is told of every round that the target has run;
    `backlog` has what it puts off inside the forward. `graph_drafter` is the drafter if it can be
    captured. `watch` lets it be seen while nobody asks it for drafts; None: its drafts cost the
    device something."""

    drafter: Drafter
    resources: list[ResourceManager] = field(default_factory=list)
    blame: Callable[[], list[LlmRequest] | None] = lambda: None
    round_end: RoundEnd | None = None
    backlog: DraftBacklog | None = None
    graph_drafter: GraphDrafter | None = None
    watch: Callable[[UnverifiedDrafts], None] | None = None


@dataclass(frozen=True)
class DraftModel:
    """Which draft weights are to be loaded, and where their KV goes."""

    path: str
    load_format: LoadFormat
    is_head: bool  # reads hidden states of the target
    capture_layers: (
        tuple[int, ...] | None
    )  # of the target, for a head; None: the head's own choice or the default
    shares_pages: bool  # its layers are extra layers of the target's pages
    follows_a_round_later: bool  # its KV of a round is written in the next one

    @property
    def drafts_before_the_forward(self) -> bool:
        """In a launch of its own (two-model path)."""
        return self.follows_a_round_later or not self.shares_pages


@dataclass(frozen=True)
class Mode:
    build: Callable[[DecodingBaseConfig, Surroundings], Speculation]
    draft_model: Callable[[DecodingBaseConfig], DraftModel] | None = None


def _build_ngram(config: DecodingBaseConfig, around: Surroundings) -> Speculation:
    assert isinstance(config, NGramDecodingConfig)
    pool = NGramPool(
        max_draft_len=config.max_draft_len,
        max_matching_ngram_size=config.max_matching_ngram_size,
        is_keep_all=config.is_keep_all,
        is_use_oldest=config.is_use_oldest,
        is_public_pool=config.is_public_pool,
        max_pool_entries=config.max_pool_entries,
    )
    return _on_host(NGramDrafter(pool), NGramPoolManager(pool), around)


def _build_user_provided(config: DecodingBaseConfig, around: Surroundings) -> Speculation:
    """Raises ValueError when the objects are not what they are given for."""
    assert isinstance(config, UserProvidedDecodingConfig)
    drafter, manager = config.make_drafter(), config.make_resource_manager()
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f"drafter = {drafter!r} must be a tllm_spec.executor.speculative.drafting.drafter.Drafter"
        )
    for name, limit in drafter.limits.items():
        if limit is not None and limit != getattr(config, name):
            raise ValueError(
                f"{name} = {limit!r} of the drafter is not the {getattr(config, name)!r} of "
                "UserProvidedDecodingConfig"
            )
    if manager is not None and not isinstance(manager, ResourceManager):
        raise ValueError(
            f"resource_manager = {manager!r} must be a "
            "tllm_spec.executor.resources.interface.ResourceManager"
        )
    return _on_host(drafter, manager, around)


def _on_host(
    drafter: Drafter, manager: ResourceManager | None, around: Surroundings
) -> Speculation:
    host = HostDrafter(drafter, manager, around.slots, around.sampler.state.vocab_size)
    return Speculation(host, [] if manager is None else [manager], host.blame, watch=host.watch)


def _build_draft_target(config: DecodingBaseConfig, around: Surroundings) -> Speculation:
    assert isinstance(config, DraftTargetDecodingConfig)
    if config.draft_target_one_model:
        return _one_model(config, around)
    assert around.draft is not None
    engine, kv = around.draft.engine, around.draft.kv
    sampling = DraftSampling(around.sampler, _draws(config))
    drafter = ModelDrafter(
        engine, kv, around.slots, around.sampler.groups, sampling, around.max_num_tokens
    )
    return Speculation(drafter, [DraftKVManager(kv)], graph_drafter=drafter)


def _build_eagle3(config: DecodingBaseConfig, around: Surroundings) -> Speculation:
    assert isinstance(config, Eagle3DecodingConfig)
    if config.eagle3_one_model:
        return _one_model(config, around)
    assert around.layers is not None
    backlog = _backlog(around)
    worker, max_len = _worker(config, around, backlog), around.layers.rows.max_len
    drafter = DeferredDrafter(
        worker, backlog, around.slots, around.sampler.groups, around.dummy_slot, max_len
    )
    return Speculation(drafter, round_end=drafter, graph_drafter=drafter)


def _one_model(config: DraftModelDecodingConfig, around: Surroundings) -> Speculation:
    backlog = _backlog(around)
    return Speculation(
        OneModelDrafter(), round_end=_worker(config, around, backlog), backlog=backlog
    )


def _backlog(around: Surroundings) -> DraftBacklog:
    assert around.layers is not None
    return DraftBacklog(around.layers, around.slots, around.max_num_tokens)


def _worker(
    config: DraftModelDecodingConfig, around: Surroundings, backlog: DraftBacklog
) -> DraftWorker:
    assert around.layers is not None
    sampling = DraftSampling(around.sampler, _draws(config), around.layers.net.token_map)
    return DraftWorker(around.layers, around.slots, sampling, backlog)


def _draws(config: DraftModelDecodingConfig) -> str:
    return "independent" if config.use_rejection_sampling else config.draft_sampling


def _draft_target_model(config: DecodingBaseConfig) -> DraftModel:
    assert isinstance(config, DraftTargetDecodingConfig)
    return DraftModel(
        config.speculative_model,
        config.load_format,
        is_head=False,
        capture_layers=None,
        shares_pages=config.draft_target_one_model,
        follows_a_round_later=False,
    )


def _eagle3_head(config: DecodingBaseConfig) -> DraftModel:
    assert isinstance(config, Eagle3DecodingConfig)
    return DraftModel(
        config.speculative_model,
        config.load_format,
        is_head=True,
        capture_layers=config.eagle3_layers_to_capture,
        shares_pages=True,
        follows_a_round_later=not config.eagle3_one_model,
    )


_MODES: dict[type[DecodingBaseConfig], Mode] = {
    NGramDecodingConfig: Mode(_build_ngram),
    UserProvidedDecodingConfig: Mode(_build_user_provided),
    DraftTargetDecodingConfig: Mode(_build_draft_target, draft_model=_draft_target_model),
    Eagle3DecodingConfig: Mode(_build_eagle3, draft_model=_eagle3_head),
}


def draft_model_of(config: DecodingBaseConfig | None) -> DraftModel | None:
    """The draft model that the mode needs, if it needs one."""
    row = _MODES[type(config)] if config is not None else None
    return row.draft_model(config) if row and row.draft_model and config else None


def build_speculation(config: DecodingBaseConfig | None, around: Surroundings) -> Speculation:
    """What the mode adds to the executor; None is plain decoding."""
    return (
        Speculation(NoDrafter()) if config is None else _MODES[type(config)].build(config, around)
    )
