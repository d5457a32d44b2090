"""DeepSeek-V3 and R1: fenced JSON after the function's name."""

from turnout.server.api.parsing.family import CallFormat, Family

FAMILY = Family(
    names=("deepseek_v3", "deepseekv3", "deepseek_r1"),
    reasoning_names=("deepseek_r1", "deepseek_v3"),
    signs=("<｜tool▁call▁begin｜>", "```json"),
    model_types=("deepseek_v3",),
    calls=CallFormat(
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        head=r"\s*\w+<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
        tail="```",
        separators=("<｜tool▁sep｜>",),
        ends_reasoning=True,
        written=(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        ),
    ),
)
