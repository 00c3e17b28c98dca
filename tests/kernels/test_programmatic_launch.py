"""The rules that make programmatic dependent launch (PDL) safe, and what every launch of a Triton
kernel says, checked in the kernels' sources. They need no device."""

import ast
import re
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

# Calls that are allowed before the wait: loads of lengths, which were written before the previous
# kernel began (programmatic_launch.py), and arithmetic on them; loads of weights, and of slots that
# are read again after the wait.
LENGTH = "tl.load(kv_lens + request, cache_modifier='.cg')"
ALLOWED = {
    "_fetch_weights",
    "_own_rows",
    "launch_dependents(PDL)",
    LENGTH,
    "_num_own",
    "shares",
    "tl.arange",
    "tl.load(norm + columns, mask=real, other=0.0)",
    "tl.load(slots + row)",
    "tl.program_id",
}


def pdl_kernels() -> dict[str, ast.FunctionDef]:
    """The Triton kernels that are launched with PDL."""
    functions = {
        f"{path.stem}.{node.name}": node
        for path in sorted(KERNELS.rglob("*.py"))
        if path.stem != "launch"
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    return {
        name: node
        for name, node in functions.items()
        if any(argument.arg == "PDL" for argument in node.args.args)
    }


def statements(kernel: ast.FunctionDef) -> list[ast.stmt]:
    return kernel.body[ast.get_docstring(kernel) is not None :]


def split_at_the_wait(kernel: ast.FunctionDef) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The statements before and after the wait; `begin` waits first."""
    body = statements(kernel)
    if ast.unparse(body[0]) == "begin(PDL)":
        return [], body[1:]
    at = [ast.unparse(statement) for statement in body].index("wait_for_previous(PDL)")
    return body[:at], body[at + 1 :]


def test_a_pdl_kernel_waits_before_it_reads_or_writes_what_the_previous_kernel_writes() -> None:
    kernels = pdl_kernels()
    assert {
        "norms.rms_norm_kernel",
        "draft_input.draft_input_kernel",
    } <= kernels.keys()
    for name, kernel in kernels.items():
        before, _ = split_at_the_wait(kernel)
        nodes = [node for statement in before for node in ast.walk(statement)]
        for call in [node for node in nodes if isinstance(node, ast.Call)]:
            assert {ast.unparse(call), ast.unparse(call.func)} & ALLOWED, (
                f"{name}: {ast.unparse(call)}"
            )


def test_slots_that_are_read_before_the_wait_are_read_again_after_it() -> None:
    before, after = split_at_the_wait(pdl_kernels()["adapter_gemm.shrink_rows_kernel"])
    assert "tl.load(slots + row)" in "".join(map(ast.unparse, before))
    assert ast.unparse(after[1]) == "slot = tl.load(slots + row, volatile=True)"
    assert ast.unparse(after[2]).startswith("if slot != before:")


def test_some_program_of_every_launch_waits() -> None:
    """A launch in which no program waits could end before the previous kernel does, and the next
    kernel waits only for the end of this launch."""
    may_leave = []
    for name, kernel in pdl_kernels().items():
        before, _ = split_at_the_wait(kernel)
        leaves = [s for s in before for node in ast.walk(s) if isinstance(node, ast.Return)]
        may_leave += [(name, ast.unparse(s).splitlines()[0]) for s in leaves]
    # The first split of a request always goes on.
    assert may_leave == [("window_attention_triton.attention_kernel", "if split >= num_used:")]


def test_a_projection_waits_before_it_lets_the_next_kernel_be_set_up() -> None:
    """Window attention, which may be next, reads lengths before it waits."""
    kernels = pdl_kernels()
    for name in (
        "scaled_linear.scaled_linear_kernel",
        "fp8_linear.fp8_linear_kernel",
        "few_tokens.route_few_kernel",
        "batch_invariant_linear.add_chunks_kernel",
    ):
        before, after = split_at_the_wait(kernels[name])
        assert "launch_dependents" not in "".join(map(ast.unparse, before)), name
        assert ast.unparse(after[0]) == "launch_dependents(PDL)", name


def test_programs_of_the_next_gemm_of_experts_come_when_the_sums_are_done() -> None:
    """Those that came earlier would crowd on the multiprocessors that have room by then."""
    _, after = split_at_the_wait(pdl_kernels()["grouped_gemm_triton.grouped_gemm_kernel"])
    sources = list(map(ast.unparse, after))
    sums = next(at for at, source in enumerate(sources) if "_sum_tile(" in source)
    assert sources.index("launch_dependents(PDL)") == sums + 1


def test_the_cuda_window_kernel_reads_only_older_data_before_it_waits() -> None:
    """`Part` reads lengths, `Stream` block tables and the keys and values of earlier tokens,
    `load_sinks` weights, all of them past the L1 cache."""
    source = (KERNELS / "attention/window_attention.cu").read_text(encoding="utf-8")
    before, after = source[source.index('extern "C"') :].split("griddepcontrol.wait")
    known = {
        "__launch_bounds__",
        "window_attention",
        "volatile",
        "if",
        "reinterpret_cast",
        "in_clusters",
    }
    used = set(re.findall(r"(\w+)[({]", before)) - known
    assert used == {"part", "cluster_arrive", "stream", "has_window", "load_sinks"}
    assert re.findall(r"(\S*)\bw\.sinks\b", source) == ["__ldcg("]
    assert "stage_window(" in after
    stream = (KERNELS / "attention/window_stream.cuh").read_text(encoding="utf-8")
    for name in ("kv_lens", "num_padding", "block_tables"):
        reads = re.findall(rf"(\S*)\bw\.{name}\b(?! ==)", stream)
        assert reads and all("__ldcg(" in read for read in reads), name
    assert not re.search(r"w\.(qkv|cos_sin|norm_weight|kv_slots)\b", stream)


def test_no_launch_inherits_tritons_default_of_fused_multiply_adds() -> None:
    """The default may differ by release, and with it the bits."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(KERNELS.rglob("*.py"))]
    functions = {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    }
    launched = set()
    for tree in trees:
        setting = names_with_the_fusion(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value)
                launched.add(name)
                given = {each.arg or ast.unparse(each.value) for each in node.keywords}
                says = any(sets_the_fusion(each) for each in given) or given & setting
                assert says or name not in functions, ast.unparse(node)
    assert len(launched & functions) > 60


def sets_the_fusion(text: str) -> bool:
    return "enable_fp_fusion" in text or text.startswith("programmatic_launch(")


def names_with_the_fusion(tree: ast.Module) -> set[str]:
    """Dictionaries of keywords that contain the option."""
    return {
        each.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and re.search(r"enable_fp_fusion|programmatic_launch\(", ast.unparse(node))
        for target in node.targets
        for each in ast.walk(target)
        if isinstance(each, ast.Name)
    }
