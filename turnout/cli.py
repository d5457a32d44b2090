"""One command per verb: parse, call, print. The work is done elsewhere.

The fields of a configuration class are options of a command too (commands/options.py), so that `serve`,
`plan`, `generate` and `eval` share one definition (config.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from turnout import __version__
from turnout.cache import place_temporary_files, require_current_folder
from turnout.commands.options import InPanels, with_config
from turnout.config import Config, ServerConfig
from turnout.errors import UserError

app = typer.Typer(
    name="turnout",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # else [auto|cpu] is taken for markup, and flags are cut to fit a column
    add_completion=False,
)
bench_app = typer.Typer(help="Layer and serving benchmarks.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")

ModelArg = Annotated[str, typer.Argument(help="a local folder, a cached hub id, or `demo`")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Serve, plan, evaluate and quantise mixture-of-experts models."""


@app.command(cls=InPanels)
@with_config(ServerConfig)
def serve(model: ModelArg, *, config: ServerConfig) -> None:
    """Start the OpenAI-compatible server."""
    from turnout.commands.serve import serve as run

    raise typer.Exit(run(config))


@app.command()
def rank(
    head: Annotated[str, typer.Option(help="HOST:PORT, the --dist-init-addr of the head")],
    secret_file: Annotated[str, typer.Option(help="file with the secret of head and ranks")],
    count: Annotated[int, typer.Option(min=1, help="ranks to run here")] = 1,
    model: Annotated[str, typer.Option(help="where the model lies here; default: where the head says")] = "",
    num_threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: as the head says")] = 0,
    startup_timeout: Annotated[float, typer.Option(min=1, help="seconds to wait for a head")] = 600.0,
) -> None:
    """Run a rank that dials in to a server. The server tells it what to be."""
    from turnout.commands.serve import rank as run

    code = run(head, secret_file, count=count, model=model, num_threads=num_threads, patience=startup_timeout)
    raise typer.Exit(code)


@app.command(cls=InPanels)
@with_config(Config)
def plan(
    model: ModelArg,
    hardware: Annotated[
        str, typer.Option(help="plan for cpu, h100, h200, b200, ...; default: this machine")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    *,
    config: Config,
) -> None:
    """Say what would run where, and why. With what memory, too; loads no weights, needs no GPU."""
    from turnout.commands.plan import explain

    raise typer.Exit(explain(config, hardware=hardware or None, as_json=as_json))


@app.command(cls=InPanels)
@with_config(Config)
def verify(
    model: ModelArg,
    layers: Annotated[
        str,
        typer.Option(help="MoE layers to check: first, all, or indices (0,3); default: the first and last"),
    ] = "",
    seed: Annotated[int, typer.Option(help="of the text that layers are given")] = 0,
    show_all: Annotated[bool, typer.Option("--all", help="list what is refused here, and why")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    *,
    config: Config,
) -> None:
    """Compare backends with the reference. All that are allowed on this machine, with these weights."""
    from turnout.commands.verify import verify as run

    raise typer.Exit(run(config, layers=layers, seed=seed, show_all=show_all, as_json=as_json))


@app.command(cls=InPanels)
@with_config(Config)
def tune(
    model: ModelArg,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    *,
    config: Config,
) -> None:
    """Time runners on the model's own layer. Plans choose by what is found."""
    from turnout.commands.tune import tune as run

    raise typer.Exit(run(config, as_json=as_json))


@app.command(cls=InPanels)
@with_config(Config)
def generate(
    model: ModelArg,
    prompt: Annotated[
        str | None,
        typer.Argument(help="a prompt, or a .jsonl file of {prompt: ...}; default: standard input"),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="apply the model's chat template; default: to a text, if the model has one, not to a file",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="tokens to generate at most")] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="nucleus sampling")] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="stop string; may be repeated"),
    ] = None,
    output: Annotated[
        str, typer.Option(help="write JSON lines here instead of text to standard output")
    ] = "",
    *,
    config: Config,
) -> None:
    """Generate offline. A prompt, standard input or a JSON-lines file in; text or JSON lines out."""
    from turnout.commands.generate import run
    from turnout.engine.sampling_params import SamplingParams

    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=tuple(stop or ())
    )
    to = Path(output) if output else None
    raise typer.Exit(run(config, prompt, sampling, chat=chat, output=to, arguments=sys.argv[1:]))


