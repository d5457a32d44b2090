"""Qwen2.5 and Qwen3, and other models with calls in the Hermes format: a JSON object between tags."""

from turnout.server.api.parsing.family import CallFormat, Family

FAMILY = Family(
    names=("qwen3", "hermes", "qwen", "qwen25"),
    reasoning_names=("qwen3", "qwen3_thinking"),
    signs=("<tool_call>", "arguments"),
    model_types=("qwen2_moe", "qwen3_moe"),
    calls=CallFormat(
        begin="<tool_call>",
        end="</tool_call>",
        in_strings=True,
        written='<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    ),
)
