"""Package definition. Tool settings live in pyproject.toml; nothing else does."""

import re
import subprocess
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
VERSION = re.findall(r'__version__ = "(.*)"', (ROOT / "tllm_spec/version.py").read_text("utf-8"))
COMMIT_FILE = "tllm_spec/commit.txt"  # of packages: they have no git


SERVER = [
    "fastapi>=0.110,<1",
    "uvicorn>=0.29,<0.55",
    "prometheus-client>=0.20,<1",
    "msgpack>=1.0.5,<2",
]
PARALLEL = ["mpi4py>=4,<5", "mpich>=4.2,<6; platform_system == 'Linux'"]
GUIDED = ["llguidance>=1.9.1,<2"]
GGUF = ["gguf>=0.17,<1"]
PLOT = ["matplotlib>=3.8,<4"]
OTEL = ["opentelemetry-sdk>=1.25,<2", "opentelemetry-exporter-otlp-proto-http>=1.25,<2"]
EVENTS = ["pyzmq>=25,<28"]
RAY = ["ray[serve]>=2.60,<3"]
# For draft_backend.
ONNX = ["onnx>=1.17,<2"]
ONNXRUNTIME = [*ONNX, "onnxruntime>=1.20,<2"]
TENSORRT = [*ONNX, "tensorrt>=10.13.2,<12"]
CUDA = ["cuda-python>=12.6,<14", "flashinfer-python>=0.6.4,<0.7"]
DEV = [
    *GUIDED,
    *GGUF,
    *PLOT,
    *OTEL,
    *EVENTS,
    *PARALLEL,
    *ONNXRUNTIME,
    # Its builder needs no GPU: tests build the network that tensorrt would run.
    "tensorrt-rtx>=1.7,<2; platform_system == 'Linux' and platform_machine == 'x86_64'",
    "accelerate>=1.1,<2",  # transformers needs it for GGUF files, with which tests compare
    "build>=1.2,<2",
    "pytest>=8,<10",
    "pytest-xdist>=3.5,<4",
    "hypothesis>=6.100,<7",
    "httpx>=0.27,<1",
    "msgspec>=0.18,<1",  # decodes KV events as their readers do
    "jsonschema>=4.20,<5",
    "openai>=1.60,<4",
    "ruff==0.17.5",
    "mypy==2.4.1",
    "types-PyYAML>=6,<7",
    "types-tqdm>=4.66,<5",
    "pre-commit>=3.7,<5",
    "triton>=3.3,<3.10; platform_system == 'Linux'",  # the kernels' tests run under its interpreter
    # CUDA sources are compiled in tests, which needs no GPU.
    "cuda-bindings>=12.8,<14; platform_system == 'Linux'",
    "nvidia-cuda-nvrtc>=13,<14; platform_system == 'Linux'",
]


def write_commit(folder: str) -> None:
    """The commit of a working tree, into what is made of it."""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout
        (Path(folder) / COMMIT_FILE).write_text(commit, encoding="utf-8")


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(self.build_lib)


class SdistWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


setup(
    name="tllm_spec",
    version=VERSION[0],
    cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit},
    description="A speculative-decoding engine in the style of TensorRT-LLM's PyExecutor",
    license="Apache-2.0",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10,<3.14",
    # executor/ and kernels/ are reached through the links in tllm_spec/: one import name each.
    packages=find_namespace_packages(include=["tllm_spec", "tllm_spec.*"]),
    package_data={
        "": ["py.typed", "*.cu", "*.cuh", "*.html", "*.json", "*.jinja", "*.safetensors", "*.md"],
        "tllm_spec": ["commit.txt"],
    },
    install_requires=[
        "torch>=2.11,<2.14",
        "transformers>=4.56,<5.40",  # which removes what 5.24 warns of
        "safetensors>=0.4.3,<1",
        "pyyaml>=6,<7",
        "pydantic>=2.8,<3",
        "click>=8.1,<9",
        "tqdm>=4.66,<5",
        "numpy>=1.26,<3",
        "jinja2>=3.1,<4",
        *SERVER,
    ],
    extras_require={
        "cuda": CUDA,
        "guided": GUIDED,
        "gguf": GGUF,
        "plot": PLOT,
        "otel": OTEL,
        "events": EVENTS,
        "ray": RAY,
        "parallel": PARALLEL[:1],
        "onnxruntime": ONNXRUNTIME,
        "tensorrt": TENSORRT,
        "dev": DEV,
    },
    entry_points={
        "console_scripts": [
            "tllm-serve = tllm_spec.cli.entry:serve",
            "tllm-bench = tllm_spec.cli.entry:bench",
            "tllm-train = tllm_spec.cli.entry:train",
        ]
    },
)
