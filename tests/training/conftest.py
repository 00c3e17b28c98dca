"""A tiny random target and EAGLE-3 head for training, and a tiny target that counts."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.eagle3_entries import DRAFT_IDS, SHAPE, with_large_weights
from tests.training.traffic import write_traffic
from tests.zoo.runs import ZOO, call, counting, write_shape
from tllm_spec.training.draft_head import DraftHead
from tllm_spec.zoo import train


@pytest.fixture
def target() -> LlamaForCausalLM:
    """Ten layers, so that the three captured ones (1, 4, 6) are not evenly spaced."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 10}
    config = LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None)
    return with_large_weights(LlamaForCausalLM(config)).requires_grad_(False).eval()


@pytest.fixture
def head() -> DraftHead:
    torch.manual_seed(2)
    return with_large_weights(DraftHead(SHAPE, DRAFT_IDS))


@pytest.fixture(scope="session")
def counting_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text that counts to 12, and a tiny `target` that was trained on it with the
    command of the zoo."""
    root = tmp_path_factory.mktemp("runs")
    counting(root, 12)
    sizes = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "intermediate_size": 32}
    write_shape(root / "shape", ZOO / "llama", **sizes, vocab_size=64, num_hidden_layers=7)
    run = "--steps 80 --windows 4 --length 64 --warmup-steps 10 --dropout 0 --learning-rate 5e-3"
    call(train.target, "--data", root, "--output", root / "target", "--shape", root / "shape", run)
    return root


@pytest.fixture(scope="session")
def model(counting_run: Path) -> Path:
    """The target, with the files of a tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ZOO / "llama" / name, counting_run / "target" / name)
    return counting_run / "target"


@pytest.fixture(scope="session")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    folder.chmod(0o700)
    write_traffic(folder, 60)
    return folder
