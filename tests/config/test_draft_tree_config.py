"""Options of draft trees: TensorRT-LLM's names, SGLang's aliases, and refusals with numbers."""

from typing import Any

import pytest

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape, DraftShapes, chain_of
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    MTPDecodingConfig,
    PARDDecodingConfig,
    SAEnhancerConfig,
    UserProvidedDecodingConfig,
    speculative_config_from,
)
from tllm_spec.executor.speculative.draft_length.adaptive import controller_for

TREE: dict[str, Any] = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_draft_len": 3}


def eagle3(**options: Any) -> Eagle3DecodingConfig:
    return Eagle3DecodingConfig(speculative_model="head", **options)


def test_a_tree_has_topk_times_depth_nodes_unless_it_says_otherwise() -> None:
    assert eagle3(**TREE).max_total_draft_tokens == 12
    assert eagle3(**TREE, max_total_draft_tokens=20).shapes.longest == DraftShape(3, 20, 4)
    assert eagle3(**TREE | {"max_draft_len": 17}).max_total_draft_tokens == 63, "the most"


def test_a_chain_has_as_many_nodes_as_its_length() -> None:
    assert eagle3(max_draft_len=3).max_total_draft_tokens == 3
    assert eagle3(max_draft_len=3, max_total_draft_tokens=3).shapes.longest == chain_of(3)
    one_child = eagle3(**TREE | {"dynamic_tree_max_topK": 1})
    assert not one_child.drafts_trees and one_child.shapes.longest == chain_of(3)


def test_shorter_drafts_are_shallower_trees_of_as_many_nodes_as_there_can_be() -> None:
    shapes = eagle3(**TREE, max_total_draft_tokens=24).shapes
    assert [shapes.of(length) for length in range(4)] == [
        NO_DRAFTS,
        DraftShape(1, 4, 4),
        DraftShape(2, 20, 4),
        DraftShape(3, 24, 4),
    ]


def test_sglangs_names_mean_the_same_and_count_the_root() -> None:
    sglang = {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 13,
    }
    assert eagle3(**sglang) == eagle3(**TREE, max_total_draft_tokens=12)
    chain = {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    assert eagle3(**chain).shapes.longest == chain_of(3)


@pytest.mark.parametrize(
    ("decoding_type", "options"),
    [
        ("NGram", {}),
        ("Draft_Target", {"speculative_model": "model"}),
        ("Draft_Target", {"speculative_model": "model", "draft_target_one_model": True}),
        ("Eagle", {"speculative_model": "head"}),
        ("MTP", {}),
    ],
)
def test_sglangs_names_are_those_of_every_drafter_of_trees(
    decoding_type: str, options: dict[str, Any]
) -> None:
    def shape_of(topk: int, total: int) -> DraftShape:
        sglang = {
            "speculative_num_steps": 3,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": total,
        }
        config = speculative_config_from({"decoding_type": decoding_type} | options | sglang)
        assert isinstance(config, DecodingBaseConfig)
        return config.shapes.longest

    assert shape_of(4, 13) == DraftShape(3, 12, 4)
    assert shape_of(1, 4) == chain_of(3)


def test_sglangs_names_of_depth_and_number_are_those_of_a_users_drafter() -> None:
    names = {"speculative_num_steps": 3, "speculative_num_draft_tokens": 8}
    config = UserProvidedDecodingConfig(drafter=object(), **names)
    assert (config.max_draft_len, config.max_total_draft_tokens) == (3, 7)


def test_a_refusal_says_that_sglangs_number_counts_the_root() -> None:
    names = {"speculative_num_steps": 2, "speculative_eagle_topk": 2}
    with pytest.raises(ValueError, match=r"7 is more than 6: .*\n.* = 8 counts the root: .* = 7"):
        eagle3(**names, speculative_num_draft_tokens=8)
    with pytest.raises(ValueError, match=r"= 8 means max_total_draft_tokens = 7, which .* 5"):
        eagle3(**names, speculative_num_draft_tokens=8, max_total_draft_tokens=5)
    with pytest.raises(ValueError, match="greater than 0") as refusal:
        eagle3(**names | {"speculative_eagle_topk": 0}, speculative_num_draft_tokens=5)
    assert "root" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_total_draft_tokens": 37}, "37 is more than 36: 4 paths of 3 steps have 4 .* = 36"),
        ({"max_draft_len": 6, "max_total_draft_tokens": 64}, "64 is more than 63"),
        ({"max_total_draft_tokens": 2}, "2 is fewer than max_draft_len = 3"),
        ({"max_draft_len": 18, "max_total_draft_tokens": 20}, r"\(18 - 1\) \* 4 = 68 .* 64 is the"),
        ({"dynamic_tree_max_topK": 17}, "dynamic_tree_max_topK = 17 is more than 16"),
        ({"dynamic_tree_max_topK": None}, "needs dynamic_tree_max_topK"),
        (
            {"max_non_leaves_per_layer": 4},
            "layer = 4 is refused: it has no counterpart",
        ),
        ({"use_dynamic_tree": False}, "dynamic_tree_max_topK = 4 needs use_dynamic_tree: true"),
    ],
)
def test_an_impossible_tree_is_refused_with_its_numbers(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        eagle3(**TREE | options)


def test_an_old_and_a_new_name_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"_topk = 8 means .* = 8, which is given as 4"):
        eagle3(**TREE, speculative_eagle_topk=8)


