"""GLM-4.5 and later: keys and values in tags after the function's name, on lines of their own until 4.6."""

from turnout.server.api.parsing.family import CallFormat, Family

FAMILY = Family(
    names=("glm45", "glm47"),
    reasoning_names=("glm45", "glm47"),
    signs=("<tool_call>", "<arg_key>"),
    model_types=("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    calls=CallFormat(
        begin="<tool_call>",
        end="</tool_call>",
        head=r"\s*(?P<name>[^\s<]+)",
        parameter=r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        written="<tool_call>{name}\n{arguments}</tool_call>",
        written_argument="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
)
