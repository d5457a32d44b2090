"""MiniMax-M2: a tag for each call and one for each argument, within a section."""

from turnout.server.api.parsing.family import CallFormat, Family

FAMILY = Family(
    names=("minimax_m2",),
    reasoning_names=("minimax_m2", "minimax"),
    signs=("<minimax:tool_call>",),
    model_types=("minimax_m2",),
    calls=CallFormat(
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        begin='<invoke name="',
        end="</invoke>",
        head=r'(?P<name>[^"]+)">',
        parameter=r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>',
        written='<invoke name="{name}">\n{arguments}</invoke>',
        written_argument='<parameter name="{key}">{value}</parameter>\n',
    ),
)
