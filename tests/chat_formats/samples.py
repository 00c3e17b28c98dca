"""What the models of each family write for the same two calls, and templates that write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tllm_spec.chat_formats.chat_format import Function

PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "rain": {"type": "boolean"},
        "of": {"type": "object", "properties": {"a": {"type": "array"}}},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
FUNCTIONS = [
    Function("get_weather", PARAMETERS, is_strict=True),
    Function("now", NO_PARAMETERS, is_strict=True),
]
ARGUMENTS: Mapping[str, Any] = {
    "city": "Rome <b> \"a\" {'x'}",
    "days": 3,
    "rain": True,
    "of": {"a": [1, {"b": None}]},
    "unit": "C",
}
CALLS: list[tuple[str, Mapping[str, Any]]] = [("get_weather", ARGUMENTS), ("now", {})]
XML = "{% for key, value in call.arguments.items() %}"
VALUE = "{{ value if value is string else value | tojson }}"


class Sample(NamedTuple):
    """template: renders `calls`. dense: without line ends. ids: of the calls, if the model writes
    them."""

    name: str
    template: str
    dense: str | None = None
    ids: tuple[str, ...] = ()


DSML = "｜DSML｜"


def _dsml(block: str) -> str:
    return (
        f"\n\n<{DSML}{block}>\n{{% for call in calls %}}"
        f'<{DSML}invoke name="{{{{ call.name }}}}">\n{XML}<{DSML}parameter name="{{{{ key }}}}"'
        ' string="{{ "true" if value is string else "false" }}">'
        f"{VALUE}</{DSML}parameter>\n{{% endfor %}}</{DSML}invoke>\n{{% endfor %}}</{DSML}{block}>"
    )


HERMES = (
    '{% for call in calls %}<tool_call>\n{"name": "{{ call.name }}", "arguments": '
    "{{ call.arguments | tojson }}}\n</tool_call>\n{% endfor %}"
)
QWEN = (
    "{% for call in calls %}<tool_call>\n<function={{ call.name }}>\n"
    f"{XML}<parameter={{{{ key }}}}>\n{VALUE}\n</parameter>\n{{% endfor %}}"
    "</function>\n</tool_call>\n{% endfor %}"
)
GLM = (
    "{% for call in calls %}<tool_call>{{ call.name }}\n"
    f"{XML}<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n{{% endfor %}}"
    "</tool_call>\n{% endfor %}"
)
MINIMAX = (
    '<minimax:tool_call>\n{% for call in calls %}<invoke name="{{ call.name }}">\n'
    f'{XML}<parameter name="{{{{ key }}}}">{VALUE}</parameter>\n{{% endfor %}}'
    "</invoke>\n{% endfor %}</minimax:tool_call>"
)
KIMI = (
    "<|tool_calls_section_begin|>{% for call in calls %}<|tool_call_begin|>functions."
    "{{ call.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ call.arguments | tojson }}"
    "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
)
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>{% for call in calls %}<｜tool▁call▁begin｜>BEGIN"
    "{{ call.arguments | tojson }}END<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
)
V3 = DEEPSEEK.replace("BEGIN", "function<｜tool▁sep｜>{{ call.name }}\n```json\n")
GEMMA = """
{%- macro show(value) -%}
{%- if value is string -%}<|"|>{{ value }}<|"|>
{%- elif value is mapping -%}{
{%- for key, each in value.items() -%}{{ key }}:{{ show(each) }}
{%- if not loop.last %},{% endif %}{% endfor -%}}
{%- elif value is iterable -%}[{% for each in value %}{{ show(each) }}
{%- if not loop.last %},{% endif %}{% endfor %}]
{%- else -%}{{ value | tojson }}{%- endif -%}
{%- endmacro -%}
{%- for call in calls -%}<|tool_call>call:{{ call.name }}{{ show(call.arguments) }}<tool_call|>
{%- endfor -%}"""
MISTRAL = (
    '[TOOL_CALLS] [{% for call in calls %}{"name": "{{ call.name }}", "arguments": '
    "{{ call.arguments | tojson }}}{% if not loop.last %}, {% endif %}{% endfor %}]"
)
NAMED = (
    "{% for call in calls %}[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}"
    "{% endfor %}"
)
LLAMA = (
    '{% for call in calls %}{"name": "{{ call.name }}", "parameters": '
    "{{ call.arguments | tojson }}}{% if not loop.last %}; {% endif %}{% endfor %}"
)
PYTHONIC = (
    "[{% for call in calls %}{{ call.name }}({% for key, value in call.arguments.items() %}"
    "{{ key }}={{ value | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})"
    "{% if not loop.last %}, {% endif %}{% endfor %}]"
)
SAMPLES: list[Sample] = [
    *(Sample(name, HERMES, HERMES.replace("\n", "")) for name in ("hermes", "qwen3")),
    *(Sample(name, QWEN, QWEN.replace("\n", "")) for name in ("qwen3_coder", "qwen3_xml")),
    *(Sample(name, GLM, GLM.replace("\n", "")) for name in ("glm45", "glm47")),
    Sample("minimax_m2", MINIMAX, MINIMAX.replace("\n", "")),
    Sample("kimi_k2", KIMI, ids=("functions.get_weather:0", "functions.now:1")),
    Sample("deepseek_v3", V3.replace("END", "\n```")),
    Sample(
        "deepseek_v31",
        DEEPSEEK.replace("BEGIN", "{{ call.name }}<｜tool▁sep｜>").replace("END", ""),
    ),
    Sample("deepseek_v32", _dsml("function_calls"), _dsml("function_calls").replace("\n", "")),
    Sample("deepseek_v4", _dsml("tool_calls"), _dsml("tool_calls").replace("\n", "")),
    Sample("gemma4", GEMMA),
    Sample("mistral", MISTRAL, MISTRAL.replace("[TOOL_CALLS] ", "[TOOL_CALLS]")),
    Sample("mistral", NAMED),
    *(Sample(name, LLAMA) for name in ("llama3_json", "llama4_json")),
    *(Sample(name, PYTHONIC) for name in ("pythonic", "llama4_pythonic")),
]
