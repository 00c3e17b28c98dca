"""The table of speculative modes: one frozen row each. No other module asks which mode is on.

A row says what `build.py` plugs into the loop: the draft weights to load, if any, and how the
drafter is made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tllm_spec.config.draft_tree_config import MatchedDraftsConfig
from tllm_spec.config.engine_config import KVCacheType
from tllm_spec.config.option_checks import find_class, import_path_of
from tllm_spec.config.speculative_config import (
    DecodingBaseConfig,
    DFlashDecodingConfig,
    DraftBackend,
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    EagleDecodingConfig,
    EagleHeadDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    PARDDecodingConfig,
    SADecodingConfig,
    UserProvidedDecodingConfig,
)
from tllm_spec.executor.engine.attention_groups import SinkWindow
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.sampling.sharded_sampler import draft_sampling_of
from tllm_spec.executor.speculative.drafting.draft_backlog import DraftBacklog
from tllm_spec.executor.speculative.drafting.draft_net import DraftLayers, TorchLayers
from tllm_spec.executor.speculative.drafting.drafter import Drafter, When
from tllm_spec.executor.speculative.drafting.external_nets import ExternalModelLayers
from tllm_spec.executor.speculative.drafting.host_drafter import HostDrafter, HostTreeDrafter
from tllm_spec.executor.speculative.drafting.match_or_network import DraftChoice, MatchOrNetwork
from tllm_spec.executor.speculative.drafting.model_drafter import DraftKVManager, ModelDrafter
from tllm_spec.executor.speculative.drafting.network_drafter import NetworkDrafter
from tllm_spec.executor.speculative.drafting.suffix_match import SuffixMatch
from tllm_spec.models.draft_kind import ACCEPTED, HeadKind
from tllm_spec.models.registry import LoadFormat


@dataclass(frozen=True)
class Surroundings:
    """What a mode may build on. `layers`: the draft network, for modes with draft weights;
    `draft_kv`: its cache, where it has pages of its own; `corpus`: rows of texts for every
    request."""

    slots: SlotState
    sampler: Sampler
    max_num_tokens: int
    max_len: int  # tokens of a text
    layers: DraftLayers | None
    draft_kv: DraftKVManager | None
    corpus: Sequence[list[int]] = ()


# Why none of the drafts may be accepted.
NETWORK_CAUSES = (
    "the draft weights were made for another model or another version of it, their settings "
    "(eagle3_layers_to_capture, the vocabulary) are not those of their training, or they are "
    "random (load_format dummy)"
)
TEXT_CAUSES = "the texts repeat nothing of what came before"
HOST_CAUSES = "the drafter reads other tokens than request.tokens, or another tokenizer's ids"


@dataclass(frozen=True)
class Speculation:
    """What a mode adds to the executor. `causes`: of drafts that are never accepted."""

    drafter: Drafter
    resources: list[ResourceManager] = field(default_factory=list)
    causes: str = NETWORK_CAUSES


@dataclass(frozen=True)
class DraftPlan:
    """Which draft weights are to be loaded, and where their KV goes."""

    path: str | None  # None: MTP modules in the target's checkpoint
    load_format: LoadFormat
    is_head: bool  # reads hidden states of the target
    # Layers of the target that a head reads; None: the head's own choice or the default.
    capture_layers: tuple[int, ...] | None = None
    shares_pages: bool = True  # its layers are extra layers of the target's pages
    splits_rounds: bool = False  # it drafts in the tails of split rounds, on the two-model path
    num_modules: int = 0  # of MTP, which are loaded as the target is
    backend: DraftBackend = "torch"
    # Kinds of heads with a folder of their own; a folder that does not say has the first.
    head_kinds: tuple[HeadKind, ...] = ()
    token_map: str | None = None  # a file: the tokens that are drafted; None: all
    # A draft model's own cache has this type; None: as kv_cache_config says.
    kv_cache_dtype: KVCacheType | None = None
    drafts_at_once: bool = False  # a draft model reads mask tokens and drafts all tokens at once
    mask_token: int | None = None  # None: what the model's config.json says
    num_filled: int = 0  # drafts that a head fills in at once, at most; 0: it does not
    window_size: int | None = None  # tokens that it sees; None: as its own config.json says
    sink_size: int | None = None  # first tokens that it sees besides those; None: none

    @property
    def sees(self) -> SinkWindow | None:
        """The part of a text that it sees; None: as its configuration says."""
        if self.window_size is None or self.sink_size is None:
            return None
        return SinkWindow(self.sink_size, self.window_size)

    @property
    def rows_before(self) -> int:
        """Entries that drafting writes besides those of drafts, on the target's pages: a model's
        of the newest token, and a block's of its last mask, too."""
        return 2 if self.num_filled else 0 if self.is_head else 1