def test_a_static_tree_says_how_deep_it_is_and_how_many_nodes_it_has() -> None:
    choices = [[1], [0], [0, 2], [0, 0], [0]]
    ordered = ((0,), (1,), (0, 0), (0, 2))
    for given in (choices, str(choices)):
        spec = eagle3(eagle_choices=given)
        assert (spec.max_draft_len, spec.max_total_draft_tokens) == (2, 4)
        assert spec.shapes.of(2) == DraftShape(2, 4, 3, ordered)
        assert spec.shapes.of(1) == DraftShape(1, 2, 2, ordered[:2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eagle_choices": [[0], [1, 0]]}, r"continues \[1\], which is not listed"),
        ({"eagle_choices": [[0], [-1]]}, "a list of paths of ranks from 0 on is needed"),
        ({"eagle_choices": "[[0], "}, "a list of paths of ranks from 0 on is needed"),
        ({"eagle_choices": []}, r"^eagle_choices = \[\]: a list of paths of ranks from 0 on"),
        ({"eagle_choices": "list()"}, "a list of paths of ranks from 0 on is needed"),
        ({"eagle_choices": [[0]], "max_draft_len": 3}, "max_draft_len = 3 is not 1"),
        ({"eagle_choices": [[0]], **TREE, "max_draft_len": 1}, "are exclusive"),
        ({"eagle_choices": [[0], [16]]}, "has the rank 16; 15 is the most"),
        ({"eagle_choices": [[0] * n for n in range(1, 65)]}, "has 64 paths; a tree has 63"),
    ],
)
def test_a_static_tree_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eagle3(**options)


def test_thresholds_of_rejection_sampling_have_sglangs_aliases_and_need_a_tree() -> None:
    lossy = {
        "speculative_accept_threshold_single": 0.5,
        "speculative_accept_threshold_acc": 0.25,
        "use_rejection_sampling": True,
    }
    spec = eagle3(**TREE, **lossy)
    assert (spec.threshold_single, spec.threshold_acc) == (0.5, 0.25)
    with pytest.raises(ValueError, match="need use_rejection_sampling: true and a draft tree"):
        eagle3(max_draft_len=3, **lossy)
    with pytest.raises(ValueError, match="need use_rejection_sampling: true and a draft tree"):
        eagle3(**TREE, threshold_acc=0.5)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([0.5, 0.4, 0.3], "of a tree they are a list of probabilities for each depth"),
        ([[0.6, 0.5], [0.1], [0.1]], "add up to 1 at most"),
        ([[0.6, -0.5], [0.1], [0.1]], "probabilities are in 0..1"),
        ([[0.6, 0.2], [0.1]], "has length 2, not max_draft_len = 3"),
    ],
)
def test_synthetic_rates_of_a_tree_are_by_depth_and_rank(rates: Any, message: str) -> None:
    eagle3(**TREE, synthetic_acceptance_rates=[[0.6, 0.2], [0.5], [0.3, 0.3, 0.3]])
    with pytest.raises(ValueError, match=message):
        eagle3(**TREE, synthetic_acceptance_rates=rates)
    with pytest.raises(ValueError, match="of a chain they are one for each draft"):
        eagle3(max_draft_len=1, synthetic_acceptance_rates=[[0.5]])


