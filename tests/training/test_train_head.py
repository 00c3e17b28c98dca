"""`tllm-train head`: acceptance rises, a resumed run equals an uninterrupted one, several processes
have the gradients of one, and the engine drafts with what is exported."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from torch import Tensor

from tests.training.rank_gradients import added_up, gradients
from tests.training.traffic import counted
from tests.zoo.runs import read_json
from tllm_spec.cli.train import main
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.registry import model_config
from tllm_spec.recording.replay import replay
from tllm_spec.recording.traffic_folder import HiddenStates, TrafficFolder
from tllm_spec.training import head_run
from tllm_spec.training.acceptance import standard_error
from tllm_spec.training.draft_head import unrolled
from tllm_spec.training.head_files import load_head
from tllm_spec.training.head_run import HeadOptions, acceptance_of, settings_of
from tllm_spec.training.language_model import load_language_model
from tllm_spec.training.texts import Text, batches, draw, read_texts, split
from tllm_spec.training.trainer import ALONE, Ranks

ROOT = Path(__file__).parents[2]
VARIANT = "--layers 2 --norm fc_norm --norm norm_output"
RUN = "--unroll 3 --batch_tokens 256 --learning_rate 2e-3 --device cpu --draft_vocab_size 16"


def train(model: str | Path, data: Path, output: Path, more: str) -> Result:
    paths = ["--model", str(model), "--data", str(data), "--output", str(output)]
    return CliRunner().invoke(main, ["head", *paths, *RUN.split(), *more.split()])


@pytest.fixture(scope="session")
def trained(model: Path, traffic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("head")
    assert (
        train(model, traffic, output, f"--steps 60 --checkpoint_steps 20 {VARIANT}").exit_code == 0
    )
    return output


def test_held_out_acceptance_rises(trained: Path) -> None:
    history = read_json(trained / "metrics.json")["history"]
    assert [row["step"] for row in history] == [0, 20, 40, 60]
    assert history[-1]["acceptance_length"] > 3 > history[0]["acceptance_length"]


def test_the_held_out_records_judge_at_the_end_and_the_way_to_serve_is_told(
    model: Path, traffic: Path, trained: Path, tmp_path: Path
) -> None:
    output = tmp_path / "new"
    run = f"--model {model} --data {traffic} --output {output} --init {trained} --steps 2"
    result = CliRunner().invoke(main, ["head", *run.split(), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
    assert all(row["standard_error"] >= 0 for row in rows[:-1])
    lengths = rows[-1]["tokens_per_round"]
    assert rows[-1]["replayed"] == 3 and lengths["before"] > 2 and lengths["after"] > 2
    assert "Warning: 3 texts are held out, which is too few" in result.output
    assert "Warning: few steps were made" in result.output
    assert "unroll 3" in result.output, "on a CPU"
    served = yaml.safe_load(result.output.split("x.yaml has\n")[1].split("or swapped")[0])
    spec = {"decoding_type": "Eagle3", "speculative_model": str(output), "max_draft_len": 3}
    assert served == {"speculative_config": spec}
    assert (
        f"--draft_model_root {tmp_path}" in result.output and '{"folder": "new"}' in result.output
    )


OPTIONS: dict[str, Any] = dict.fromkeys(field.name for field in fields(HeadOptions))


def test_without_held_out_records_no_replay_judges(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = HeadOptions(**OPTIONS | {"data": Path("text"), "output": trained})
    head_run.judge(options, [])
    found = json.loads(capsys.readouterr().out)
    assert found == {"replayed": 0, "reason": "text has no held-out records of traffic"}


@pytest.mark.parametrize(
    ("given", "hidden_size", "found"),
    [
        ({"device": "cuda"}, 4096, (12500, 5e-4)),  # an eighth of the tokens
        ({"device": "cpu"}, 4096, (1024, 5e-4)),
        ({"device": "cpu"}, 256, (1024, 2e-3)),
        ({"device": "cpu", "start": "head"}, 256, (1024, 5e-4 / 4)),
        ({"device": "cuda", "start": "head", "batch_tokens": 4096}, 256, (4096, 5e-4 / 2)),
        ({"device": "cpu", "learning_rate": 1e-5, "batch_tokens": 64}, 256, (64, 1e-5)),
    ],
)
def test_defaults_fit_the_device_the_texts_and_the_head(
    given: dict[str, Any], hidden_size: int, found: tuple[int, float]
) -> None:
    texts = [Text(torch.zeros(1000, dtype=torch.long), 1)] * 100
    settings = settings_of(HeadOptions(**OPTIONS | given), texts, hidden_size)
    assert (settings.windows, settings.learning_rate) == pytest.approx(found)


def test_the_standard_error_takes_the_rounds_of_a_text_together() -> None:
    assert standard_error([[0, 0], [2, 2]]) == pytest.approx(1.0)  # of means 0 and 2
    assert standard_error([[0, 2], [2, 0]]) == 0
    assert standard_error([[0, 2, 0, 2]]) == pytest.approx((4 / 3) ** 0.5 / 2)
    assert standard_error([[]]) == 0


def test_a_new_head_sees_as_much_of_a_text_as_it_was_trained_on(model: Path, trained: Path) -> None:
    config = Eagle3Config.from_pretrained(trained)
    assert config.sliding_layers == {0, 1}  # of VARIANT
    assert config.sliding_window == min(256, model_config(model).max_positions)


def test_a_new_run_does_not_write_over_another(model: Path, traffic: Path, trained: Path) -> None:
    before = (trained / "model.safetensors").stat().st_mtime_ns
    result = train(model, traffic, trained, f"--steps 1 {VARIANT}")
    assert result.exit_code == 1 and "has a run: --resume" in result.output
    assert (trained / "model.safetensors").stat().st_mtime_ns == before


def test_a_head_that_training_makes_worse_stays_as_it_was(
    model: Path, traffic: Path, trained: Path, tmp_path: Path
) -> None:
    run = f"--model {model} --data {traffic} --output {tmp_path} --init {trained} --steps 3"
    more = "--unroll 3 --batch_tokens 64 --learning_rate 1 --device cpu"
    assert CliRunner().invoke(main, ["head", *run.split(), *more.split()]).exit_code == 0
    assert [row["step"] for row in read_json(tmp_path / "metrics.json")["history"]] == [0]
    weights = [folder / "model.safetensors" for folder in (trained, tmp_path)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_resumed_run_equals_an_uninterrupted_one(
    model: Path, traffic: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, num_calls = head_run.draw, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 50:
            raise KeyboardInterrupt
        return draw(*arguments)

    monkeypatch.setattr(head_run, "draw", interrupted)
    steps = f"--steps 60 --checkpoint_steps 20 {VARIANT}"
    assert train(model, traffic, tmp_path, steps).exit_code == 1
    monkeypatch.undo()
    assert train(model, traffic, tmp_path, f"{steps} --resume").exit_code == 0
    runs = [read_json(folder / "metrics.json")["history"] for folder in (trained, tmp_path)]
    first, second = ([row | {"seconds": 0} for row in history] for history in runs)
    assert first == second and second[-1]["step"] == 60, "figures of the weights at each checkpoint"
    assert not list(tmp_path.glob("checkpoint*"))
    weights = [folder / "model.safetensors" for folder in (trained, tmp_path)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--format speculators",
        "--kind peagle",
        pytest.param("--layers 1", marks=pytest.mark.slow),
        pytest.param(
            "--layers 3 --norm norm_before_fc --norm norm_before_residual", marks=pytest.mark.slow
        ),
        pytest.param("--kind peagle --layers 1 --norm norm_before_fc", marks=pytest.mark.slow),
    ],
)
def test_the_engine_accepts_the_drafts_of_an_exported_head_as_training_said(
    options: str, model: Path, traffic: Path, trained: Path, tmp_path: Path
) -> None:
    output = trained
    if options:
        output = tmp_path
        start = f"--init {trained} --steps 1" if options == "--format speculators" else ""
        run = RUN.replace(" --draft_vocab_size 16", "") if start else RUN
        paths = ["--model", str(model), "--data", str(traffic), "--output", str(output)]
        command = ["head", *paths, *run.split(), *(start or "--steps 60").split()]
        result = CliRunner().invoke(main, [*command, *options.split()])
        assert result.exit_code == 0, result.output
    records = [counted(first, 13, 25) for first in range(4)]
    spec = {"decoding_type": "Eagle3", "speculative_model": str(output), "max_draft_len": 3}
    args = LlmArgs.from_kwargs(str(model), speculative_config=spec, dtype="float32")
    replayed = replay(records, args).total

    head = load_head(output, model_config(model)).eval()
    target = load_language_model(model, torch.float32, torch.device("cpu"))
    texts = [Text(torch.tensor(each.prompt + each.output), len(each.prompt)) for each in records]
    with torch.no_grad():
        said = acceptance_of(head, target, texts, 3)
    assert said["acceptance_length"] > 1.5
    assert replayed.acceptance_length == pytest.approx(said["acceptance_length"], abs=0.2)


@torch.no_grad()
def test_held_out_texts_in_batches_have_the_figures_of_each_alone(
    model: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_language_model(model, torch.float32, torch.device("cpu"))
    head = load_head(trained, model_config(model)).eval()
    torch.manual_seed(0)
    texts = []
    for length in (48, 18, 36, 12, 42, 24, 30):
        record = counted(length % 7, 3, length - 3)
        tokens = torch.tensor(record.prompt + record.output)
        tokens[::9] = torch.randint(60, tokens[::9].shape)  # after which drafts are wrong
        texts.append(Text(tokens, length // 6))
    sizes = [[len(text.tokens) for text in batch] for batch in batches(texts, 96)]
    assert sizes == [[12, 18, 24], [30, 36], [42, 48]]
    together = acceptance_of(head, target, texts, 3)
    assert 1.2 < together["acceptance_length"] < 3.8, together
    monkeypatch.setattr(head_run, "VALIDATION_TOKENS", 1)
    assert acceptance_of(head, target, texts, 3) == pytest.approx(together, abs=1e-5)


@torch.no_grad()
def test_recorded_hidden_states_have_the_loss_of_a_target_that_runs(
    model: Path, trained: Path, tmp_path: Path
) -> None:
    folder = TrafficFolder(tmp_path / "traffic")
    target = load_language_model(model, torch.float32, torch.device("cpu"))
    head = load_head(trained, model_config(model)).eval()
    folder.append([counted(5, 9, 20).to_line()])
    for record in (counted(first, 9, 60 - first) for first in range(3)):
        ids = torch.tensor(record.prompt + record.output)[:-1]
        output = target(input_ids=ids[None], output_hidden_states=True)
        captured = torch.cat([output.hidden_states[layer + 1][0] for layer in (1, 2, 3)], -1)
        states = HiddenStates(record, (1, 2, 3), ids, captured, output.hidden_states[-1][0])
        folder.add_states(record, states.to_file())
    texts = read_texts(folder.path, str(model), 40, 3, (1, 2, 3))
    assert [text.offset for text in texts] == [*[0, 40] * 3, 0]
    assert [text.file is None for text in texts] == [*[False] * 6, True]
    # The second pieces of texts had other tokens before.
    first = [text for text in texts[:-1] if text.offset == 0]
    again = [text._replace(file=None) for text in first]
    recorded = acceptance_of(head, target, first, 3)
    assert recorded == pytest.approx(acceptance_of(head, target, again, 3), abs=1e-4)
    torch.manual_seed(0)  # both kinds are drawn
    mixed = [draw(texts, 10**6, 3, target.device, slice(None)) for _ in range(40)]
    assert {(len(batch.tokens), batch.states is None) for batch in mixed} == {(6, False), (1, True)}
    shares = [draw(first, 1, 3, target.device, slice(rank, None, 2)) for rank in (0, 1)]
    assert [batch.states is not None and len(batch.states[0]) for batch in shares] == [1, 1]
    batch = draw(first, 10**6, 3, target.device, slice(None))
    captured, hidden = (each.bfloat16() for each in batch.states or ())
    of_bf16 = batch._replace(states=(captured, hidden))  # as an engine in bf16 records them
    losses = [unrolled(head, target, each, 3)[0] for each in (batch, of_bf16)]
    torch.testing.assert_close(*losses, atol=0.02, rtol=0.02)
    with pytest.raises(ValueError, match=r"layers \[1, 2, 3\]; the head reads \[0, 1, 2\]"):
        read_texts(folder.path, str(model), 40, 3, (0, 1, 2))


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5, msg=name)


def test_gradients_of_the_ranks_shares_add_up_to_those_of_the_batch(
    model: Path, traffic: Path
) -> None:
    first, second = (gradients(model, traffic, Ranks(rank, 2)) for rank in (0, 1))
    total = {name: tensor + second[name] for name, tensor in first.items()}
    check_equal(total, gradients(model, traffic, ALONE))


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(
    model: Path, traffic: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is the first one. Both have the environment that torchrun gives them."""
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    command = [sys.executable, "-m", "tests.training.rank_gradients", str(model), str(traffic)]
    second = {**os.environ, **place, "RANK": "1", "LOCAL_RANK": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=second) as process:
        for name, value in (place | {"RANK": "0", "LOCAL_RANK": "0"}).items():
            monkeypatch.setenv(name, value)
        found = added_up(model, traffic)
    assert process.returncode == 0
    check_equal(found, gradients(model, traffic, ALONE))


