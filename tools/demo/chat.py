"""The chat template of the demo model, and the same in Python, fast enough to make training data.

ChatML with tools and thinking as Qwen3 writes them, in fewer words. Thinking is off unless `enable_thinking` is true;
an answer then begins behind `<think>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, START, END)
MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>",
)  # fmt: skip
CHAT_TEMPLATE = """\
{%- set system = messages[0]['content'] if messages and messages[0]['role'] == 'system' else '' -%}
{%- if tools or system -%}
{{- '<|im_start|>system\\n' + system -}}
{%- if tools -%}
{{- ('\\n\\n' if system else '') + '<tools>' -}}
{%- for tool in tools -%}
{{- '\\n' + ((tool.function if tool.function is defined else tool) | tojson) -}}
{%- endfor -%}
{{- '\\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else '' -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + content.split('</think>')[-1].lstrip('\\n') -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function is defined else call -%}
{{- ('\\n' if content or not loop.first else '') + '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{{- (function.arguments if function.arguments is string else function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif message.role != 'system' or not loop.first -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking is defined and enable_thinking else '') -}}
{%- endif -%}
"""

Message = dict[str, Any]
Tools = list[dict[str, Any]]


def prompt(messages: list[Message], tools: Tools | None = None, thinking: bool = False) -> str:
    """What CHAT_TEMPLATE makes of `messages` with the beginning of an answer."""
    body = "".join(text for text, _ in segments(messages, tools))
    return f"{body}{START}assistant\n" + ("<think>\n" if thinking else "")


def segments(messages: list[Message], tools: Tools | None = None) -> Iterator[tuple[str, bool]]:
    """The conversation in pieces, and of each whether it is the assistant's own: its words and END.

    An answer's `thought`, if there is any, is told before it; CHAT_TEMPLATE leaves it out of what has been said.
    """
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    head = ""
    if tools or system:
        head = f"{START}system\n{system}"
        if tools:
            listed = "".join("\n" + json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
            head += ("\n\n" if system else "") + f"<tools>{listed}\n</tools>"
        head += f"{END}\n"
    if head:
        yield head, False
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "assistant":
            thought = message.get("thought")
            yield f"{START}assistant\n" + ("" if thought is None else "<think>\n"), False
            said = "" if thought is None else f"{thought}\n</think>\n\n"
            yield said + content + written(message.get("tool_calls", ()), bool(content)) + END, True
            yield "\n", False
        elif role == "tool":
            first = i == 0 or messages[i - 1]["role"] != "tool"
            last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            opened = f"{START}user" if first else ""
            closed = f"{END}\n" if last else ""
            yield f"{opened}\n<tool_response>\n{content}\n</tool_response>{closed}", False
        elif role != "system" or i:
            yield f"{START}{role}\n{content}{END}\n", False


def written(calls: Any, after_text: bool = False) -> str:
    """Calls as the model writes them."""
    out = []
    for call in calls:
        function = call["function"]
        body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
        out.append(f"<tool_call>\n{body}\n</tool_call>")
    return ("\n" if out and after_text else "") + "\n".join(out)
