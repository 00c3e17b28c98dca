"""A small ctypes binding of cuBLASLt's GEMM, with an algorithm of the caller's choice (torch takes
the first one that the library proposes). It uses the library that torch has loaded, and the types
and numbers of its public header.

An algorithm is 64 opaque bytes, valid for one version of the library on one kind of device."""

import ctypes
import functools
import weakref
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

WORKSPACE_BYTES = 32 << 20
ALIGNMENT = 16  # bytes; algorithms may assume it of every row
DATA_TYPES = {torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_16F, CUDA_R_16BF
_FP8 = 28  # CUDA_R_8F_E4M3
_FLOAT, _COMPUTE_FLOAT = 0, 68  # CUDA_R_32F, CUBLAS_COMPUTE_32F
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER, _BIAS_TYPE = 3, 7, 8, 26  # CUBLASLT_MATMUL_DESC_...
_ADDS_BIAS = 4  # CUBLASLT_EPILOGUE_BIAS
# CUBLASLT_MATMUL_DESC_...: of A and B.
_SCALE_POINTERS, _FAST_SUMS, _SCALE_MODES = (17, 18), 25, (31, 32)
_MAX_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_...
# CUBLASLT_REDUCTION_SCHEME_...: none, or partial sums that are added in float32.
_NO_REDUCTION, _FLOAT_REDUCTION = 0, 2
_SPLITS, _REDUCTION, _CLUSTER = 2, 3, 8  # CUBLASLT_ALGO_CONFIG_...
# CTAs of a cluster along the rows of W and of x, to CUBLASLT_CLUSTER_SHAPE_...
CLUSTERS = {(1, 1): 2, (2, 1): 3, (4, 1): 4, (1, 2): 5, (2, 2): 6, (1, 4): 8}


class Scaling(Enum):
    """What shares a float32 scale, of the FP8 weight and of x: CUBLASLT_MATMUL_MATRIX_SCALE_..."""

    ROWS = 3, 3
    """`[N]` and `[T]`."""
    BLOCKS = 4, 4
    """Blocks of 128 inputs of a row: `[ceil(K / 128), N]` and `[ceil(K / 128), T]`."""
    TILES = 5, 4
    """Tiles of 128 x 128 weights: `[ceil(N / 128), K / 128]`, whose rows have a multiple of 4."""


class _Algorithm(ctypes.Structure):
    """`cublasLtMatmulAlgo_t`."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Proposal(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


ALGORITHM_BYTES = ctypes.sizeof(_Algorithm)
# Argument types of the calls. Handle, descriptors and data are pointers.
_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_DESCRIPTORS = [_POINTER] * 5
_SIGNATURES: dict[str, list[Any]] = {
    "cublasLtCreate": [_POINTER],
    "cublasLtDestroy": [_POINTER],
    "cublasLtMatmulDescCreate": [_POINTER, _INT, _INT],
    "cublasLtMatmulDescSetAttribute": [_POINTER, _INT, _POINTER, _SIZE],
    "cublasLtMatmulDescDestroy": [_POINTER],
    "cublasLtMatrixLayoutCreate": [
        _POINTER,
        _INT,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_int64,
    ],
    "cublasLtMatrixLayoutDestroy": [_POINTER],
    "cublasLtMatmulPreferenceCreate": [_POINTER],
    "cublasLtMatmulPreferenceSetAttribute": [_POINTER, _INT, _POINTER, _SIZE],
    "cublasLtMatmulPreferenceDestroy": [_POINTER],
    "cublasLtMatmulAlgoGetHeuristic": [_POINTER, *_DESCRIPTORS, _POINTER, _INT, _POINTER, _POINTER],
    "cublasLtMatmulAlgoConfigSetAttribute": [_POINTER, _INT, _POINTER, _SIZE],
    "cublasLtMatmulAlgoCheck": [_POINTER, *_DESCRIPTORS, _POINTER, _POINTER],
    # handle, operation, alpha, A and its layout, B, beta, C, D, algorithm, workspace, its size,
    # stream
    "cublasLtMatmul": [_POINTER] * 14 + [_SIZE, _POINTER],
}


@functools.cache
def shared_library() -> ctypes.CDLL | None:
    """The library that torch has loaded, or None."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = types
    library.cublasLtGetVersion.restype = _SIZE
    return library


class CublasLt:
    """The library on one device, with a workspace that all GEMMs share, so they must run one after
    another.

    Raises RuntimeError if the library does not initialize.
    """

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self._library = library
        self.version = int(library.cublasLtGetVersion())
        handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            self.call("Create", ctypes.byref(handle))
        self.handle = handle
        self.free_with(self, "Destroy", handle)
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def call(self, name: str, *arguments: object) -> None:
        if status := self.status(name, *arguments):
            raise RuntimeError(f"cublasLt{name}: cublasStatus_t {status}")

    def status(self, name: str, *arguments: object) -> int:
        """Calls `cublasLt{name}`; 0 means success."""
        return int(getattr(self._library, f"cublasLt{name}")(*arguments))

    def set(self, of: str, on: object, attribute: int, value: "ctypes._SimpleCData[Any]") -> None:
        self.call(f"{of}SetAttribute", on, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def free_with(self, owner: object, name: str, *arguments: object) -> None:
        """Calls `cublasLt{name}` when the owner is deleted, but not when Python exits, because CUDA
        may be gone then."""
        function = getattr(self._library, f"cublasLt{name}")
        weakref.finalize(owner, function, *arguments).atexit = False


@dataclass(frozen=True)
class Sizes:
    """Sizes of `x W^T` with `[T, K]` and `[N, K]`; strides between rows in elements. dtype: of the
    output, and unless there is a scaling of weight and x, which are FP8 then. adds: whether the
    result is added to the output."""

    rows: int
    in_features: int
    out_features: int
    x_stride: int
    output_stride: int
    dtype: torch.dtype
    has_bias: bool = False
    adds: bool = False
    scaling: Scaling | None = None

    @property
    def output_bytes(self) -> int:
        return self.rows * self.out_features * self.dtype.itemsize


class Plan:
    """A GEMM of fixed sizes.

    The library is column-major. Our `[T, N]` is its N x T: the transposed K x N matrix W times the
    K x T matrix x."""

    def __init__(self, lt: CublasLt, sizes: Sizes) -> None:
        self._lt, self._beta = lt, _ONE_POINTER if sizes.adds else _ZERO_POINTER
        self._operation, self._layouts = ctypes.c_void_p(), [ctypes.c_void_p() for _ in range(3)]
        data_type = DATA_TYPES[sizes.dtype]
        input_type = data_type if sizes.scaling is None else _FP8
        lt.call("MatmulDescCreate", ctypes.byref(self._operation), _COMPUTE_FLOAT, _FLOAT)
        lt.free_with(self, "MatmulDescDestroy", self._operation)
        lt.set("MatmulDesc", self._operation, _TRANSPOSE_A, ctypes.c_int32(1))
        if sizes.has_bias:
            lt.set("MatmulDesc", self._operation, _EPILOGUE, ctypes.c_uint32(_ADDS_BIAS))
            lt.set("MatmulDesc", self._operation, _BIAS_TYPE, ctypes.c_int32(data_type))
        if sizes.scaling is not None:
            # Tensor cores sum with fewer bits than float32; without it the library adds their sums
            # of 128 inputs in float32.
            lt.set("MatmulDesc", self._operation, _FAST_SUMS, ctypes.c_int8(0))
            for attribute, mode in zip(_SCALE_MODES, sizes.scaling.value, strict=True):
                lt.set("MatmulDesc", self._operation, attribute, ctypes.c_int32(mode))
            self._set_scales(lt.workspace, lt.workspace)  # without any there are no algorithms
        weight = (input_type, sizes.in_features, sizes.out_features, sizes.in_features)
        x = (input_type, sizes.in_features, sizes.rows, sizes.x_stride)
        output = (data_type, sizes.out_features, sizes.rows, sizes.output_stride)
        for layout, described in zip(self._layouts, (weight, x, output), strict=True):
            lt.call("MatrixLayoutCreate", ctypes.byref(layout), *described)
            lt.free_with(self, "MatrixLayoutDestroy", layout)

    def _set_scales(self, *scales: torch.Tensor) -> None:
        for attribute, scale in zip(_SCALE_POINTERS, scales, strict=True):
            address = ctypes.c_void_p(scale.data_ptr())
            self._lt.set("MatmulDesc", self._operation, attribute, address)

    @property
    def _descriptors(self) -> list[ctypes.c_void_p]:
        weight, x, output = self._layouts
        return [self._operation, weight, x, output, output]

    def algorithms(self, most: int) -> list[bytes]:
        """The library's proposals, the best first by its heuristic; empty if it has none."""
        lt, preference, found = self._lt, ctypes.c_void_p(), ctypes.c_int()
        proposals = (_Proposal * most)()
        lt.call("MatmulPreferenceCreate", ctypes.byref(preference))
        lt.set("MatmulPreference", preference, _MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
        lt.set("MatmulPreference", preference, _REDUCTIONS, ctypes.c_uint32(_FLOAT_REDUCTION))
        for alignment in _ALIGNMENTS:
            lt.set("MatmulPreference", preference, alignment, ctypes.c_uint32(ALIGNMENT))
        arguments = (preference, most, proposals, ctypes.byref(found))
        lt.status("MatmulAlgoGetHeuristic", lt.handle, *self._descriptors, *arguments)
        lt.call("MatmulPreferenceDestroy", preference)
        return [bytes(one.algorithm) for one in proposals[: found.value] if one.state == 0]

    def variant(self, algorithm: bytes, splits: int, cluster: tuple[int, int]) -> bytes | None:
        """The algorithm with K split `splits` times and CTAs in such clusters; None if it is not
        supported."""
        changed = ctypes.create_string_buffer(algorithm, ALGORITHM_BYTES)
        values = {
            _SPLITS: ctypes.c_int32(splits),
            _REDUCTION: ctypes.c_uint32(_NO_REDUCTION if splits == 1 else _FLOAT_REDUCTION),
            _CLUSTER: ctypes.c_uint16(CLUSTERS[cluster]),
        }
        for attribute, value in values.items():
            arguments = (changed, attribute, ctypes.byref(value), ctypes.sizeof(value))
            if self._lt.status("MatmulAlgoConfigSetAttribute", *arguments):
                return None
        return changed.raw if self.accepts(changed.raw) else None

    def accepts(self, algorithm: bytes) -> bool:
        """Whether the algorithm, maybe found for other sizes, supports these sizes."""
        checked = _Proposal()
        arguments = (*self._descriptors, algorithm, ctypes.byref(checked))
        refused = self._lt.status("MatmulAlgoCheck", self._lt.handle, *arguments)
        return not refused and checked.workspace_bytes <= WORKSPACE_BYTES

    def run(
        self,
        algorithm: bytes,
        x: torch.Tensor,
        weight: torch.Tensor,
        output: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """`output = x W^T + bias`, or `+=`, on the current stream. scales: of weight and x.

        Raises RuntimeError if the library refuses.
        """
        lt, (weights, rows, outputs) = self._lt, self._layouts
        if bias is not None:
            lt.set("MatmulDesc", self._operation, _BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        if scales is not None:
            self._set_scales(*scales)
        lt.call(
            "Matmul",
            lt.handle,
            self._operation,
            _ONE_POINTER,
            weight.data_ptr(),
            weights,
            x.data_ptr(),
            rows,
            self._beta,
            output.data_ptr(),
            outputs,
            output.data_ptr(),
            outputs,
            algorithm,
            lt.workspace.data_ptr(),
            WORKSPACE_BYTES,
            torch.cuda.current_stream(x.device).cuda_stream,
        )


_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)
_ONE_POINTER, _ZERO_POINTER = ctypes.addressof(_ONE), ctypes.addressof(_ZERO)
