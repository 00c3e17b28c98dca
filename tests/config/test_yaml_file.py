"""Options files: how numbers are read, and what is refused in one sentence, at once."""

from pathlib import Path

import pytest

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.option_checks import read_yaml

ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(12)
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "options.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", "010"),
        ("1:30", "1:30"),
        ("2020-99-99", "2020-99-99"),
        ("0x1F", 31),
        ("1_000", 1000),
        ("-3", -3),
        ("0", 0),
        ("1e-5", 1e-5),
        (".5", 0.5),
        ("-1.5E+3", -1500.0),
        (".inf", float("inf")),
        ("yes", True),
        ("~", None),
        ("'7'", "7"),
    ],
)
def test_numbers_are_read_as_yaml_1_2_does(text: str, value: object, file: Path) -> None:
    file.write_text(f"a: {text}\n")
    found = read_yaml(file)["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (ALIASES, "its aliases stand for more than 100000 values"),
        ("a: &a {b: *a}", "nested more than 100 levels deep, or a value holds itself"),
        ("a: &a [*a]", "nested more than 100 levels deep, or a value holds itself"),
        (f"a: {'[' * 200}{']' * 200}", "nested more than 100 levels deep"),
        (f"a: {'[' * 5000}{']' * 5000}", "nested more than 100 levels deep"),
        (f"a: {'9' * 5000}", "5000 digits"),
        ("a: !!timestamp 2020-99-99", "month must be in 1..12"),
        ("a: {b: 1, b: 2}", "it has the key 'b' twice"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(
    text: str, sentence: str, file: Path
) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=f"cannot read the options file {file}: .*{sentence}"):
        read_yaml(file)


def test_an_alias_may_be_used_more_than_once(file: Path) -> None:
    file.write_text("a: &a {b: [1, 2]}\nc: *a\nd: [*a, *a]\n")
    assert read_yaml(file)["d"] == [{"b": [1, 2]}] * 2


@pytest.mark.parametrize("length", [65537, 10**9, 10**30])
@pytest.mark.parametrize("decoding_type", ["NGram", "MTP", "Eagle3", "Draft_Target"])
def test_a_draft_length_beyond_any_use_is_refused_before_shapes_are_made(
    decoding_type: str, length: int, file: Path
) -> None:
    file.write_text(
        f"speculative_config: {{decoding_type: {decoding_type}, max_draft_len: {length}, "
        "speculative_model: m}\nmax_num_tokens: 1000000000\n"
    )
    with pytest.raises(
        ValueError, match=f"max_draft_len = {length}: .* an integer from 1 to 65536"
    ):
        LlmArgs.from_yaml(file, model="m")
