"""`LLM.server_info`: SGLang's names, the controller's decisions, plain JSON values only."""

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from tests.executor.harness import user_provided
from tests.executor.tiny_llama import write_tiny_llama
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec import __version__
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.llm import LLM
from tllm_spec.server_info import internal_state, plain

EMA = {
    "strategy": "ema",
    "warmup_batches": 0,
    "update_interval": 2,
    "1": {"candidate_steps": [1, 4], "down_hysteresis": 0.0},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its drafts are always wrong, so that the draft length falls from 4 to 1."""
    options = user_provided(lambda request: [63] * len(request.py_draft_tokens))
    options["speculative_config"] |= {"adaptive": EMA, "max_rejected_rounds": None}
    tiny = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    with LLM(tiny, skip_tokenizer_init=True, max_batch_size=4, max_seq_len=128, **options) as llm:
        yield llm


def info_of(llm: LLM) -> dict[str, Any]:
    """As a client reads it; json raises for values that are not plain."""
    found: dict[str, Any] = json.loads(json.dumps(llm.server_info(), allow_nan=False))
    assert found == llm.server_info(), "it has a tuple, or a key that is a number"
    return found


def test_before_the_first_round_there_is_the_initial_draft_length_and_no_acceptance(
    llm: LLM,
) -> None:
    info = info_of(llm)
    state = info["internal_states"][0]
    assert (info["version"], info["max_batch_size"], info["max_seq_len"]) == (__version__, 4, 128)
    assert info["speculative_config"]["drafter"] == "tests.executor.harness:ScriptedDrafter"
    assert state["speculative_num_steps"] == 4
    assert "avg_spec_accept_length" not in state


def test_after_rounds_there_are_draft_length_acceptance_and_the_reason_of_a_switch(
    llm: LLM,
) -> None:
    output = llm.generate([1, 2, 3], {"max_tokens": 40, "logit_bias": {63: -100.0}}, use_tqdm=False)
    state = info_of(llm)["internal_states"][0]
    assert state["speculative_num_steps"] == 1
    assert state["avg_spec_accept_length"] == output.speculative_decoding.acceptance_length == 1.0
    decisions = state["controller"]["decisions"]
    assert decisions["num_switches"] == 1
    switch = decisions["last"][-1]
    assert (switch["old_steps"], switch["new_steps"], switch["batch_size"]) == (4, 1, 1)
    assert "smoothed accepted drafts" in switch["reason"]
    assert state["controller"]["slots"]["1"]["ema_accept_len"] < 1
    assert state["controller"]["limits"]["draft_len_schedule"] is None
    assert state["totals"]["by_draft_len"].keys() == {"0", "1", "4"}, (
        "the last round wants no drafts"
    )


def test_server_info_is_refused_after_shutdown(tmp_path: Path) -> None:
    llm = LLM(write_tiny_llama(tmp_path), skip_tokenizer_init=True, max_batch_size=2)
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.server_info()


def test_values_without_a_json_form_become_null_or_a_name() -> None:
    assert plain([nan, inf, -inf, 1.5, True, None]) == [None, None, None, 1.5, True, None]
    assert plain({3: (1, {2})}) == {"3": [1, [2]]}
    assert plain(LlmArgs) == "tllm_spec.config.llm_args:LlmArgs"
    spec = {
        "decoding_type": "NGram",
        "max_draft_len": 3,
        "adaptive": {},
        "draft_len_schedule": {1: 3, 9: 0},
    }
    args = plain(LlmArgs.from_kwargs("zoo:llama", speculative_config=spec))
    assert args["speculative_config"]["draft_len_schedule"] == {"1": 3, "9": 0}
    assert args["speculative_config"]["adaptive"]["slots"][0][1]["candidate_steps"] == [0, 1, 2, 3]
    json.dumps(args, allow_nan=False)


def test_nan_becomes_null_in_the_internal_state() -> None:
    state = {"draft_len": 2, "totals": {"speculation": {"rounds": 0}}, "controller": {"ema": nan}}
    assert internal_state(state) == {
        "speculative_num_steps": 2,
        "totals": {"speculation": {"rounds": 0}},
        "controller": {"ema": None},
    }


def test_the_present_tree_is_shown_with_its_shape_and_what_it_was_chosen_by(tmp_path: Path) -> None:
    head = write_tiny_eagle3(tmp_path / "head", num_captured=2)
    trees = [{"max_draft_len": 2, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 4}]
    spec = {
        "decoding_type": "Eagle3",
        "speculative_model": str(head),
        "eagle3_layers_to_capture": [0, 1],
        "max_draft_len": 3,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "adaptive": {"candidate_steps": [3], "candidate_trees": trees, "prior_acceptance": 0.3},
    }
    tiny = write_tiny_llama(tmp_path / "target")
    options = {"speculative_config": spec, "max_batch_size": 2, "max_seq_len": 128}
    with LLM(tiny, skip_tokenizer_init=True, **options) as llm:
        parts = llm._executor.parts
        parts.tier_for = parts.controller.tier_for = lambda *_: 4
        llm.generate([1, 2, 3], {"max_tokens": 40}, use_tqdm=False)
        state = info_of(llm)["internal_states"][0]
        load = llm._executor.load()
    assert state["draft_shape"] == {"name": "2x2/4", "depth": 2, "drafts": 4, "topk": 2}
    assert state["speculative_num_steps"] == 2 and load.tier_name == "2x2/4"
    controller = state["controller"]
    assert controller["draft_lens"] == [3, "2x2/4"]
    assert {"3", "2x2/4"} <= controller["round_ms"]["1"].keys()
    slot = controller["slots"]["1"]
    assert len(slot["further_children"]) == 1 and 0.5 <= slot["tree_gain"] <= 2


def test_the_tree_that_ngrams_may_have_is_shown(tmp_path: Path) -> None:
    spec = {
        "decoding_type": "NGram",
        "max_draft_len": 3,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 2,
        "max_total_draft_tokens": 6,
    }
    tiny = write_tiny_llama(tmp_path / "target")
    options = {"speculative_config": spec, "max_batch_size": 2, "max_seq_len": 128}
    with LLM(tiny, skip_tokenizer_init=True, **options) as llm:
        llm.generate([1, 2, 3], {"max_tokens": 40}, use_tqdm=False)
        info = info_of(llm)
    state = info["internal_states"][0]
    assert state["draft_shape"] == {"name": "3x2/6", "depth": 3, "drafts": 6, "topk": 2}
    assert info["speculative_config"]["use_dynamic_tree"] is True
    assert state["totals"]["speculation"]["rounds"] > 0
