"""The table of speculative modes: one frozen row each. No other module asks which mode is on.

A row says what `build.py` plugs into the loop: the draft weights to load, if any, and how the
drafter is made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tllm_spec.config.draft_tree_config import DraftTreeDecodingConfig
from tllm_spec.config.option_checks import find_class, import_path_of
from tllm_spec.config.speculative_config import (
    DecodingBaseConfig,
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    DSparkDecodingConfig,
    Eagle3DecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    PARDDecodingConfig,
    SADecodingConfig,
    UserProvidedDecodingConfig,
)
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.sampling.sharded_sampler import draft_sampling_of
from tllm_spec.executor.speculative.drafting.draft_net import DraftNet
from tllm_spec.executor.speculative.drafting.drafter import Drafter, When
from tllm_spec.executor.speculative.drafting.heads import DraftPlan
from tllm_spec.executor.speculative.drafting.host_drafter import HostDrafter
from tllm_spec.executor.speculative.drafting.model_drafter import DraftKVManager, ModelDrafter
from tllm_spec.executor.speculative.drafting.network_drafter import (
    KeyReadingDrafter,
    NetworkDrafter,
)
from tllm_spec.executor.speculative.drafting.suffix_match import DraftChoice, SuffixMatch
from tllm_spec.models.draft_kind import ACCEPTED, HeadKind


@dataclass(frozen=True)
class Surroundings:
    """What a mode may build on. `net`: the draft network, for modes with draft weights; `draft_kv`:
    its cache, where it has pages of its own; `corpus`: rows of texts for every request."""

    slots: SlotState
    sampler: Sampler
    max_num_tokens: int
    max_len: int  # tokens of a text
    net: DraftNet | None
    draft_kv: DraftKVManager | None
    corpus: Sequence[list[int]] = ()


@dataclass(frozen=True)
class Mode:
    """One `decoding_type`. kinds: as in `DraftPlan`; None: it loads no draft weights. one_model:
    the option that chooses the path of its network; None: it has the one-model path only."""

    build: Callable[[DecodingBaseConfig, Surroundings], Drafter]
    kinds: tuple[HeadKind, ...] | None = None
    one_model: str | None = None


def _build_user_provided(config: DecodingBaseConfig, around: Surroundings) -> Drafter:
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
    return HostDrafter(drafter, manager, around.slots, around.sampler.state.vocab_size)


def _build_network(config: DecodingBaseConfig, around: Surroundings) -> Drafter:
    net, slots, kv, draft = around.net, around.slots, around.draft_kv, draft_plan_of(config)
    assert net is not None and draft is not None
    sampling = draft_sampling_of(net.shard, around.sampler, _draws(config), net.token_map)
    match, choice = _suffix_match(config, around), None
    texts = () if match is None else match.resources
    if match is not None:
        assert isinstance(config, DraftTreeDecodingConfig) and config.sa_config is not None
        choice = DraftChoice(match, slots, config.sa_config.threshold)
    max_num_tokens = around.max_num_tokens
    if kv is not None:
        parts = net, kv, slots, around.sampler.groups, sampling, max_num_tokens
        model = ModelDrafter(*parts, choice)
        model.resources = [kv, *texts]
        return model
    kind = NetworkDrafter if net.has_keys else KeyReadingDrafter
    drafter = kind(net, slots, sampling, max_num_tokens, draft.when, choice)
    # Forced text has no draft probabilities to accept against.
    drafter.knows_forced_text = not config.use_rejection_sampling
    drafter.resources = texts
    return drafter


def _build_suffix_match(config: DecodingBaseConfig, around: Surroundings) -> Drafter:
    match = _suffix_match(config, around)
    assert match is not None
    match.knows_forced_text = not config.use_rejection_sampling
    return match


def _suffix_match(config: DecodingBaseConfig, around: Surroundings) -> SuffixMatch | None:
    search = config.text_search(len(around.slots.kv_lens) - 1)
    if search is None:
        return None
    return SuffixMatch(around.slots, around.max_len, search, around.corpus)


def _draws(config: DecodingBaseConfig) -> str:
    if not config.use_rejection_sampling:
        return config.draft_sampling
    # On trees the rule needs no draft probabilities: the likeliest tokens are tried.
    return "greedy" if config.drafts_trees else "independent"


_MODES: dict[type[DecodingBaseConfig], Mode] = {
    NGramDecodingConfig: Mode(_build_suffix_match),
    UserProvidedDecodingConfig: Mode(_build_user_provided),
    DraftTargetDecodingConfig: Mode(_build_network, (), "draft_target_one_model"),
    PARDDecodingConfig: Mode(_build_network, (), "draft_target_one_model"),
    DFlashDecodingConfig: Mode(_build_network, ACCEPTED["DFlash"]),
    DSparkDecodingConfig: Mode(_build_network, ACCEPTED["DSpark"]),
    Eagle3DecodingConfig: Mode(_build_network, ACCEPTED["Eagle3"], "eagle3_one_model"),
    # TensorRT-LLM serves EAGLE-3 heads under both names.
    EagleDecodingConfig: Mode(_build_network, ACCEPTED["Eagle"], "eagle3_one_model"),
    SADecodingConfig: Mode(_build_suffix_match),
    MTPDecodingConfig: Mode(_build_network, ("MTP", "Gemma 4 assistant"), "mtp_eagle_one_model"),
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
    """The draft weights that the mode loads, if it loads any."""
    if config is None or (mode := _MODES[type(config)]).kinds is None:
        return None
    if mode.one_model is None or getattr(config, mode.one_model):
        when = When.GRAPH
    else:
        when = When.TAIL if mode.kinds else When.DEVICE
    return DraftPlan(config, mode.kinds, when)


def text_bytes_of(
    config: DecodingBaseConfig | None, num_slots: int, max_len: int, num_corpus: int
) -> int:
    """Device memory that the mode keeps for texts: those of slots, of at most `max_len` tokens, and
    rows of the corpus."""
    search = None if config is None else config.text_search(num_slots - 1)
    if search is None:
        return 0
    return SuffixMatch.num_bytes(num_slots, max_len, search, num_corpus)


def build_drafter(config: DecodingBaseConfig | None, around: Surroundings) -> Drafter:
    """The mode's drafter; None is plain decoding."""
    return Drafter() if config is None else _MODES[type(config)].build(config, around)
