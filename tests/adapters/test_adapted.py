"""Logits with adapters equal those of a model into which they are merged."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.adapters.folders import linear_shapes, merged, random_pairs, write_adapter
from tests.models.helpers import PagedRunner, load, random_tokens, save_checkpoint
from tllm_spec.adapters.adapted import AdapterTables
from tllm_spec.adapters.adapter_folder import read_adapter
from tllm_spec.models.llama import CausalLM

TOKENS = random_tokens(24)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@torch.inference_mode()
def with_tables(
    model: CausalLM, targets: Any = None, slots: int = 2, rank: int = 8
) -> AdapterTables:
    tables = AdapterTables(model, slots, rank, 128, targets)
    tables.rows.is_active = True
    return tables


@torch.inference_mode()
def put(tables: AdapterTables, slot: int, folder: Path) -> None:
    adapter = read_adapter(folder, 8)
    tables.check(adapter)
    tables.load(slot, adapter)


@torch.inference_mode()
def logits(
    model: CausalLM, tables: AdapterTables | None, slots: list[int], tokens: list[int] = TOKENS
) -> list[torch.Tensor]:
    """Of one forward of the tokens for each slot."""
    runner = PagedRunner(model)
    if tables is not None:
        own = torch.tensor(slots, dtype=torch.int32).repeat_interleave(len(tokens))
        tables.rows.slots[: len(own)] = own
        tables.rows.begin(len(own), None)
    return list(runner.step(dict.fromkeys(range(len(slots)), tokens)).values())


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_rows_of_a_batch_have_each_its_own_adapter_or_none(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base", "Llama")
    tensors = load_file(tmp_path / "base/model.safetensors")
    one = random_pairs(linear_shapes(tensors, *ATTENTION, *MLP))
    two = random_pairs(linear_shapes(tensors, "q_proj", "v_proj"), rank=3, seed=1)
    model = load(tmp_path / "base")
    [plain] = logits(model, None, [-1])
    tables = with_tables(model)
    put(tables, 1, write_adapter(tmp_path / "one", one))
    put(tables, 0, write_adapter(tmp_path / "two", two, r=3, lora_alpha=1.5))
    found = logits(model, tables, [-1, 1, 0, 1])
    expected = [
        logits(
            load(merged(tmp_path / "base", tmp_path / f"merged {scale}", pairs, scale)), None, [-1]
        )[0]
        for pairs, scale in ((one, 2.0), (two, 0.5))
    ]
    close(found[0], plain)
    close(found[1], expected[0])
    close(found[2], expected[1])
    assert torch.equal(found[1], found[3])
    assert (expected[0] - plain).abs().max() > 0.3 < (expected[0] - expected[1]).abs().max()