TREES = [
    {"max_draft_len": 2, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 4},
    {"max_draft_len": 3, "dynamic_tree_max_topK": 4, "max_total_draft_tokens": 10},
]


def test_adaptive_trees_are_tiers_after_the_chains_of_every_length() -> None:
    spec = eagle3(**TREE, adaptive={"candidate_steps": [0, 2], "candidate_trees": TREES[::-1]})
    shapes = spec.shapes
    assert [shapes.of(length) for length in range(4)] == list(map(chain_of, range(4)))
    assert [shapes.of(tier).name for tier in shapes.further_tiers] == ["2x2/4", "3x4/10"]
    assert shapes.longest == DraftShape(3, 12, 4)
    controller = controller_for(spec)
    assert controller.state()["draft_lens"] == [0, 2, "2x2/4", "3x4/10"]


def test_matches_without_the_networks_drafts_are_a_tier_where_lengths_reach_the_longest() -> None:
    slots = {1: {"candidate_steps": [0, 3]}, 8: {"candidate_steps": [0, 1]}}
    for trees in ({"max_draft_len": 3}, TREE):
        spec = eagle3(**trees, adaptive=slots, sa_config={})
        shapes, controller = spec.shapes, controller_for(spec)
        assert shapes.copied_tier == 4 and shapes.name(4) == "3 copied"
        assert [4 in controller.tiers_at(size) for size in (1, 8)] == [True, False]
    assert eagle3(max_draft_len=3, adaptive=slots).shapes.copied_tier is None
    ema = {"strategy": "ema", "1": {"candidate_steps": [1, 3]}}
    assert eagle3(max_draft_len=3, adaptive=ema, sa_config={}).shapes.copied_tier is None


def test_a_slot_has_its_own_trees_and_without_any_there_are_three_by_default() -> None:
    slots = {1: {"candidate_steps": [3], "candidate_trees": TREES}, 8: {"candidate_steps": [0]}}
    slots[16] = {"candidate_steps": [0, 1], "candidate_trees": []}
    controller = controller_for(eagle3(**TREE, adaptive=slots))
    reached = [sorted(controller.tiers_at(size)) for size in (1, 8, 16)]
    assert reached == [[3, 4, 5], [0, 4, 5], [0, 1]]
    large = {"max_draft_len": 5, "dynamic_tree_max_topK": 8, "max_total_draft_tokens": 31}
    default = eagle3(use_dynamic_tree=True, **large, adaptive={}).shapes
    names = [default.of(tier).name for tier in default.further_tiers]
    assert names == ["3x2/7", "4x4/15", "5x8/31"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TREE | {"adaptive": {"candidate_trees": [TREES[1] | {"max_draft_len": 4}]}},
         "max_draft_len: 3, dynamic_tree_max_topK: 4, max_total_draft_tokens: 12} is the most"),
        (TREE | {"adaptive": {"candidate_trees": [TREES[0] | {"max_total_draft_tokens": 7}]}},
         r"max_total_draft_tokens must be in 2\.\.6"),
        ({"max_draft_len": 3, "adaptive": {"candidate_trees": TREES}},
         "candidate_trees needs use_dynamic_tree: true"),
        (TREE | {"adaptive": {"candidate_trees": [5]}}, "a list of trees is needed"),
        (TREE | {"adaptive": {"candidate_trees": [{"max_draft_len": 2}]}},
         "dynamic_tree_max_topK is required"),
        (TREE | {"adaptive": {}, "draft_len_schedule": {1: 3, 8: 1}},
         "with adaptive trees a draft length does not limit the work of a round"),
    ],
)  # fmt: skip
def test_adaptive_trees_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eagle3(**options)


