"""DeepSeek-V3.2: DSML, tags that say of each argument whether it is text or JSON."""

from turnout.server.api.parsing.family import CallFormat, Family

FAMILY = Family(
    names=("deepseek_v32", "deepseekv32"),
    reasoning_names=("deepseek_v32",),
    signs=("｜DSML｜", "function_calls"),
    model_types=("deepseek_v32",),
    calls=CallFormat(
        section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        begin='<｜DSML｜invoke name="',
        end="</｜DSML｜invoke>",
        head=r'(?P<name>[^"]+)">',
        parameter=(
            r'<｜DSML｜parameter name="(?P<key>[^"]+)" string="(?P<is_text>true|false)">'
            r"(?P<value>.*?)</｜DSML｜parameter>"
        ),
        ends_reasoning=True,
        written='<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>',
        written_argument='<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n',
    ),
)
