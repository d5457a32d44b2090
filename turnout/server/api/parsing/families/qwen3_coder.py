"""Qwen3-Coder, Qwen3-Next-Coder and Qwen3.5: a tag for the function and one for each argument."""

from turnout.server.api.parsing.family import CallFormat, Family

FAMILY = Family(
    names=("qwen3_coder", "qwen3_xml", "qwen3_5"),
    reasoning_names=("qwen3_5",),
    signs=("<tool_call>", "<function="),
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    calls=CallFormat(
        begin="<tool_call>",
        end="</tool_call>",
        head=r"\s*<function=(?P<name>[^>\n]+)>",
        tail="</function>",
        parameter=r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
        written="<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        written_argument="<parameter={key}>\n{value}\n</parameter>\n",
    ),
)