@app.command(cls=InPanels)
@with_config(Config)
def chat(
    model: Annotated[
        str | None,
        typer.Argument(help="a local folder, a cached hub id, or `demo`; or give --base-url"),
    ] = None,
    base_url: Annotated[str, typer.Option(help="talk to this OpenAI-compatible server instead")] = "",
    api_key: Annotated[str, typer.Option(help="key of --base-url", envvar="TURNOUT_API_KEY")] = "",
    system: Annotated[str, typer.Option(help="a system message to begin with")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="longest answer; default: the rest of the context")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0: greedy; default: the server's, 1")
    ] = None,
    *,
    config: Config,
) -> None:
    """Talk to a model. In a terminal, or through a pipe that brings one message a line."""
    from turnout.commands.chat import run

    settings = {"max_tokens": max_tokens, "temperature": temperature}
    raise typer.Exit(
        run(
            config if model is not None else None,
            base_url=base_url,
            api_key=api_key,
            system=system,
            settings={name: value for name, value in settings.items() if value is not None},
        )
    )


@app.command("eval", cls=InPanels)
@with_config(Config)
def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(help="a local folder, a cached hub id, or `demo`; or give --base-url"),
    ] = None,
    task: Annotated[
        str, typer.Option(help="wordmath, gsm8k, or a .jsonl file of {question, answer}")
    ] = "wordmath",
    base_url: Annotated[str, typer.Option(help="evaluate this OpenAI-compatible server instead")] = "",
    num_questions: Annotated[int, typer.Option(help="how many; 0: all of a file, 200 of a generator")] = 0,
    question_seed: Annotated[int, typer.Option("--seed", help="generated tasks draw these questions")] = 0,
    repeat: Annotated[int, typer.Option(help="runs, each with the next seed; mean and spread")] = 1,
    max_concurrency: Annotated[int, typer.Option(help="requests in flight")] = 32,
    max_tokens: Annotated[int, typer.Option(help="longest answer")] = 512,
    min_accuracy: Annotated[float, typer.Option(help="exit with code 1 below this")] = 0.0,
    api_key: Annotated[str, typer.Option(help="key of --base-url", envvar="TURNOUT_API_KEY")] = "",
    output: Annotated[str, typer.Option(help="write every question and answer here as JSON lines")] = "",
    *,
    config: Config,
) -> None:
    """Measure accuracy. With a confidence interval, through the HTTP interface."""
    from turnout.commands.eval import evaluate as run
    from turnout.evals.run import EvalOptions

    options = EvalOptions(
        task=task,
        num_questions=num_questions,
        seed=question_seed,
        repeat=repeat,
        max_concurrency=max_concurrency,
        max_tokens=max_tokens,
        min_accuracy=min_accuracy,
        output=Path(output) if output else None,
    )
    raise typer.Exit(run(config, options, own=model is not None, base_url=base_url, api_key=api_key))


@app.command()
def quantize(
    model: ModelArg,
    out: Annotated[Path, typer.Argument(help="folder to write; must not exist")],
    format: Annotated[str, typer.Option(help="nvfp4, mxfp4, fp8, int4 or bf16")] = "nvfp4",
    calibrate: Annotated[
        bool, typer.Option(help="nvfp4: run the model to find activation scales (W4A4)")
    ] = True,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="text to run it on: lines, or .jsonl of {text}, {messages} or {question, answer}; "
            "default: word problems"
        ),
    ] = None,
) -> None:
    """Write a checkpoint that other engines can read."""
    from turnout.commands.quantize import run

    run(model, out, format, calibrate=calibrate, calibration=calibration)


