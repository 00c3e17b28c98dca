"""Writes prompts for a chat model, to train a draft head on the model's own answers.

usage: python tools/chat_prompts.py MODEL FOLDER [NUMBER]

FOLDER gets train.jsonl with NUMBER (12,000) prompts and heldout.jsonl with a fiftieth of them, data
sets of `tllm-bench`. A third of them are about functions of Python's standard library, a third
about its prose (docstrings) or asks for some, and a third are questions. No file, word or number of
a held-out prompt is in a training prompt; the sentences around them are the same."""

import ast
import random
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from tllm_spec.bench.dataset import BenchRequest, write_dataset
from tllm_spec.text.tokenizer import Tokenizer, load_tokenizer
from tllm_spec.zoo.corpus import heldout_files, read_source, training_files

NUMBER, HELD_OUT_SHARE = 12_000, 50
ONE_IN = 8  # words and numbers
PASSAGE = range(150, 900)  # characters of a function or paragraph
OUTPUT_TOKENS = 256
CODE = (
    "What does this Python function do?\n\n```python\n{}\n```",
    "Write a docstring for this Python function:\n\n```python\n{}\n```",
    "Write a unit test for this Python function:\n\n```python\n{}\n```",
    "Rewrite this Python function so that it is easier to read:\n\n```python\n{}\n```",
    "Which errors can this Python function raise, and when?\n\n```python\n{}\n```",
)
PROSE = (
    "Summarize this text in two sentences:\n\n{}",
    "Rewrite this text in simple words:\n\n{}",
    "Continue this text:\n\n{}",
    "Which questions does this text answer?\n\n{}",
    "Correct the mistakes in this text, if there are any:\n\n{}",
)
WRITING = (
    "Write a short story about a {animal} and a {person} in {place}.",
    "Write a letter from a {person} to a {person} about {thing}.",
    "Describe {place} in winter, in one paragraph.",
    "Write a short essay on {thing} and {thing}.",
    "Write a poem about a {animal} that finds {thing}.",
    "Write an advertisement for {thing} from {place}.",
)
QUESTIONS = (
    "What is the capital of {place}, and what is it known for?",
    "What do you know about {place}?",
    "How does a {animal} live, and what does it eat?",
    "What is the difference between a {animal} and a {animal}?",
    "Name five uses of {thing}.",
    "How is {thing} made?",
    "What does a {person} do all day?",
    "Which tools does a {person} need to work with {thing}?",
    "How would you explain {thing} to a child?",
    "A {person} buys {number} boxes of {thing} and pays {number} dollars for each. What is the "
    "total price?",
    "What is {number} plus {number}? Show the steps.",
    "A train leaves at noon and travels {number} miles. It is {number} minutes late. When does it "
    "arrive at 60 miles an hour?",
    "Which day of the week is it {number} days after a Monday?",
    "I have {number} days in {place}. What should I see?",
    "Give me a recipe with {thing} for {number} people.",
    "Is it a good idea to keep a {animal} in a flat in {place}? Answer in three points.",
)
WORDS = {
    "animal": "wolf fox bear horse cow pig goat sheep rabbit mouse cat dog lion tiger camel whale "
    "dolphin shark salmon frog snake turtle eagle owl raven sparrow duck goose hen bee "
    "spider beetle",
    "person": "baker farmer nurse teacher pilot sailor painter plumber lawyer judge tailor cook "
    "gardener carpenter miner dentist singer dancer writer student soldier driver butcher "
    "fisherman chemist librarian mechanic",
    "place": "Norway Spain Italy Poland Greece Turkey Egypt Kenya Ghana Morocco India China Japan "
    "Vietnam Thailand Australia Canada Mexico Brazil Chile Peru Cuba Iceland Ireland "
    "Portugal Finland Hungary Austria Belgium Nepal",
    "thing": "bread cheese butter sugar salt rice wheat corn coffee tea chocolate honey milk soap "
    "glass paper steel copper gold cotton wool leather wood rubber plastic cement oil "
    "coal ice water electricity music silk ink paint wax",
    "number": " ".join(map(str, range(3, 400))),
}


def main() -> None:
    model, folder, *rest = sys.argv[1:]
    number = int(rest[0]) if rest else NUMBER
    tokenizer = load_tokenizer(model)
    for name, count in (("train", number), ("heldout", number // HELD_OUT_SHARE)):
        texts = islice(prompts(is_held_out=name == "heldout"), count)
        chosen = requests(texts, tokenizer)
        with (Path(folder) / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            write_dataset(chosen, file)


def requests(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[BenchRequest]:
    for task_id, text in enumerate(texts):
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        yield BenchRequest(task_id, list(ids), OUTPUT_TOKENS)


def prompts(*, is_held_out: bool) -> Iterator[str]:
    """Different prompts of the three kinds in turn, without end."""
    generator = random.Random(int(is_held_out))
    functions, paragraphs = passages(training_files())
    if is_held_out:
        functions, paragraphs = (
            [text for text in own if text not in known]
            for own, known in zip(passages(heldout_files()), (functions, paragraphs), strict=True)
        )
    words = {
        kind: [
            word for place, word in enumerate(each.split()) if is_held_out == (place % ONE_IN == 0)
        ]
        for kind, each in WORDS.items()
    }
    known = set[str]()
    while True:
        about_prose = generator.choice(PROSE).format(generator.choice(paragraphs))
        for text in (
            generator.choice(CODE).format(generator.choice(functions)),
            generator.choice((about_prose, filled(generator.choice(WRITING), words, generator))),
            filled(generator.choice(QUESTIONS), words, generator),
        ):
            if text not in known:
                known.add(text)
                yield text


def filled(template: str, words: dict[str, list[str]], generator: random.Random) -> str:
    """With words instead of the names in braces, no word twice."""
    shuffled = {kind: iter(generator.sample(each, len(each))) for kind, each in words.items()}
    return re.sub(r"{(\w+)}", lambda name: next(shuffled[name[1]]), template)


def passages(files: Iterable[Path]) -> tuple[list[str], list[str]]:
    """Functions, and paragraphs of docstrings."""
    functions, paragraphs = dict[str, None](), dict[str, None]()  # in a fixed order
    for source in map(read_source, files):
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                functions[textwrap.dedent(text)] = None
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                documented = ast.get_docstring(node) or ""
                paragraphs |= dict.fromkeys(documented.split("\n\n"))
    long_enough = [text for text in paragraphs if len(text) in PASSAGE and ">>>" not in text]
    return [text for text in functions if len(text) in PASSAGE], long_enough


if __name__ == "__main__":
    main()