def test_a_text_file_is_cut_into_pieces_of_which_some_are_held_out(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("def f(x):\n    return x + 1\n\n\n" * 200)
    texts = read_texts(file, "zoo:llama", 67, 3, (1, 5, 8))
    assert {len(text.tokens) for text in texts[:-1]} == {64} and texts[0].start == 1
    training, held_out = split(texts, file, 3)
    assert len(held_out) == max(1, len(texts) // 20)
    assert len(training) + len(held_out) == len(texts)


def test_texts_of_a_batch_have_similar_lengths(tmp_path: Path) -> None:
    made = [Text(torch.full((8 + each * 37 % 191,), each), 1) for each in range(200)]
    texts, _ = split(made, tmp_path, 3)
    drawn, shares = set[int](), []
    for seed in range(100):
        torch.manual_seed(seed)
        batch = draw(texts, 1600, 3, torch.device("cpu"), slice(None))
        ids = batch.tokens[:, 0].tolist()
        lengths = [len(made[each].tokens) for each in ids]
        assert len(ids) * max(lengths) <= 1600
        drawn |= {*ids}
        shares.append(sum(lengths) / (len(ids) * max(lengths)))
    assert sum(shares) > 0.75 * len(shares)
    assert len(drawn) > 0.9 * len(texts)


def test_the_shape_of_a_head_to_begin_with_stays(
    model: Path, traffic: Path, trained: Path, tmp_path: Path
) -> None:
    more = f"--steps 1 --init {trained} --layers 3 --norm fc_norm"
    result = train(model, traffic, tmp_path, more)
    words = "--draft_vocab_size, --norm, --layers: that of the head in --init stays; leave it out"
    assert result.exit_code == 1 and words in result.output


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", "--steps or --minutes"),
        ("--steps 1 --kind peagle --format eagle", "--format speculators"),
        ("--steps 1 --resume", "to resume from"),
        ("--steps 1 --init zoo:llama-eagle3", "hidden_size"),
        ("--steps 1 --unroll 40", "2 or more are needed"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_reason(
    more: str, words: str, model: Path, traffic: Path, tmp_path: Path
) -> None:
    result = train(model, traffic, tmp_path, more)
    assert result.exit_code != 0 and words in result.output
