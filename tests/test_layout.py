"""The layout's rules: two linked folders, imports that only go down, the size of files and
functions."""

import ast
import gc
import importlib.metadata
import importlib.util
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.layout_walk import WALKS, walk

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("executor", "kernels")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
# Functions of the product, and their files, that one `LLM.generate` runs through.
MAX_WALKS = {"plain": (301, 48), "EAGLE-3": (346, 56), "EAGLE-3 tree + SA": (384, 63)}
# Of the product; lines of code are those without blank lines, comments and docstrings.
MAX_COUNTS = {"files": 343, "classes": 765, "lines": 80_269, "lines of code": 56_899}
MAX_TEST_LINES = 85600
# Of the default run. Long grids are marked `thinned`, `covering` or `slow`.
MAX_TESTS, MAX_COMBINATIONS = 7097, 80
MIN_DOCUMENTED = 0.78  # of the product's public functions: those with a docstring; it only rises
MAX_FRAMES, MAX_FRAME_FILES = 7, 5  # from `PyExecutor.step` to the target's forward
# The worker's main and calls of users' programs: only these may turn any fault into an answer.
BORDERS = {
    "executor/worker.py",
    "executor/weight_swap.py",  # loads a folder that an operator names
    "executor/rounds/round_reader.py",  # calls a user's tokenizer
    "tllm_spec/text/chat_prompt.py",  # runs the model's chat template
    "tllm_spec/server/engine_process.py",  # loads a model with many libraries
    "tllm_spec/text/tokenizer.py",  # reads a tokenizer's files with many libraries
    "tllm_spec/server/engine_port.py",  # makes a request: its error is the request's answer
    "tllm_spec/ranks.py",  # ends the other ranks with this one
    "tllm_spec/grammar/grammar_text.py",  # calls a converter that raises plain exceptions
    "tllm_spec/grammars.py",  # a thread, whose errors are raised in the one that waits for it
}

# Top floor first; the longest entry that fits a module is its own. A module may import from its own
# entry and from any lower floor, never sideways or up.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("tllm_spec.ray_serve", "tllm_spec.zoo"),
    ("tllm_spec.cli", "tllm_spec.examples", "tllm_spec.llmapi"),
    ("tllm_spec.bench", "tllm_spec.server", "tllm_spec.training"),
    ("tllm_spec.llm",),
    ("tllm_spec.draft_swap",),
    ("tllm_spec.recording.replay", "tllm_spec.ranks", "tllm_spec.intake"),
    ("tllm_spec.target_update", "tllm_spec.adapter_loading"),
    ("tllm_spec.rank_calls", "tllm_spec.shared_tensors"),
    (
        "tllm_spec.request_handle",
        "tllm_spec.server_info",
        "tllm_spec.grammars",
        "tllm_spec.distributed.rank_checks",
        "tllm_spec.executor.worker",
    ),
    ("tllm_spec.chat_formats",),
    ("tllm_spec.text", "tllm_spec.executor.build"),
    ("tllm_spec.executor.building", "tllm_spec.executor.py_executor"),
    ("tllm_spec.executor.rounds.round_runner",),
    (
        "tllm_spec.executor.rounds.decode_rounds",
        "tllm_spec.executor.totals",
        "tllm_spec.executor.traffic_recorder",
        "tllm_spec.executor.draft_weights",
        "tllm_spec.executor.target_weights",
        "tllm_spec.executor.sleep",
    ),
    ("tllm_spec.executor.rounds.round_reader",),
    (
        "tllm_spec.executor.speculative",
        "tllm_spec.executor.graphs.context_graphs",
    ),
    ("tllm_spec.executor.engine",),
    (
        "tllm_spec.executor.scheduler",
        "tllm_spec.executor.sampling",
        "tllm_spec.executor.graphs.slot_graphs",
    ),
    (
        "tllm_spec.executor.resources",
        "tllm_spec.executor.ranks",
    ),
    (
        "tllm_spec.executor.batch",
        "tllm_spec.executor.request_queue",
        "tllm_spec.executor.request_wire",
    ),
    ("tllm_spec.executor.request",),
    (
        "tllm_spec.executor.weight_swap",
        "tllm_spec.draft_network",
    ),
    ("tllm_spec.executor.device",),
    ("tllm_spec.adapters",),
    ("tllm_spec.models",),
    (
        "tllm_spec.attention",
        "tllm_spec.distributed",
        "tllm_spec.recording",
        "tllm_spec.text.vocabulary",
    ),
    ("tllm_spec.kernels",),
    (
        "tllm_spec.sampling_params",
        "tllm_spec.outputs",
        "tllm_spec.text.tokenizer",
        "tllm_spec.lora_request",
    ),
    ("tllm_spec.grammar", "tllm_spec.text.gguf_tokenizer"),
    ("tllm_spec.config", "tllm_spec.models.formats.gguf_file"),
    (
        "tllm_spec.logits_processor",
        "tllm_spec.progress",
        "tllm_spec.child_command",
        "tllm_spec.request_errors",
        "tllm_spec.version",
        "tllm_spec.zoo.registry",
        "tllm_spec.zoo.corpus",
    ),
)