@dataclass(frozen=True)
class Mode:
    """One `decoding_type`. `draft_plan`: which draft weights it loads; None: none."""

    build: Callable[[DecodingBaseConfig, Surroundings], Speculation]
    draft_plan: Callable[[DecodingBaseConfig], DraftPlan] | None = None


def _build_user_provided(config: DecodingBaseConfig, around: Surroundings) -> Speculation:
    """Raises ValueError when the objects are of the wrong type."""
    assert isinstance(config, UserProvidedDecodingConfig)
    drafter, manager = config.make_drafter(), config.make_resource_manager()
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f"drafter = {drafter!r} must be a "
            "tllm_spec.executor.speculative.drafting.drafter.Drafter"
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
    if drafter.needed_manager is not None and not isinstance(manager, drafter.needed_manager):
        raise ValueError(
            f"resource_manager = {manager!r}: {type(drafter).__name__} needs a "
            f"{import_path_of(drafter.needed_manager)}"
        )
    sampler = around.sampler
    parts = drafter, manager, around.slots, sampler.state.vocab_size
    host = HostTreeDrafter(*parts) if around.slots.shapes.has_trees else HostDrafter(*parts)
    return Speculation(host, [] if manager is None else [manager], causes=HOST_CAUSES)


def _build_network(config: DecodingBaseConfig, around: Surroundings) -> Speculation:
    layers, slots, kv, draft = around.layers, around.slots, around.draft_kv, draft_plan_of(config)
    assert layers is not None and draft is not None
    net = layers.net
    sampling = draft_sampling_of(net.shard, around.sampler, _draws(config), net.token_map)
    match, choice = _suffix_match(config, around), None
    if match is not None:
        assert isinstance(config, MatchedDraftsConfig) and config.sa_config is not None
        choice = DraftChoice(match, slots, config.sa_config.threshold)
    drafter: Drafter
    if kv is not None:
        assert isinstance(layers, TorchLayers | ExternalModelLayers)
        groups, max_num_tokens = around.sampler.groups, around.max_num_tokens
        drafter = ModelDrafter(layers, kv, slots, groups, sampling, max_num_tokens, choice)
        return Speculation(drafter, [kv, *_shared_texts(match)])
    backlog = DraftBacklog(layers, slots, around.max_num_tokens)
    when = When.TAIL if draft.splits_rounds else When.GRAPH
    parts = layers, slots, sampling, backlog, when
    drafter = network = NetworkDrafter(*parts, scores_trees=choice is not None)
    if choice is not None:
        drafter = MatchOrNetwork(network, choice)
    # Forced text has no draft probabilities to accept against.
    drafter.knows_forced_text = not config.use_rejection_sampling
    return Speculation(drafter, _shared_texts(match))


def _build_suffix_match(config: DecodingBaseConfig, around: Surroundings) -> Speculation:
    match = _suffix_match(config, around)
    assert match is not None
    match.knows_forced_text = not config.use_rejection_sampling
    return Speculation(match, _shared_texts(match), causes=TEXT_CAUSES)


def _suffix_match(config: DecodingBaseConfig, around: Surroundings) -> SuffixMatch | None:
    search = config.text_search(len(around.slots.kv_lens) - 1)
    if search is None:
        return None
    return SuffixMatch(around.slots, around.max_len, search, around.corpus)


def _shared_texts(match: SuffixMatch | None) -> list[ResourceManager]:
    return [] if match is None or match.shared is None else [match.shared]


def _draws(config: DecodingBaseConfig) -> str:
    if not config.use_rejection_sampling:
        return config.draft_sampling
    # On trees the rule needs no draft probabilities: the likeliest tokens are tried.
    return "greedy" if config.drafts_trees else "independent"


def _draft_target_model(config: DecodingBaseConfig) -> DraftPlan:
    assert isinstance(config, DraftTargetDecodingConfig)
    return DraftPlan(
        config.speculative_model,
        config.load_format,
        is_head=False,
        shares_pages=config.draft_target_one_model,
        kv_cache_dtype=config.kv_cache_dtype,
        backend=config.draft_backend,
        window_size=config.draft_window_size,
        sink_size=config.draft_sink_size,
        token_map=config.speculative_token_map,
    )


