"""Acceptance figures, and small runs of the training commands."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from tests.zoo.runs import SELF_TEXT, ZOO, call, counting, read_json, read_weights, write_shape
from tllm_spec.models.token_map import read_token_map
from tllm_spec.training.acceptance import rounds, summary
from tllm_spec.zoo import train
from tllm_spec.zoo.registry import resolve_file


def test_a_round_accepts_up_to_the_first_difference_and_advances_by_one_more() -> None:
    matches = [False, True, True, False, True, True, True, True, True, True, True]
    #          prompt's ^ 2 accepted + 1     ^ 4 accepted + 1          ^ too short
    assert rounds(matches, draft_len=4) == [2, 4]
    assert summary([2, 4], 4)["acceptance_length"] == 4.0
    assert summary([2, 4], 4)["per_position"] == [1.0, 1.0, 0.5, 0.5]


@torch.inference_mode()
def test_teacher_forced_matches_give_the_acceptance_of_real_chains() -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 6, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    target, draft = (
        LlamaForCausalLM(LlamaConfig(num_hidden_layers=n, **shape)).eval() for n in (2, 1)
    )
    for parameter in [*target.parameters(), *draft.parameters()]:
        parameter.mul_(8)  # otherwise a new model repeats one token
    text = greedy(target, torch.tensor([[1, 2, 3]]), 80)
    matches = (draft(text).logits[:, :-1].argmax(-1) == text[:, 1:])[0, 2:].tolist()

    expected, position = [], 4
    while position + 4 < text.shape[1]:
        chain = greedy(draft, text[:, :position], 4)[0, position:]
        same = (chain == text[0, position : position + 4]).long()
        expected.append(int(same.cumprod(0).sum()))
        position += expected[-1] + 1
    assert rounds(matches, draft_len=4) == expected
    assert len(set(expected)) > 1


def greedy(model: LlamaForCausalLM, tokens: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokens


@pytest.fixture(scope="module")
def tiny_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and draft, trained to count to 50 with the commands of the
    zoo."""
    root = tmp_path_factory.mktemp("runs")
    counting(root, 50)
    sizes = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    write_shape(root / "shape", ZOO / "llama-draft", **sizes, intermediate_size=32)
    run = "--steps 60 --windows 4 --length 64 --warmup-steps 1 --dropout 0 --learning-rate 1e-2"
    common = ["--data", root, "--shape", root / "shape", run]
    call(train.target, "--output", root / "target", *common)
    paths = ["--output", root / "draft", "--target", root / "target"]
    call(train.draft, *paths, SELF_TEXT, *common)
    return root


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_training_run_saves_bf16_weights_and_its_shapes_configuration(
    tiny_runs: Path, name: str
) -> None:
    folder, shape = tiny_runs / name, tiny_runs / "shape"
    assert all(tensor.dtype == torch.bfloat16 for tensor in read_weights(folder).values())
    for file in ("config.json", "generation_config.json"):
        assert (folder / file).read_bytes() == (shape / file).read_bytes()
    history = read_json(folder / "metrics.json")["history"]
    assert history[-1]["step"] == 60


def test_a_token_map_lists_the_most_frequent_tokens_first(tmp_path: Path) -> None:
    tokens = np.repeat(np.arange(10, dtype=np.uint16), [3, 9, 1, 4, 4, 8, 0, 2, 1, 7])
    np.savez(tmp_path / "training.npz", tokens=tokens, num_bytes=80)
    arguments = ["--data", str(tmp_path), "--output", str(tmp_path / "map.json"), "--tokens", "5"]
    CliRunner().invoke(train.token_map, arguments, catch_exceptions=False)
    assert json.loads((tmp_path / "map.json").read_text()) == [1, 5, 9, 3, 4]


def test_the_zoos_token_map_has_common_tokens_of_heldout_text(heldout_tokens: torch.Tensor) -> None:
    ids = read_token_map(resolve_file("zoo:llama-draft/token_map.json"), 2048)
    assert len(ids) == 1024 and 0.85 < torch.isin(heldout_tokens, ids).float().mean() < 0.95


def test_both_trainings_reach_the_expected_figures(tiny_runs: Path) -> None:
    assert read_json(tiny_runs / "target" / "metrics.json")["loss"] < math.log(50) / 3
    assert read_json(tiny_runs / "draft" / "metrics.json")["agreement"] > 0.9
    folders = ["--target", tiny_runs / "target", "--draft", tiny_runs / "draft"]
    folders += ["--output", tiny_runs]
    call(train.evaluate, "--data", tiny_runs, *folders, "--prompts", 2, "--new-tokens", 16)
    assert read_json(tiny_runs / "acceptance.json")["acceptance_length"] > 4
