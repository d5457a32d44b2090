"""How chat templates write an assistant's answer, family by family: the texts that parsers must read back.

Written from the chat templates that the models are published with, as Jinja, not from the parsers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jinja2.sandbox


@dataclass(frozen=True)
class Published:
    """template: of one answer, from behind the prompt; forbidden: texts that its arguments cannot hold."""

    template: str
    forbidden: tuple[str, ...]
    typed: bool = False  # arguments are tags, whose types come from the schema


PUBLISHED = {
    "qwen3": Published(
        "{% if reasoning %}<think>\n{{ reasoning }}\n</think>\n\n{% endif %}{{ content }}"
        "{% for call in calls %}{% if not loop.first or content %}\n{% endif %}"
        '<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}",
        (),
    ),
    "qwen3_coder": Published(
        "{% if reasoning %}<think>\n{{ reasoning }}\n</think>\n\n{% endif %}{{ content }}"
        "{% for call in calls %}{% if not loop.first or content %}\n{% endif %}"
        "<tool_call>\n<function={{ call.name }}>\n{% for k, v in call.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}",
        ("</parameter>", "</function>", "</tool_call>"),
        typed=True,
    ),
    "deepseek_v3": Published(
        "{% if reasoning %}<think>\n{{ reasoning }}\n</think>\n\n{% endif %}{{ content }}"
        "{% for call in calls %}{% if loop.first %}<｜tool▁calls▁begin｜>{% else %}\n{% endif %}"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.name }}\n"
        "```json\n{{ call.arguments | tojson }}\n```"
        "<｜tool▁call▁end｜>{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}",
        ("<｜",),
    ),
    "deepseek_v31": Published(
        "{% if reasoning %}<think>{{ reasoning }}</think>{% endif %}{{ content }}"
        "{% for call in calls %}{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}"
        "<｜tool▁call▁begin｜>{{ call.name }}<｜tool▁sep｜>{{ call.arguments | tojson }}<｜tool▁call▁end｜>"
        "{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}",
        ("<｜",),
    ),
    "glm45": Published(
        "\n{% if reasoning %}<think>{{ reasoning }}</think>{% else %}<think></think>{% endif %}"
        "{% if content %}\n{{ content }}{% endif %}"
        "{% for call in calls %}\n<tool_call>{{ call.name }}\n{% for k, v in call.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n"
        "{% endfor %}</tool_call>{% endfor %}",
        ("</arg_value>", "</tool_call>", "</arg_key>"),
        typed=True,
    ),
    "glm47": Published(
        "{% if reasoning %}<think>{{ reasoning }}</think>{% endif %}{{ content }}"
        "{% for call in calls %}<tool_call>{{ call.name }}{% for k, v in call.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>"
        "{% endfor %}</tool_call>{% endfor %}",
        ("</arg_value>", "</tool_call>", "</arg_key>"),
        typed=True,
    ),
    "kimi_k2": Published(
        "{% if reasoning %}<think>{{ reasoning }}</think>{% endif %}{{ content }}"
        "{% for call in calls %}{% if loop.first %}<|tool_calls_section_begin|>{% endif %}"
        "<|tool_call_begin|>functions.{{ call.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ call.arguments | tojson }}<|tool_call_end|>"
        "{% if loop.last %}<|tool_calls_section_end|>{% endif %}{% endfor %}",
        ("<|",),
    ),
    "minimax_m2": Published(
        "{% if reasoning %}<think>\n{{ reasoning }}\n</think>\n\n{% endif %}{{ content }}"
        "{% for call in calls %}{% if loop.first %}\n<minimax:tool_call>\n{% endif %}"
        '<invoke name="{{ call.name }}">\n{% for k, v in call.arguments.items() %}'
        '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}'
        "</invoke>\n{% if loop.last %}</minimax:tool_call>{% endif %}{% endfor %}",
        ("</parameter>", "</invoke>"),
        typed=True,
    ),
    "gpt_oss": Published(
        "{% if reasoning %}<|channel|>analysis<|message|>{{ reasoning }}<|end|><|start|>assistant{% endif %}"
        "{% if content and calls %}<|channel|>commentary<|message|>{{ content }}<|end|><|start|>assistant"
        "{% elif content or not calls %}<|channel|>final<|message|>{{ content }}{% endif %}"
        "{% for call in calls %}{% if not loop.first %}<|start|>assistant{% endif %}"
        "<|channel|>commentary to=functions.{{ call.name }} <|constrain|>json<|message|>"
        "{{ call.arguments | tojson }}{% if not loop.last %}<|call|>{% endif %}{% endfor %}",
        ("<|",),
    ),
}
DSML = (
    "{{% if reasoning %}}<think>{{{{ reasoning }}}}</think>{{% endif %}}{{{{ content }}}}"
    "{{% for call in calls %}}{{% if loop.first %}}\n\n<｜DSML｜{section}>\n{{% endif %}}"
    '<｜DSML｜invoke name="{{{{ call.name }}}}">\n{{% for k, v in call.arguments.items() %}}'
    "<｜DSML｜parameter name=\"{{{{ k }}}}\" string=\"{{{{ 'true' if v is string else 'false' }}}}\">"
    "{{{{ v if v is string else v | tojson }}}}</｜DSML｜parameter>\n{{% endfor %}}</｜DSML｜invoke>\n"
    "{{% if loop.last %}}</｜DSML｜{section}>{{% endif %}}{{% endfor %}}"
)
for version, section in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls")):
    PUBLISHED[version] = Published(DSML.format(section=section), ("<｜", "</｜"))


def render(family: str, *, reasoning: str, content: str, calls: list[dict[str, Any]]) -> str:
    """The text that a model of `family` writes for an answer."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(PUBLISHED[family].template)
    return template.render(reasoning=reasoning, content=content, calls=calls)
