"""The script of docs/rollouts.md trains with TRL, where it is installed."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_docs import examples

pytestmark = pytest.mark.slow


def trained(drafts: bool, folder: Path) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """What each rollout returned, and the loss and the gradient's norm of each step. Each rollout
    is compared with a forward of the trainer's model."""
    _, rollouts, training = examples("docs/rollouts.md")
    names: dict[str, Any] = {"__name__": "examples"}
    exec(rollouts, names)
    found: list[dict[str, Any]] = []
    own, weights = names["Rollouts"].__call__, list[torch.Tensor]()

    def checked(self: Any, prompts: list[str], trainer: Any) -> dict[str, Any]:
        result: dict[str, Any] = own(self, prompts, trainer)
        assert self.llm.generate("a").weight_version == f"step {trainer.state.global_step}"
        weights.append(torch.cat([each.detach().flatten() for each in trainer.model.parameters()]))
        for prompt, text, told in zip(*result.values(), strict=True):
            with torch.inference_mode():
                rows = trainer.model(torch.tensor([prompt + text])).logits[0]
            logprobs = (rows / trainer.args.temperature).log_softmax(-1)[len(prompt) - 1 : -1]
            expected = logprobs.gather(1, torch.tensor(text).unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(torch.tensor(told), expected, atol=1e-4, rtol=0)
        texts = result["completion_ids"]
        assert all(texts.count(text) == 1 for text in texts)
        found.append(result)
        return result

    names["Rollouts"].__call__ = checked
    script = training.replace('output_dir="grpo"', f"output_dir={str(folder)!r}")
    if not drafts:
        script = script.replace("speculative_config=head", "speculative_config=None")
    exec(script, names)
    assert len(weights) == 4
    assert not any(a.equal(b) for a, b in pairwise(weights))
    log = [each for each in names["trainer"].state.log_history if "loss" in each]
    deviations = [each["reward_std"] for each in log if "reward_std" in each]  # of new rollouts
    assert len(log) == 8 and len(deviations) == 4 and min(deviations) > 0
    return found, [[each["loss"], each["grad_norm"]] for each in log]


def test_grpo_trains_the_same_with_drafts_and_without(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    plain, drafted = (trained(drafts, tmp_path) for drafts in (False, True))
    for one, other in zip(plain[0], drafted[0], strict=True):
        assert one["completion_ids"] == other["completion_ids"]
    assert plain[1] == drafted[1] and min(loss for loss, _ in plain[1]) < -1e-3
