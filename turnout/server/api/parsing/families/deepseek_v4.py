"""DeepSeek-V4: DSML as in V3.2, under another name of the section."""

from dataclasses import replace

from turnout.server.api.parsing.families import deepseek_v32
from turnout.server.api.parsing.family import Family

assert deepseek_v32.FAMILY.calls is not None
FAMILY = Family(
    names=("deepseek_v4", "deepseekv4"),
    reasoning_names=("deepseek_v4",),
    signs=("｜DSML｜", "tool_calls"),
    model_types=("deepseek_v4",),
    calls=replace(deepseek_v32.FAMILY.calls, section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")),
)
