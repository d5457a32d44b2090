"""Kimi-K2: the call's id, which holds the function's name, a separator, JSON."""

from turnout.server.api.parsing.family import CallFormat, Family

FAMILY = Family(
    names=("kimi_k2",),
    reasoning_names=("kimi_k2",),
    signs=("<|tool_calls_section_begin|>",),
    model_types=("kimi_k2", "kimi_k25"),
    calls=CallFormat(
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        begin="<|tool_call_begin|>",
        end="<|tool_call_end|>",
        head=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:]+):\d+)\s*<\|tool_call_argument_begin\|>",
        separators=("<|tool_call_argument_begin|>",),
        ends_reasoning=True,
        written=(
            "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        ),
    ),
)
