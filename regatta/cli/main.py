"""The `regatta` command. Options and help only: each command imports what it needs when it runs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from regatta.errors import RegattaError

app = typer.Typer(
    name="regatta",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Distributed reinforcement learning: one learner, any number of workers, the same answer.\n\n"
    "Begin with: regatta train cartpole-ppo",
    epilog="Exit codes: 0 done, 64 bad usage or config, 65 environment fails, 66 no such run or no checkpoint that "
    "can be trusted, 69 other end not reached, 70 internal error, 71 training diverged, 74 store fails, 76 not one "
    "of our frames, 77 token refused, 130 interrupted (saved). `regatta COMMAND --help` shows examples.",
)

StoreOption = Annotated[
    str | None,
    typer.Option("--store", help="Where runs are kept: a folder or URL (default ./runs, or REGATTA_STORE)."),
]
WorkersOption = Annotated[
    str,
    typer.Option("--workers", "-w", help="Worker processes on this machine: auto, 0 (this process), 1, 2, ..."),
]
ListenOption = Annotated[
    str | None,
    typer.Option("--listen", help="Let other workers join here, for example tcp://127.0.0.1:4444."),
]
TokenOption = Annotated[
    str | None,
    typer.Option("--token-file", help="File (mode 0600) with the run's token; or set REGATTA_TOKEN."),
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option("--allow", help="An installed module that env.id=module:function may name; repeatable."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Progress on stderr; the last line of stdout is one JSON object.")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run id, unambiguous prefix of it, or 'last'.")]


@app.command()
def train(
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PRESET] [KEY=VALUE]...", help="A preset or an algorithm, then overrides of any knob."),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="TOML file with settings; see docs.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same as run.seed=N.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run instead of a made-up one.")] = None,
    workers: WorkersOption = "auto",
    store: StoreOption = None,
    listen: ListenOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train an agent.

    \b
    regatta train cartpole-ppo
    regatta train cartpole-ppo algorithm.lr=3e-4 --workers 4 --seed 7 --name my-run
    regatta train ppo env.id=Acrobot-v1 run.steps=200000
    regatta train ppo env.id=my_module:make_env
    regatta train --config experiment.toml
    regatta train cartpole-ppo --listen tcp://127.0.0.1:4444 --workers 0

    `regatta presets` lists presets; `regatta presets NAME` shows every knob.
    """
    from regatta.cli import training

    words = list(args or [])
    preset = words.pop(0) if words and "=" not in words[0] else None
    training.train(
        preset,
        words,
        file=config,
        seed=seed,
        name=name,
        store=store,
        workers=training.worker_count(workers),
        listen=listen,
        token=training.read_token(token_file),
        as_json=as_json,
    )


@app.command()
def resume(
    run: RunArgument,
    workers: WorkersOption = "auto",
    store: StoreOption = None,
    listen: ListenOption = None,
    token_file: TokenOption = None,
    allow: AllowOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with a run from its last checkpoint; the result is that of a run never interrupted."""
    from regatta.cli import training

    training.resume(
        run,
        store=store,
        allow=allow or [],
        workers=training.worker_count(workers),
        listen=listen,
        token=training.read_token(token_file),
        as_json=as_json,
    )


@app.command()
def evaluate(
    run: RunArgument,
    episodes: Annotated[int, typer.Option("--episodes", "-n", help="Whole episodes to play.")] = 20,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="last, best, or the iteration of one `regatta show` lists.")
    ] = "last",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the evaluation's environments.")] = 1_000_000,
    sample: Annotated[bool, typer.Option("--sample", help="Draw actions instead of taking the likeliest.")] = False,
    store: StoreOption = None,
    allow: AllowOption = None,
    as_json: JsonOption = False,
) -> None:
    """Play episodes with a trained policy and say how well it does."""
    from regatta.cli import records

    records.evaluate(
        run,
        checkpoint,
        episodes=episodes,
        seed=seed,
        deterministic=not sample,
        store=store,
        allow=allow or [],
        as_json=as_json,
    )


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show this one with every knob.")] = None,
) -> None:
    """List presets, or show one with every knob, its default, meaning and valid range."""
    from regatta.cli import records

    records.presets(name)


@app.command()
def runs(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List what was trained, newest first."""
    from regatta.cli import records

    records.runs(store, as_json)


@app.command()
def show(run: RunArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show one run: status, returns, checkpoints, where it is kept and how it was made."""
    from regatta.cli import records

    records.show(run, store, as_json)


@app.command()
def worker(
    url: Annotated[str, typer.Argument(help="Where the learner listens, for example tcp://127.0.0.1:4444.")],
    name: Annotated[str | None, typer.Option("--name", help="How the learner's display calls this worker.")] = None,
    token_file: TokenOption = None,
    allow: AllowOption = None,
) -> None:
    """Lend this machine to a learner: join, and rejoin after every break, until the run is over."""
    from regatta.cli import training

    training.work(url, name, training.read_token(token_file), allow or [])


def version(wanted: bool) -> None:
    if wanted:
        from regatta import __version__

        typer.echo(f"regatta {__version__}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# Typer brings Click under one name or another; through this class it is the same in every version.
_BadUsage: Any = typer.BadParameter.__mro__[1]


def main(argv: list[str] | None = None) -> None:
    sys.exit(_run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    command: Any = typer.main.get_command(app)
    try:
        code = command.main(args=argv or ["--help"], prog_name="regatta", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("interrupted before there was anything to save", err=True)
        return 130
    except _BadUsage as error:
        where = f" {argv[0]}" if argv and argv[0] in command.commands else ""
        typer.echo(f"error: {error.format_message()} (try: regatta{where} --help)", err=True)
        return 64
    except RegattaError as error:
        typer.echo(f"{'error: ' if error.exit_code != 130 else ''}{error}", err=True)
        return error.exit_code
    except Exception:
        import traceback

        traceback.print_exc()
        typer.echo("internal error: this should not happen; please report it with the lines above", err=True)
        return 70


if __name__ == "__main__":
    main()
