"""Writes docs/options.md from the configuration models and the command lines (`make docs`)."""

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tllm_spec.cli import bench, serve
from tllm_spec.cli.serve_options import COMMON
from tllm_spec.config.adaptive_config import AdaptiveConfig, CostModelOptions, EmaOptions
from tllm_spec.config.config_base import option_texts
from tllm_spec.config.draft_tree_config import (
    DraftTreeDecodingConfig,
    SAEnhancerConfig,
    TreeDecodingConfig,
)
from tllm_spec.config.engine_config import KVEventsConfig, LoraConfig, SchedulerConfig
from tllm_spec.config.llm_args import CudaGraphConfig, KvCacheConfig, LlmArgs
from tllm_spec.config.speculative_base import DecodingBaseConfig, DraftModelDecodingConfig
from tllm_spec.config.speculative_config import (
    CONFIG_OF_TYPE,
    AutoDecodingConfig,
    BlockHeadDecodingConfig,
    EagleHeadDecodingConfig,
)
from tllm_spec.config.text_search import CorpusConfig, GlobalPoolConfig
from tllm_spec.sampling_params import INTEGERS, NUMBERS, SamplingParams, SpeculationParams

PAGE = Path(__file__).with_name("options.md")
INTRO = """# Options

Generated from the code by `make docs`; do not edit.

One tree of options serves `LLM(...)`, YAML files (`--extra_llm_api_options`) and the commands.
Names are TensorRT-LLM's where it has the option. Its other options, and those of vLLM and SGLang,
are in three lists (`tllm_spec/config/neighbours.py`): other names of an option here, in YAML files
and on the command line; options that are taken with values that change nothing; and what is absent,
with the reason. All refusals of a configuration come in one message. `tllm-serve` and the commands
of `tllm-bench` that start an engine take every argument of `LLM` as a flag, dotted where it is
nested: `--kv_cache_config.dtype fp8`.
"""
COMMON_INTRO = """Flags of `tllm-serve`; `tllm-serve --help` shows these only. In a YAML file
(`--config`) and in `LLM(...)` those of the model and the engine have the same names without `--`,
and `--speculate` is `speculative_config: auto`.
"""
NOUNS: Mapping[Any, str] = {
    bool: "`true`, `false`",
    int: "integer",
    float: "number",
    str: "text",
    Any: "object",
    AdaptiveConfig: "mapping or text",
}


class Limits(NamedTuple):
    low: float = -math.inf
    high: float = math.inf
    is_above: bool = False  # `low` itself is not accepted


NO_LIMITS = Limits()

Row = tuple[str, str, str, str]  # option, values, default, what it does


def page() -> str:
    """The whole page."""
    common = [each for each in serve.main.params if each.name in COMMON]
    parts = ["## The twenty options that people set\n", COMMON_INTRO]
    parts.append(table(map(command_row, common)))
    parts += ["## `LLM` and YAML files\n", table(model_rows(LlmArgs))]
    for model in (KvCacheConfig, SchedulerConfig, CudaGraphConfig, LoraConfig):
        (name,) = (key for key, field in LlmArgs.model_fields.items() if model in _types(field))
        parts += [f"### `{name}`\n", f"{inspect.getdoc(model)}\n", table(model_rows(model))]
    parts += ["### `kv_cache_config.kv_events_config`\n", f"{inspect.getdoc(KVEventsConfig)}\n"]
    parts.append(table(model_rows(KVEventsConfig)))
    parts += ["### `speculative_config`\n", "For every `decoding_type`:\n"]
    parts.append(table(model_rows(DecodingBaseConfig)))
    parts += ["For `Draft_Target`, `PARD`, `Eagle`, `Eagle3`, `DFlash` and `DSpark`:\n"]
    parts.append(table(model_rows(DraftModelDecodingConfig, own=True)))
    parts += ["For all of these and `MTP`:\n"]
    parts.append(table(model_rows(DraftTreeDecodingConfig, own=True)))
    parts += ["For all of these and `NGram`:\n"]
    parts.append(table(model_rows(TreeDecodingConfig, own=True)))
    parts += ["For `Eagle` and `Eagle3`:\n"]
    parts.append(table(model_rows(EagleHeadDecodingConfig, own=True)))
    parts += ["For `DFlash` and `DSpark`:\n"]
    parts.append(table(model_rows(BlockHeadDecodingConfig, own=True)))
    decodings: list[type[BaseModel]] = [AutoDecodingConfig, *dict.fromkeys(CONFIG_OF_TYPE.values())]
    for decoding in decodings:
        name = decoding.model_fields["decoding_type"].default
        parts += [f"#### `decoding_type: {name}`\n", f"{inspect.getdoc(decoding)}\n"]
        if rows := list(model_rows(decoding, own=True)):
            parts.append(table(rows))
    parts += ["#### `sa_config`\n", f"{inspect.getdoc(SAEnhancerConfig)}\n"]
    parts += [table(model_rows(SAEnhancerConfig, own=True)), "For `SA` and `sa_config`:\n"]
    parts.append(table(model_rows(GlobalPoolConfig, own=True)))
    parts += ["For `NGram`, `SA` and `sa_config`:\n", table(model_rows(CorpusConfig))]
    for strategy, options in (("cost_model", CostModelOptions), ("ema", EmaOptions)):
        parts += [
            f"#### `adaptive` with `strategy: {strategy}`\n",
            f"{inspect.getdoc(options)}\n",
        ]
        parts.append(table(model_rows(options)))
    parts += ["## `SamplingParams`\n", f"{inspect.getdoc(SamplingParams)}\n"]
    parts += [table(sampling_rows(SamplingParams)), "### `speculation`\n"]
    parts.append(table(sampling_rows(SpeculationParams)))
    for name, command in (("tllm-serve", serve.main), ("tllm-bench", bench.main)):
        parts += command_parts(name, command, level=2)
    return "\n".join([INTRO, contents(parts), *parts])


