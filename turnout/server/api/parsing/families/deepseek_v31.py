"""DeepSeek-V3.1: the function's name, a separator, JSON."""

from turnout.server.api.parsing.family import CallFormat, Family

FAMILY = Family(
    names=("deepseek_v31", "deepseekv31"),
    reasoning_names=("deepseek_v31",),
    signs=("<｜tool▁call▁begin｜>",),
    calls=CallFormat(
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        head=r"\s*(?P<name>[^<\s]+)\s*<｜tool▁sep｜>",
        separators=("<｜tool▁sep｜>",),
        ends_reasoning=True,
        written="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
    ),
)