def _pard_model(config: DecodingBaseConfig) -> DraftPlan:
    assert isinstance(config, PARDDecodingConfig)
    return DraftPlan(
        config.speculative_model,
        config.load_format,
        is_head=False,
        shares_pages=config.draft_target_one_model,
        window_size=config.draft_window_size,
        sink_size=config.draft_sink_size,
        token_map=config.speculative_token_map,
        drafts_at_once=True,
        mask_token=config.mask_token_id,
    )


def _dflash_head(config: DecodingBaseConfig) -> DraftPlan:
    assert isinstance(config, DFlashDecodingConfig)
    return DraftPlan(
        config.speculative_model,
        config.load_format,
        is_head=True,
        capture_layers=config.target_layer_ids,
        head_kinds=ACCEPTED[config.decoding_type],
        window_size=config.draft_window_size,
        sink_size=config.draft_sink_size,
        token_map=config.speculative_token_map,
        mask_token=config.mask_token_id,
        num_filled=config.max_draft_len,
    )


def _eagle_head(config: DecodingBaseConfig) -> DraftPlan:
    """TensorRT-LLM serves EAGLE-3 heads under both names."""
    assert isinstance(config, EagleHeadDecodingConfig)
    return DraftPlan(
        config.speculative_model,
        config.load_format,
        is_head=True,
        capture_layers=config.eagle3_layers_to_capture,
        splits_rounds=not config.eagle3_one_model,
        backend=config.draft_backend,
        head_kinds=ACCEPTED[config.decoding_type],
        window_size=config.draft_window_size,
        sink_size=config.draft_sink_size,
        token_map=config.speculative_token_map,
    )


def _mtp_module(config: DecodingBaseConfig) -> DraftPlan:
    assert isinstance(config, MTPDecodingConfig)
    return DraftPlan(
        config.speculative_model,
        "auto",
        is_head=True,
        splits_rounds=not config.mtp_eagle_one_model,
        num_modules=config.max_draft_len if config.use_mtp_vanilla else 1,
    )


_MODES: dict[type[DecodingBaseConfig], Mode] = {
    NGramDecodingConfig: Mode(_build_suffix_match),
    UserProvidedDecodingConfig: Mode(_build_user_provided),
    DraftTargetDecodingConfig: Mode(_build_network, draft_plan=_draft_target_model),
    PARDDecodingConfig: Mode(_build_network, draft_plan=_pard_model),
    DFlashDecodingConfig: Mode(_build_network, draft_plan=_dflash_head),
    Eagle3DecodingConfig: Mode(_build_network, draft_plan=_eagle_head),
    EagleDecodingConfig: Mode(_build_network, draft_plan=_eagle_head),
    SADecodingConfig: Mode(_build_suffix_match),
    MTPDecodingConfig: Mode(_build_network, draft_plan=_mtp_module),
}


def check_code(config: DecodingBaseConfig) -> None:
    """Raises ValueError for code of users that cannot be imported, or that drafts nothing."""
    config.check_code()
    if isinstance(config, UserProvidedDecodingConfig):
        given, arguments = config.drafter, config.drafter_args
        kind = find_class("drafter", given, arguments) if isinstance(given, str) else type(given)
        if getattr(kind, "prepare_draft_tokens", None) is Drafter.prepare_draft_tokens:
            raise ValueError(
                f"drafter = {given!r} is abstract: it does not define prepare_draft_tokens"
            )


def draft_plan_of(config: DecodingBaseConfig | None) -> DraftPlan | None:
    """The draft model that the mode needs, if it needs one."""
    row = _MODES[type(config)] if config is not None else None
    return row.draft_plan(config) if row and row.draft_plan and config else None


def text_bytes_of(
    config: DecodingBaseConfig | None, num_slots: int, max_len: int, num_corpus: int
) -> int:
    """Device memory that the mode keeps for texts: those of slots, of at most `max_len` tokens, and
    rows of the corpus."""
    search = None if config is None else config.text_search(num_slots - 1)
    if search is None:
        return 0
    return SuffixMatch.num_bytes(num_slots, max_len, search, num_corpus)


def build_speculation(config: DecodingBaseConfig | None, around: Surroundings) -> Speculation:
    """What the mode adds to the executor; None is plain decoding."""
    return Speculation(Drafter()) if config is None else _MODES[type(config)].build(config, around)
