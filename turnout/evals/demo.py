"""`make demo`: start the server with the bundled model, ask held-out questions, show what it answers."""

from __future__ import annotations

import asyncio
import time

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
console = Console()


def main() -> int:
    """Returns 0 if the model answered; the accuracy is reported, not judged."""
    questions = load_task("wordmath", QUESTIONS, seed=int(time.time()))
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
    for answer in answers[:SHOWN]:
        _show(answer)
    tokens = sum(answer.tokens for answer in answers)
    accuracy = Accuracy(sum(answer.correct for answer in answers), len(answers))
    console.print(Rule())
    console.print(f"accuracy {accuracy}", highlight=False)
    console.print(f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s", highlight=False)
    return 0


def _show(answer: Answer) -> None:
    console.print(Rule("right" if answer.correct else "wrong"))
    console.print(f"[bold]Q[/] {answer.question.text}", highlight=False)
    console.print(f"[bold]A[/] {answer.text}", highlight=False)
    console.print(f"[dim]expected {answer.question.expected}[/]", highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