def test_ema_chooses_the_depth_of_the_tree_as_without_adaptive_trees() -> None:
    ema = {"strategy": "ema", "1": {"candidate_steps": [1, 3]}}
    shapes = eagle3(**TREE, adaptive=ema).shapes
    assert not shapes.further_tiers and shapes.of(3) == DraftShape(3, 12, 4)


# `sa_config`: what it takes, what it does not, and why.


EAGLE3 = {"decoding_type": "Eagle3", "speculative_model": "h", "max_draft_len": 3}
MATCHED_TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2}


def sa_config_of(**config: Any) -> Any:
    spec = LlmArgs(model="m", speculative_config=config).speculative_config
    served = Eagle3DecodingConfig, MTPDecodingConfig, DraftTargetDecodingConfig, PARDDecodingConfig
    assert isinstance(spec, served)
    return spec.sa_config


@pytest.mark.parametrize(
    "others",
    [
        EAGLE3,
        EAGLE3 | {"eagle3_one_model": False},
        EAGLE3 | MATCHED_TREE,
        {"decoding_type": "MTP"},
        EAGLE3 | {"decoding_type": "Draft_Target", "draft_target_one_model": True},
        EAGLE3 | {"decoding_type": "Draft_Target"},
        EAGLE3 | {"decoding_type": "PARD", "draft_target_one_model": False},
    ],
    ids=["eagle3", "eagle3_two_model", "eagle3_tree", "mtp", "one_model", "two_model", "pard"],
)
def test_it_is_a_mapping_or_an_object_whose_threshold_may_be_left_out(
    others: dict[str, Any],
) -> None:
    assert sa_config_of(**others) is None
    assert sa_config_of(**others, sa_config={}) == SAEnhancerConfig(threshold=None)
    given = {"threshold": 4, "enable_global_pool": False}
    assert sa_config_of(**others, sa_config=given) == SAEnhancerConfig(threshold=4)
    assert sa_config_of(**others, sa_config=SAEnhancerConfig(threshold=4)).threshold == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sa_config": {"threshold": 0}}, "sa_config.threshold = 0: .* greater than or equal to 1"),
        ({"sa_config": {"threshold": 65}}, "sa_config.threshold = 65: .* less than or equal to 64"),
        (
            {"sa_config": {"size": 3}},
            "sa_config.size = 3 is not a known option; known: .*threshold",
        ),
        ({"sa_config": {"global_pool_size": 8}}, "= 8 needs enable_global_pool: true"),
        ({"sa_config": 4}, "sa_config = 4: a mapping is needed"),
        ({"sa_config": {}, "use_rejection_sampling": True}, "have no probabilities"),
        (
            {"sa_config": {}, "decoding_type": "Draft_Target", "draft_backend": "onnxruntime"},
            "draft_backend = 'onnxruntime' is refused: .* sa_config needs all new ones",
        ),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        LlmArgs(model="m", speculative_config=EAGLE3 | options)


@pytest.mark.parametrize("decoding_type", ["NGram", "SA"])
def test_drafters_without_a_network_refuse_it(decoding_type: str) -> None:
    config = {"decoding_type": decoding_type, "max_draft_len": 3, "sa_config": {}}
    with pytest.raises(ValueError, match=r"sa_config = \{\} is an option of Draft_Target"):
        LlmArgs(model="m", speculative_config=config)


# Shapes of drafts: rows of a window and tokens that a round may emit.


def test_a_chain_has_one_row_for_each_token_that_a_round_may_emit() -> None:
    assert (chain_of(4).window, chain_of(4).path, chain_of(4).is_tree) == (5, 5, False)
    assert (NO_DRAFTS.window, NO_DRAFTS.path) == (1, 1)


def test_a_tree_has_more_rows_than_a_round_may_emit() -> None:
    tree = DraftShape(depth=3, num_nodes=16, topk=4)
    assert (tree.window, tree.path, tree.is_tree) == (17, 4, True)


def test_the_longest_length_is_the_one_whose_window_still_fits() -> None:
    shapes = DraftShapes([NO_DRAFTS, DraftShape(1, 4, 4), DraftShape(2, 16, 4)])
    assert [shapes.tier_within(rows) for rows in (0, 1, 4, 5, 16, 17, 99)] == [
        *(0, 0, 0),
        *(1, 1),
        *(2, 2),
    ]