@bench_app.command("serve")
def bench_serve(
    model: Annotated[
        str | None,
        typer.Argument(help="model to serve; or give --base-url"),
    ] = None,
    base_url: Annotated[str, typer.Option(help="measure this server instead")] = "",
    api_key: Annotated[str, typer.Option(help="key of --base-url", envvar="TURNOUT_API_KEY")] = "",
    dataset_name: Annotated[str, typer.Option(help="random: token ids drawn uniformly")] = "random",
    random_input_len: Annotated[int, typer.Option(help="prompt tokens")] = 64,
    random_output_len: Annotated[int, typer.Option(help="output tokens")] = 64,
    num_prompts: Annotated[int, typer.Option(help="requests")] = 128,
    request_rate: Annotated[float, typer.Option(help="requests per second; inf: all at once")] = float("inf"),
    max_concurrency: Annotated[int, typer.Option(help="requests in flight")] = 32,
    ignore_eos: Annotated[bool, typer.Option(help="always produce the full output length")] = True,
    seed: Annotated[int, typer.Option(help="seed of the prompts")] = 0,
    output: Annotated[str, typer.Option(help="write the result as JSON here")] = "",
) -> None:
    """Throughput and latencies of a server under load."""
    from turnout.commands.bench import serve as run

    run(
        model=model,
        base_url=base_url,
        api_key=api_key,
        dataset_name=dataset_name,
        output=Path(output) if output else None,
        input_len=random_input_len,
        output_len=random_output_len,
        num_prompts=num_prompts,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        ignore_eos=ignore_eos,
        seed=seed,
    )


@bench_app.command("moe")
def bench_moe(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape", "--preset", help="layer to measure, such as qwen3-30b, or all; may be repeated"
        ),
    ] = None,
    format: Annotated[
        list[str] | None, typer.Option(help="weights: bf16, nvfp4, ...; w4a8: mxfp4 by fp8; may be repeated")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=0, help="tokens of a batch; may be repeated")
    ] = None,
    routing: Annotated[
        str, typer.Option(help="how tokens choose experts [uniform|zipf|zipf-1.2]")
    ] = "uniform",
    runner: Annotated[str, typer.Option(help="the runner; auto: what a plan takes")] = "auto",
    device: Annotated[str, typer.Option(help="where to run [auto|cpu|cuda]")] = "auto",
    peers: Annotated[bool, typer.Option(help="measure torch's and transformers' implementations too")] = True,
    output: Annotated[str, typer.Option(help="write the result as JSON here")] = "",
    plot: Annotated[str, typer.Option(help="draw the share of the roofline as SVG here")] = "",
) -> None:
    """Time of one layer's experts. Compared with other implementations and what the device allows."""
    from turnout.commands.bench import moe as run

    run(
        shapes=shape,
        formats=format,
        tokens=tokens,
        runner=runner,
        routing=routing,
        device=device,
        peers=peers,
        output=Path(output) if output else None,
        plot=Path(plot) if plot else None,
    )


@bench_app.command("a2a")
def bench_a2a(
    world_size: Annotated[int, typer.Option(min=1, help="ranks to start; under torchrun, its own")] = 2,
    hidden: Annotated[int, typer.Option(min=1, help="hidden size")] = 1024,
    experts: Annotated[int, typer.Option(min=1, help="experts of the layer")] = 64,
    topk: Annotated[int, typer.Option(min=1, help="experts of a token")] = 8,
    tokens: Annotated[
        list[int] | None, typer.Option(min=0, help="tokens of each rank; may be repeated")
    ] = None,
    dispatcher: Annotated[
        list[str] | None, typer.Option(help="none, collective, ...; may be repeated; default: all")
    ] = None,
    format: Annotated[
        list[str] | None, typer.Option(help="on the wire: bf16, fp8, nvfp4; may be repeated")
    ] = None,
    combine_format: Annotated[
        list[str] | None, typer.Option(help="on the way back: bf16, fp8; may be repeated")
    ] = None,
    routing: Annotated[
        list[str] | None, typer.Option(help="how tokens choose experts: uniform, zipf; may be repeated")
    ] = None,
    device: Annotated[str, typer.Option(help="where to run [auto|cpu|cuda]")] = "auto",
    output: Annotated[str, typer.Option(help="write the result as JSON here")] = "",
    plot: Annotated[str, typer.Option(help="draw the share of the wire as SVG here")] = "",
) -> None:
    """Time of tokens to experts and back. Compared with the collectives alone."""
    from turnout.commands.bench import a2a as run

    run(
        world_size=world_size,
        hidden=hidden,
        experts=experts,
        top_k=topk,
        tokens=tokens,
        dispatchers=dispatcher,
        formats=format,
        combine_formats=combine_format,
        routings=routing,
        device=device,
        output=Path(output) if output else None,
        plot=Path(plot) if plot else None,
    )


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Entry point: user errors are one clear message and exit code 2."""
    place_temporary_files()
    try:
        require_current_folder()
        app(standalone_mode=True)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
