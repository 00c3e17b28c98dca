"""The rule that makes early launches safe, read from the kernels' sources: no device is needed to
break it."""

import ast
import re
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


# What may stand before `wait`: lengths, which are older than the kernel in front
# (programmatic_launch.py), and sums with them.
LENGTH = "tl.load(kv_lens + request, cache_modifier='.cg')"
OLDER = {"announce(EARLY)", LENGTH, "_num_own", "_shares", "tl.program_id"}


def taking_part() -> dict[str, ast.FunctionDef]:
    """The Triton kernels that may be launched early."""
    functions = {
        f"{path.stem}.{node.name}": node
        for path in sorted(KERNELS.glob("*_triton.py"))
        if path.stem != "programmatic_launch_triton"
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    return {
        name: node
        for name, node in functions.items()
        if any(argument.arg == "EARLY" for argument in node.args.args)
    }


def statements(kernel: ast.FunctionDef) -> list[ast.stmt]:
    return kernel.body[ast.get_docstring(kernel) is not None :]


def test_a_kernel_that_may_be_launched_early_waits_before_it_touches_what_the_one_in_front_writes() -> (
    None
):
    kernels = taking_part()
    assert {
        "rms_norm_triton.rms_norm_kernel",
        "draft_input_triton.draft_input_kernel",
    } <= kernels.keys()
    for name, kernel in kernels.items():
        body = statements(kernel)
        if ast.unparse(body[0]) == "begin(EARLY)":
            continue
        place = [ast.unparse(statement) for statement in body].index("wait(EARLY)")
        calls = [
            node
            for before in body[:place]
            for node in ast.walk(before)
            if isinstance(node, ast.Call)
        ]
        for call in calls:
            assert {ast.unparse(call), ast.unparse(call.func)} & OLDER, (
                f"{name}: {ast.unparse(call)}"
            )


def test_some_program_of_every_launch_waits() -> None:
    """Otherwise the launch could end before the one in front of it, for which the next one would
    then not wait."""
    may_leave = []
    for name, kernel in taking_part().items():
        body = statements(kernel)
        if ast.unparse(body[0]) != "begin(EARLY)":
            place = [ast.unparse(statement) for statement in body].index("wait(EARLY)")
            leaves = [
                s for s in body[:place] for node in ast.walk(s) if isinstance(node, ast.Return)
            ]
            may_leave += [(name, ast.unparse(s).splitlines()[0]) for s in leaves]
    # The first split of a request always has keys to read, or none but the window's.
    assert may_leave == [("window_attention_triton.attention_kernel", "if split >= num_used:")]


def test_the_cuda_kernel_of_windows_reads_only_what_is_older_before_it_waits() -> None:
    """`Part` reads lengths, `Stream` tables and the keys and values of earlier tokens, all through
    the L2 cache."""
    source = (KERNELS / "window_attention.cu").read_text(encoding="utf-8")
    before, behind = source[source.index('extern "C"') :].split("griddepcontrol.wait")
    known = {
        "__launch_bounds__",
        "window_attention",
        "volatile",
        "if",
        "reinterpret_cast",
        "in_clusters",
    }
    used = set(re.findall(r"(\w+)[({]", before)) - known
    assert used == {"part", "cluster_arrive", "stream"}
    assert "stage_window(" in behind
    stream = (KERNELS / "window_stream.cuh").read_text(encoding="utf-8")
    for name in ("kv_lens", "num_padding", "block_tables"):
        reads = re.findall(rf"(\S*)\bw\.{name}\b(?! ==)", stream)
        assert reads and all("__ldcg(" in read for read in reads), name
    assert not re.search(r"w\.(qkv|turns|norm_weight|kv_slots)\b", stream)
