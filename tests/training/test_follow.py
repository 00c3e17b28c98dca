"""`tllm-train head --follow`: a head is trained on what its engine records, and swapped in."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from tests.server.http_answers import SECONDS
from tests.server.served_process import MODEL, ROOT, ServedProcess
from tests.training.test_train_head import OPTIONS, train
from tllm_spec.cli.train import main
from tllm_spec.llm import LLM
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.training import follow
from tllm_spec.training.follow import Follower
from tllm_spec.training.head_run import HeadOptions

PROMPTS = [[(first + place) % 12 for place in range(8 + first // 2)] for first in range(24)]
RECORDED: dict[str, Any] = {
    "record_hidden_states": 1.0,
    "max_seq_len": 64,
    "kv_cache_config": {"enable_block_reuse": False},
}


def spec_of(head: Path) -> dict[str, Any]:
    return {"decoding_type": "Eagle3", "speculative_model": str(head), "max_draft_len": 3}


def completed(llm: LLM) -> tuple[list[list[int]], float]:
    """Texts, and tokens a round."""
    outputs = llm.generate(PROMPTS, {"max_tokens": 30, "ignore_eos": True}, use_tqdm=False)
    assert isinstance(outputs, list)
    stats = [output.speculative_decoding or SpeculativeStats() for output in outputs]
    total = sum(stats, SpeculativeStats())
    return [output.outputs[0].token_ids for output in outputs], total.acceptance_length


@pytest.mark.slow
def test_a_head_that_follows_is_swapped_in_and_drafts_better(
    model: Path, traffic: Path, tmp_path: Path
) -> None:
    assert train(model, traffic, tmp_path / "first", "--steps 1").exit_code == 0
    given = {"model": str(model), "data": tmp_path / "recorded", "start": str(tmp_path / "first")}
    run = {"steps": 40, "batch_tokens": 256, "learning_rate": 2e-3, "unroll": 3, "resume": False}
    own = {"output": tmp_path / "heads", "norms": (), "dtype": "float32", "device": "cpu"}
    with LLM(
        model, record_traffic=given["data"], speculative_config=spec_of(tmp_path / "first"),
        skip_tokenizer_init=True, **RECORDED,
    ) as llm:  # fmt: skip

        def swap(head: Path) -> None:
            llm.load_draft_weights(head, force=True)

        follower = Follower(HeadOptions(**OPTIONS | given | run | own), swap, newest=20)
        texts, before = completed(llm)
        follower.wait()
        follower.turn()
        served = llm.server_info()["internal_states"][0]["draft_weights"]
        assert served["version"] == 1 and served["folder"] == str(tmp_path / "heads" / "000001")
        again, after = completed(llm)
        assert again == texts and after > before
        llm.check_integrity()


def test_each_turn_begins_with_the_head_before_and_two_heads_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that is not better is not swapped in. Texts that were dropped meanwhile are left
    out."""
    runs, swapped = list[HeadOptions](), list[str]()

    def run(options: HeadOptions) -> None:
        assert len(list(options.data.iterdir())) == 1
        options.output.mkdir(parents=True)
        step = 0 if len(runs) == 1 else 5
        (options.output / "metrics.json").write_text(json.dumps({"step": step}))
        runs.append(options)

    monkeypatch.setattr(follow, "run_head", run)
    states = tmp_path / "hidden-1-a.safetensors"
    states.touch()
    monkeypatch.setattr(follow, "states_files_of", lambda path: [states.with_name("gone"), states])
    given = {"data": tmp_path, "output": tmp_path / "heads", "start": "first"}
    follower = Follower(HeadOptions(**OPTIONS | given), lambda head: swapped.append(head.name))
    for _ in range(3):
        follower.turn()
    assert [Path(each.start or "").name for each in runs] == ["first", "000001", "000002"]
    assert swapped == ["000001", "000003"]
    assert sorted(each.name for each in (tmp_path / "heads").iterdir()) == ["000002", "000003"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--steps 1", "Give either --data or --follow"),
        ("--steps 1 --data . --follow .", "Give either --data or --follow"),
        ("--steps 1 --data . --turns 2", "need --follow"),
        ("--steps 1 --follow .", "--follow needs --init"),
    ],
)
def test_the_options_of_following_need_each_other(flags: str, why: str) -> None:
    command = ["head", "--model", "zoo:llama", "--output", "none", *flags.split()]
    result = CliRunner().invoke(main, command)
    assert result.exit_code and why in result.output


@pytest.mark.slow
def test_a_server_serves_the_head_that_follows_it(tmp_path: Path) -> None:
    """Once the command sends the key that may swap."""
    key, heads, recorded = "a" * 20, tmp_path / "heads", tmp_path / "recorded"
    heads.mkdir()
    (tmp_path / "keys").write_text(f"operator: {key}\n")
    first = tmp_path / "first"
    assert train(MODEL, ROOT / "README.md", first, "--steps 1").exit_code == 0
    swapping = "--draft_model_root", str(heads), "--draft_model_key", "operator"
    flags = "--api_key", f"@{tmp_path / 'keys'}", "--record_traffic", str(recorded)
    own = RECORDED | {"load_format": "auto", "speculative_config": spec_of(first)}
    with ServedProcess(tmp_path, *flags, *swapping, **own) as server:

        def completed() -> list[str]:
            prompts = [f"{number} = " for number in range(24)]
            body = {"model": MODEL, "prompt": prompts, "max_tokens": 30, "temperature": 0}
            headers, url = {"Authorization": f"Bearer {key}"}, f"{server.url}/v1/completions"
            answer = httpx.post(url, json=body, headers=headers, timeout=SECONDS)
            return [each["text"] for each in answer.json()["choices"]]

        texts = completed()
        run = f"--follow {recorded} --init {first} --steps 20 --turns 1 --unroll 3 --device cpu"
        paths = f"--model {MODEL} --output {heads} --base_url {server.url}/v1"
        for own_key, why in (("b" * 20, "Warning: not served"), (key, '"version":1')):
            command = ["head", *run.split(), *paths.split(), "--api_key", own_key]
            result = CliRunner().invoke(main, command)
            assert result.exit_code == 0 and why in result.output, result.output
        assert completed() == texts