def contents(parts: Iterable[str]) -> str:
    """Links to the sections of the two upper levels."""
    headings = re.findall(r"^(##|###) (.*)$", "\n".join(parts), re.MULTILINE)
    lines = []
    for level, title in headings:
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        lines.append(f"{'  ' * (len(level) - 2)}- [{title}](#{anchor})")
    return "\n".join(lines) + "\n"


def table(rows: Iterable[Row]) -> str:
    lines = ["| option | values | default | what it does |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def model_rows(model: type[BaseModel], *, own: bool = False) -> Iterable[Row]:
    """The fields of a model. own: only those that its class adds, without `decoding_type`."""
    for name, field in model.model_fields.items():
        if own and (name not in model.__annotations__ or name == "decoding_type"):
            continue
        default = "required" if field.is_required() else shown(field.default)
        values = kind_of(field.annotation, limits(field.annotation, *field.metadata))
        yield f"`{name}`", values, default, one_line(option_texts(model).get(name))


def sampling_rows(kind: type) -> Iterable[Row]:
    """The fields of a dataclass, each described by the string that follows it."""
    hints, texts = get_type_hints(kind), option_texts(kind)
    for field in fields(kind):
        bounds = Limits(*(NUMBERS.get(field.name) or INTEGERS.get(field.name) or ()))
        default = "–" if field.default is MISSING else shown(field.default)
        yield (
            f"`{field.name}`",
            kind_of(hints[field.name], bounds),
            default,
            one_line(texts[field.name]),
        )


def command_parts(name: str, command: click.Command, level: int) -> Iterable[str]:
    """A section for a command and for each of its subcommands. Hidden options are left out."""
    yield f"{'#' * level} `{name}`\n\n{command.get_short_help_str(limit=1000)}\n"
    visible = [each for each in command.params if not getattr(each, "hidden", False)]
    if visible:
        yield table(map(command_row, visible))
    if isinstance(command, click.Group):
        for child, subcommand in sorted(command.commands.items()):
            yield from command_parts(f"{name} {child}", subcommand, level + 1)


def command_row(parameter: click.Parameter) -> Row:
    info = parameter.to_info_dict()
    given = info["default"] is not None and not callable(parameter.default)
    default = f"`{info['default']}`" if given and not info.get("is_flag") else "–"
    if parameter.required:
        default = "required"
    names = info["opts"] if isinstance(parameter, click.Option) else [info["name"].upper()]
    text = one_line(info.get("help"))
    return ", ".join(f"`{name}`" for name in names), command_values(info), default, text


def command_values(info: Mapping[str, Any]) -> str:
    kind = info["type"]
    if info.get("is_flag"):
        return "flag"
    if "choices" in kind:
        return ", ".join(f"`{choice}`" for choice in kind["choices"])
    noun = {"integer range": "integer", "float range": "number", "float": "number"}
    low, high = kind.get("min"), kind.get("max")
    bounds = Limits(
        -math.inf if low is None else low,
        math.inf if high is None else high,
        kind.get("min_open", False),
    )
    return in_range(noun.get(kind["name"], kind["name"]), bounds)


def kind_of(annotation: Any, bounds: Limits = NO_LIMITS) -> str:
    """The values that an annotation stands for, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(arguments[0], limits(*arguments))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        kinds = [kind_of(each, bounds) for each in arguments if each is not NoneType]
        return " or ".join(dict.fromkeys(kinds + ["null"] * (NoneType in arguments)))
    if origin in (tuple, Sequence):
        each = kind_of(arguments[0])
        return "list of " + re.sub(r"\b(integer|number)\b", r"\1s", each)
    if origin is Callable:
        return "function"
    noun = NOUNS.get(annotation, "mapping")
    return in_range(noun, bounds) if noun in ("integer", "number") else noun


def limits(annotation: Any, *metadata: Any) -> Limits:
    """The lowest and highest value that pydantic's constraints allow."""
    low, high, is_above = NO_LIMITS
    for each in metadata:
        if isinstance(each, FieldInfo):
            low, high, is_above = limits(annotation, *each.metadata)
        above = getattr(each, "gt", None)
        if above is not None:
            is_above = annotation is not int
            low = above if is_above else above + 1
        low, high = getattr(each, "ge", low), getattr(each, "le", high)
    return Limits(low, high, is_above)


def in_range(noun: str, bounds: Limits) -> str:
    """Limits that only keep numbers finite are not shown."""
    low, high, is_above = bounds
    if low < -1e15:
        return noun
    if high > 1e15:
        return f"{noun} {'>' if is_above else '≥'} {low}"
    return f"{noun}, above {low}, at most {high}" if is_above else f"{noun}, {low} to {high}"


def shown(default: object) -> str:
    """A default as YAML writes it."""
    if isinstance(default, BaseModel):
        return "see below"
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def one_line(text: str | None) -> str:
    """With links to pages, which the texts name by their paths."""
    return re.sub(r"`?docs/([\w-]+\.md)`?", r"[\1](\1)", " ".join((text or "").split()))


def _types(field: FieldInfo) -> tuple[Any, ...]:
    return get_args(field.annotation) or (field.annotation,)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
