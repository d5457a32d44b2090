"""`turnout eval`: a task against a server, its own or somebody else's."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from turnout.config import Config
from turnout.errors import UserError
from turnout.evals.client import Answer, ask_all, counter
from turnout.evals.score import Accuracy
from turnout.evals.tasks import Question, load_task
from turnout.server.launch import launch

console = Console()


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What to ask and how. `num_questions` 0: all of a file, 200 of a generator."""

    task: str = "wordmath"
    num_questions: int = 0
    seed: int = 0
    repeat: int = 1
    max_concurrency: int = 32
    max_tokens: int = 512
    min_accuracy: float = 0.0
    output: Path | None = None

    def __post_init__(self) -> None:
        for name, low in (("num_questions", 0), ("repeat", 1), ("max_concurrency", 1), ("max_tokens", 1)):
            if getattr(self, name) < low:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least {low}")
        if not 0 <= self.min_accuracy <= 1:
            raise UserError(f"--min-accuracy {self.min_accuracy}: must lie in [0, 1]")


def run(options: EvalOptions, *, config: Config | None, base_url: str = "", api_key: str = "") -> int:
    """Evaluate `config`'s model on a server of our own, or the one at `base_url`. Returns the exit code."""
    rounds = [load_task(options.task, options.num_questions, options.seed + i) for i in range(options.repeat)]
    if options.output:
        _check_writable(options.output)
    server: AbstractContextManager[str] = launch(config) if config else nullcontext(base_url)
    with server as url:
        accuracies = [_round(questions, i, options, url, api_key) for i, questions in enumerate(rounds)]
        if config and config.speculative:
            drafted, accepted = (
                counter(url, f"spec_{kind}_tokens_total") or 0 for kind in ("draft", "accepted")
            )
            share = f"{accepted / drafted:.1%}" if drafted else "-"
            console.print(f"drafts accepted: {accepted:.0f} of {drafted:.0f} ({share})", highlight=False)
    if options.repeat > 1:
        values = [100 * accuracy.value for accuracy in accuracies]
        console.print(f"mean of {options.repeat}: {statistics.mean(values):.2f} %", end=" ")
        console.print(f"(standard deviation {statistics.stdev(values):.2f})", highlight=False)
    mean = statistics.mean(accuracy.value for accuracy in accuracies)
    if mean < options.min_accuracy:
        console.print(f"[red]below --min-accuracy {options.min_accuracy}[/]", highlight=False)
        return 1
    return 0


def _round(
    questions: list[Question], index: int, options: EvalOptions, base_url: str, api_key: str
) -> Accuracy:
    start = time.perf_counter()
    with AccuracyBar(Path(options.task).name, len(questions)) as bar:
        answers = asyncio.run(
            ask_all(
                questions,
                base_url=base_url,
                api_key=api_key,
                max_concurrency=options.max_concurrency,
                max_tokens=options.max_tokens,
                on_answer=bar.add,
            )
        )
    seconds = time.perf_counter() - start
    if options.output:
        _append(options.output, answers, index)
    tokens = sum(answer.tokens for answer in answers)
    accuracy = Accuracy(sum(answer.correct for answer in answers), len(answers))
    console.print(
        f"{options.task} seed {options.seed + index}: accuracy {accuracy}; "
        f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s",
        highlight=False,
    )
    return accuracy


class AccuracyBar:
    """A progress bar that shows the running accuracy."""

    def __init__(self, title: str, total: int):
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("accuracy {task.fields[accuracy]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task(title, total=total, accuracy="-")
        self._correct = self._total = 0

    def __enter__(self) -> AccuracyBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self, answer: Answer) -> None:
        self._total += 1
        self._correct += answer.correct
        share = f"{100 * self._correct / self._total:.1f} %"
        self._progress.update(self._task, advance=1, accuracy=share)


def _check_writable(path: Path) -> None:
    try:
        path.open("w").close()
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None


def _append(path: Path, answers: list[Answer], index: int) -> None:
    with path.open("a", encoding="utf-8") as file:
        for answer in answers:
            file.write(json.dumps({"round": index, **asdict(answer)}) + "\n")