def python_files() -> list[Path]:
    folders = ("tllm_spec", "executor", "kernels", "tests", "benchmarks", "docs", "tools")
    return [ROOT / "setup.py"] + [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents)
    ]


@pytest.fixture(scope="module", autouse=True)
def no_collector() -> Iterator[None]:
    """The nodes of all sources stay, and to look at them again and again takes longest."""
    gc.disable()
    yield
    gc.enable()


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def module_name(path: Path) -> str:
    """The one name that a file is imported by: `executor/request.py` is
    `tllm_spec.executor.request`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "tllm_spec" else ("tllm_spec", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PACKAGE_FILES = {
    module_name(path): path
    for path in python_files()
    if path.relative_to(ROOT).parts[0] in ("tllm_spec", *LINKED)
}


def imported_modules(path: Path) -> Iterator[str]:
    """Every tllm_spec module that the file imports, at any depth: a late import is an import
    too."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in PACKAGE_FILES else str(node.module) for name in below]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "tllm_spec")


@cache
def entry_and_floor(module: str) -> tuple[str, int]:
    """The entry of FLOORS that the module belongs to, and its floor (0 is the top); -1 = it has no
    place."""
    entries = [(entry, floor) for floor, entries in enumerate(FLOORS) for entry in entries]
    fitting = [(entry, floor) for entry, floor in entries if f"{module}.".startswith(f"{entry}.")]
    return max(fitting, key=lambda found: len(found[0]), default=(module, -1))


@pytest.mark.parametrize("name", LINKED)
def test_a_linked_folder_is_real_has_no_init_and_is_reached_by_a_relative_link(name: str) -> None:
    folder, link = ROOT / name, ROOT / "tllm_spec" / name
    assert folder.is_dir() and not folder.is_symlink()
    assert not list(folder.rglob("__init__.py"))
    assert link.is_symlink() and not link.readlink().is_absolute()
    assert link.resolve() == folder


@pytest.mark.parametrize("name", LINKED)
def test_the_bare_name_is_not_our_package_when_python_starts_in_the_root(name: str) -> None:
    # A folder without __init__.py has no origin and loses against any installed package of that
    # name.
    code = (
        f"import importlib.util as u; s = u.find_spec({name!r}); "
        "print(s.origin if s and s.origin else '')"
    )
    origin = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not origin.stdout.startswith(str(ROOT / name))


def test_the_distribution_installs_one_top_level_name() -> None:
    try:
        installed = importlib.metadata.distribution("tllm_spec")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("tllm_spec is not installed here")
    assert (installed.read_text("top_level.txt") or "").split() == ["tllm_spec"]


def test_only_the_package_itself_has_an_init_file() -> None:
    found = [
        path.relative_to(ROOT).as_posix() for path in python_files() if path.name == "__init__.py"
    ]
    assert found == ["tllm_spec/__init__.py"]


def test_every_module_has_a_floor() -> None:
    homeless = [
        name for name in PACKAGE_FILES if name != "tllm_spec" and entry_and_floor(name)[1] < 0
    ]
    assert not homeless, f"give these a place in FLOORS: {homeless}"


