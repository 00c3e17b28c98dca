"""`tllm-train head --adapter`: with the LoRA of the head more drafts of its requests are right."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from tests.adapters.folders import linear_shapes, random_pairs, write_adapter
from tests.executor.harness import Harness, output_of
from tests.training.traffic import counted
from tllm_spec.cli.train import main
from tllm_spec.executor.request import LlmRequest
from tllm_spec.recording.traffic_folder import TrafficFolder

RUN = "--unroll 3 --batch_tokens 256 --device cpu"
OUTPUT_LEN = 24


def train(model: Path, data: Path, output: Path, more: str) -> Result:
    paths = f"--model {model} --data {data} --output {output}"
    return CliRunner().invoke(main, ["head", *paths.split(), *RUN.split(), *more.split()])


def run(model: Path, adapter: Path, number: int, head: Path | None = None) -> list[LlmRequest]:
    """Requests with the adapter, and with the LoRA of the head that it has."""
    spec = {"decoding_type": "Eagle3", "speculative_model": str(head), "max_draft_len": 3}
    lora = {"lora_dir": {"style": str(adapter)}, "max_draft_lora_rank": head and 4}
    config = spec if head is not None else None
    harness = Harness(model, lora_config=lora, speculative_config=config)
    prompts = [counted(each % 12, 4 + each // 12, 1).prompt for each in range(number)]
    requests = [harness.submit(prompt, OUTPUT_LEN, adapter="style") for prompt in prompts]
    harness.run()
    return requests


def write_head(model: Path, traffic: Path, output: Path, num_steps: int) -> Path:
    """One that was trained for the target without adapters."""
    more = f"--steps {num_steps} --learning_rate 2e-3 --draft_vocab_size 16"
    assert train(model, traffic, output, more).exit_code == 0
    return output


@pytest.fixture(scope="module")
def style(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with which the target counts no more."""
    tensors = load_file(model / "model.safetensors")
    pairs = random_pairs(linear_shapes(tensors, "o_proj", "down_proj"), 2, seed=3)
    folder = tmp_path_factory.mktemp("adapters") / "style"
    return write_adapter(folder, pairs, r=2, lora_alpha=1.5)


def record(model: Path, style: Path, folder: Path, number: int) -> Path:
    """Texts of two adapters."""
    folder.mkdir(mode=0o700)
    requests = run(model, style, number)
    records = [
        counted(0, len(request.tokens) - OUTPUT_LEN, OUTPUT_LEN).model_copy(
            update={
                "id": str(number),
                "prompt": request.tokens[:-OUTPUT_LEN],
                "output": output_of(request),
                "adapter": request.adapter,
            }
        )
        for number, request in enumerate(requests)
    ]
    other = [each.model_copy(update={"adapter": "other@1"}) for each in records[:9]]
    TrafficFolder(folder).append([record.to_line() for record in [*records, *other]])
    return folder


@pytest.mark.slow
def test_more_drafts_of_the_adapters_requests_are_accepted(
    model: Path, traffic: Path, style: Path, tmp_path: Path
) -> None:
    head = write_head(model, traffic, tmp_path / "head", 40)
    recorded = record(model, style, tmp_path / "recorded", 60)
    before = run(model, style, 12, head)
    more = f"--adapter style={style} --rank 4 --init {head} --steps 60 --checkpoint_steps 20"
    result = train(model, recorded, style / "draft", more)
    assert result.exit_code == 0, result.output
    after = run(model, style, 12, head)
    assert list(map(output_of, after)) == list(map(output_of, before))
    accepted = [
        sum(each.counters.stats().num_accepted_tokens for each in requests)
        for requests in (before, after)
    ]
    assert accepted[1] > 3 * accepted[0]
    rows = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
    lengths = rows[-1]["tokens_per_round"]
    assert rows[-1]["replayed"] == 3 and lengths["after"] > lengths["before"]
    assert f"Serve it as {style}/draft, loaded with the adapter style" in result.output


@pytest.fixture(scope="module")
def to_refuse(
    model: Path, traffic: Path, style: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A head, and texts."""
    folder = tmp_path_factory.mktemp("to_refuse")
    head = write_head(model, traffic, folder / "head", 1)
    return head, record(model, style, folder / "recorded", 9)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("--adapter style --init {head}", "'style': NAME=FOLDER is needed"),
        ("--adapter style={style}", "--adapter needs --init: the EAGLE-3 head"),
        ("--adapter sql={style} --init {head}", "has only texts of other adapters, or none"),
        ("--adapter other={style} --init {head}", "has only texts of other weights than"),
        ("--adapter style={style} --init {head} --kind eagle3", "--kind, --format: the head in"),
        ("--rank 4 --init {head}", "--rank 4 needs --adapter"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    more: str, reason: str, model: Path, style: Path, to_refuse: tuple[Path, Path], tmp_path: Path
) -> None:
    head, recorded = to_refuse
    given = more.format(style=style, head=head) + " --steps 1"
    result = train(model, recorded, tmp_path, given)
    assert result.exit_code == 1 and reason in result.output
    assert not list(tmp_path.iterdir())
