"""The device, the dtype and the number of threads that a model runs with, where the options leave
them open."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tllm_spec.models.draft_head import DraftHead
from tllm_spec.models.llama import CausalLM

SINGLE_THREAD_BYTES = 32 << 20


def pick_device(name: str, rank: int = 0, per_host: int | None = None) -> torch.device:
    """`cuda` and `auto` give the ranks of a host its devices in turn: all of them, or the first
    `per_host`. A CUDA device has an index. Raises ValueError when a CUDA device is asked for that
    torch does not see."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device = {name!r}: torch sees no CUDA device here; use 'cpu' or 'auto'")
    if name == "cuda":
        own = rank % (per_host or torch.cuda.device_count()) if rank else None
        return torch.device("cuda", torch.cuda.current_device() if own is None else own)
    device = torch.device(name)
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise ValueError(
            f"device = {name!r}: torch sees {torch.cuda.device_count()} CUDA devices here, which "
            "are counted from 0"
        )
    return device


def use_device(device: torch.device) -> None:
    """Makes it this thread's current CUDA device: Triton, TensorRT and the driver launch there,
    whichever device the tensors are on. Each thread that launches needs it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Calls `use_device` for the block; afterwards the thread has its own device again."""
    before = torch.cuda.current_device() if device.type == "cuda" else None
    use_device(device)
    try:
        yield
    finally:
        if before is not None:
            torch.cuda.set_device(before)


def pick_dtype(name: str, of_checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own dtype on CUDA, and float32 on a CPU, where 16-bit arithmetic
    is slower and less exact."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto":
        return dtypes[name]
    return of_checkpoint if device.type == "cuda" else torch.float32


def cpu_threads(target: CausalLM | DraftHead) -> int | None:
    """One thread for a model whose weights fit into a core's caches: waking others for every op
    costs more than they save. None: torch's own number."""
    if target.device.type != "cpu":
        return None
    num_bytes = sum(
        parameter.numel() * parameter.element_size() for parameter in target.parameters()
    )
    return 1 if num_bytes <= SINGLE_THREAD_BYTES else None


@contextmanager
def on_threads(number: int | None) -> Iterator[None]:
    """Inside, torch uses as many threads here as it will in the executor's thread (None: its own
    number), so that times measured here hold there."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