def test_imports_only_go_down() -> None:
    wrong = []
    for module, path in PACKAGE_FILES.items():
        if module in ("tllm_spec", "tllm_spec.llmapi"):
            continue  # they re-export
        entry, floor = entry_and_floor(module)
        for target in imported_modules(path):
            target_entry, target_floor = entry_and_floor(target)
            if target_entry != entry and target_floor <= floor:
                wrong.append(f"{module} imports {target}")
    assert not wrong, wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = {
        module: set(imported_modules(path)) & set(PACKAGE_FILES)
        for module, path in PACKAGE_FILES.items()
    }
    while in_no_circle := imports.keys() - set().union(*imports.values()) or {
        module for module, targets in imports.items() if not targets
    }:
        imports = {
            module: targets - in_no_circle
            for module, targets in imports.items()
            if module not in in_no_circle
        }
    assert not imports, f"in a circle, or between two: {sorted(imports)}"


def test_no_file_is_too_long() -> None:
    sources = [
        *python_files(),
        *(ROOT / "kernels").rglob("*.cu"),
        *(ROOT / "kernels").rglob("*.cuh"),
    ]
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources
    }
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


def num_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def num_code_lines(path: Path) -> int:
    """Lines with a token other than those of a docstring."""
    with tokenize.open(path) as file:
        tokens = [each for each in tokenize.generate_tokens(file.readline) if each.string.strip()]
    lines = [range(each.start[0], each.end[0] + 1) for each in tokens if each.type not in NO_CODE]
    docstrings = [
        range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
        for node in nodes_of(path)
        if isinstance(node, Documented) and ast.get_docstring(node) is not None
    ]
    return len(set().union(*lines) - set().union(*docstrings))


def test_the_product_and_its_tests_only_get_smaller() -> None:
    modules = PACKAGE_FILES.values()
    others = [
        path
        for suffix in ("*.cu", "*.cuh", "*.html", "*.md", "*.typed")
        for folder in ("tllm_spec", "kernels")
        for path in (ROOT / folder).rglob(suffix)
        if not any(parent.is_symlink() for parent in path.parents)
    ]
    found = {
        "files": len(modules) + len(others),
        "classes": sum(isinstance(n, ast.ClassDef) for path in modules for n in nodes_of(path)),
        "lines": sum(map(num_lines, (*modules, *others))),
        "lines of code": sum(map(num_code_lines, modules)),
    }
    assert all(found[name] <= most for name, most in MAX_COUNTS.items()), found
    test_lines = sum(map(num_lines, (ROOT / "tests").rglob("*.py")))
    assert test_lines <= MAX_TEST_LINES, test_lines


def test_the_default_run_only_gets_smaller(request: pytest.FixtureRequest) -> None:
    """What is collected: of the whole suite in `make test`."""
    left_out = ("slow", "gpu")
    names = [
        item.nodeid.split("[")[0]
        for item in request.session.items
        if not any(map(item.get_closest_marker, left_out))
    ]
    [(longest, number)] = Counter(names).most_common(1)
    assert len(names) <= MAX_TESTS and number <= MAX_COMBINATIONS, (len(names), longest, number)


def test_most_public_functions_have_a_docstring() -> None:
    public = [
        node
        for path in PACKAGE_FILES.values()
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_"
    ]
    documented = sum(ast.get_docstring(node) is not None for node in public) / len(public)
    assert documented >= MIN_DOCUMENTED, documented


BEGINS_WITH_OF = '"""' + "Of "


def test_no_docstring_begins_with_of() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in python_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.lstrip().startswith(BEGINS_WITH_OF)
    ]
    assert not found, f"begin these with a subject: {found}"


def test_no_function_is_too_long() -> None:
    too_long = []
    for path in python_files():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long.append(
                        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {length} lines"
                    )
    assert not too_long, too_long


def catches_everything(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        name is None or (isinstance(name, ast.Name) and name.id in ("Exception", "BaseException"))
        for name in caught
    )


def test_only_the_borders_catch_everything() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE_FILES.values()
        for node in nodes_of(path)
        if isinstance(node, ast.ExceptHandler) and catches_everything(node)
    }
    assert found <= BORDERS, found - BORDERS


def test_no_module_is_called_utils() -> None:
    assert not [path for path in python_files() if path.stem in ("utils", "util")]


@pytest.mark.parametrize("name", WALKS)
def test_a_request_runs_through_few_functions(name: str) -> None:
    found = walk(WALKS[name])
    num_functions, num_files = MAX_WALKS[name]
    assert len(found.functions) <= num_functions, sorted(found.functions)
    assert len(found.files) <= num_files, sorted(found.files)
    frames = found.to_forward
    assert len(frames) <= MAX_FRAMES, frames
    assert len({file for file, _, _ in frames}) <= MAX_FRAME_FILES, frames
