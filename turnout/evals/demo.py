"""`make demo`: start the server with the bundled model; word problems, a tool call and an answer in JSON."""

from __future__ import annotations

import ast
import asyncio
import json
import operator
import time
from typing import Any

import httpx
from rich.console import Console
from rich.rule import Rule

from turnout.config import ServerConfig
from turnout.evals.client import Answer, ask_all
from turnout.evals.run import AccuracyBar
from turnout.evals.score import Accuracy
from turnout.evals.tasks import load_task
from turnout.server.launch import launch

QUESTIONS = 48
SHOWN = 3
CONCURRENCY = 16
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
ORDER = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "item": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["name", "item", "count"],
    "additionalProperties": False,
}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
console = Console()


def main() -> int:
    """Returns 0 if the model answered; the accuracy is reported, not judged.

    Each run draws its own questions, so one may meet a rare mistake of the model; the seed brings them back.
    """
    seed = int(time.time())
    questions = load_task("wordmath", QUESTIONS, seed)
    console.print("Starting the server with the bundled NVFP4 model on this machine ...")
    with launch(ServerConfig(model="demo", port=0)) as base_url:
        console.print(f"Asking {QUESTIONS} questions it has never seen, over HTTP at {base_url}")
        start = time.perf_counter()
        with AccuracyBar("wordmath", len(questions)) as bar:
            answers = asyncio.run(
                ask_all(
                    questions,
                    base_url=base_url,
                    max_concurrency=CONCURRENCY,
                    max_tokens=512,
                    on_answer=bar.add,
                )
            )
        seconds = time.perf_counter() - start
        for answer in sorted(answers, key=lambda answer: answer.correct)[:SHOWN]:  # mistakes first
            _show(answer)
        _call_a_tool(base_url)
        _answer_in_json(base_url)
    tokens = sum(answer.tokens for answer in answers)
    accuracy = Accuracy(sum(answer.correct for answer in answers), len(answers))
    console.print(Rule())
    console.print(f"accuracy {accuracy}", highlight=False)
    again = f"turnout eval demo --num-questions {QUESTIONS} --seed {seed}"
    console.print(f"the same questions again: {again}", highlight=False, soft_wrap=True)
    console.print(f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s", highlight=False)
    return 0


def calculate(expression: str) -> str:
    """The value of `expression`: numbers, + - * / and brackets. For anything else, what is wrong with it."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                result: float = _OPERATORS[type(op)](value(left), value(right))
                return result
        raise ValueError("only numbers, + - * / and brackets are known")

    try:
        return f"{value(ast.parse(expression, mode='eval').body):.12g}"
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        return f"error: {error}"


def _call_a_tool(base_url: str) -> None:
    """The model calls the calculator; what this process computes is what the model then tells."""
    console.print(Rule("a tool call"))
    question = "Use the calculator for 4817 * 263."
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    console.print(f"[bold]Q[/] {question}", highlight=False)
    said = _chat(base_url, messages=messages, tools=[CALCULATOR])
    messages.append(said)
    for call in said.get("tool_calls") or ():
        given = json.loads(call["function"]["arguments"])
        result = calculate(str(given.get("expression", "")))
        console.print(f"[bold]calls[/] {call['function']['name']}({given})", highlight=False)
        console.print(f"[bold]result[/] {result}", highlight=False)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    if len(messages) > 2:
        said = _chat(base_url, messages=messages, tools=[CALCULATOR])
    console.print(f"[bold]A[/] {said['content']}", highlight=False)


def _answer_in_json(base_url: str) -> None:
    """A schema holds the answer to its form; what stands in it is the model's own."""
    console.print(Rule("an answer by a JSON schema"))
    question = "Clara buys 12 lamps for $15 each. Answer as JSON with the keys name, item and count."
    console.print(f"[bold]Q[/] {question}", highlight=False)
    form = {"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER, "strict": True}}
    said = _chat(base_url, messages=[{"role": "user", "content": question}], response_format=form)
    console.print(f"[bold]A[/] {said['content']}", highlight=False)


def _chat(base_url: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "temperature": 0, "max_tokens": 200} | fields
    reply = httpx.post(f"{base_url}/chat/completions", json=body, timeout=60)
    reply.raise_for_status()
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


def _show(answer: Answer) -> None:
    console.print(Rule("right" if answer.correct else "wrong"))
    console.print(f"[bold]Q[/] {answer.question.text}", highlight=False)
    console.print(f"[bold]A[/] {answer.text}", highlight=False)
    console.print(f"[dim]expected {answer.question.expected}[/]", highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
