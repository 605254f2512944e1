"""``fedtailor``: the commands and how their errors are shown."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fedtailor import __version__
from fedtailor.cli import compare, data, flower, init, profile, report, resume, run, watch
from fedtailor.cli.devices import bench_device, check, deploy, fleet
from fedtailor.cli.lists import datasets, methods, models, runs
from fedtailor.cli.output import fail
from fedtailor.cli.trust import attack, audit, privacy
from fedtailor.errors import FedtailorError

app = typer.Typer(
    name="fedtailor",
    help="Resource-adaptive federated learning: one global PyTorch model, cut to fit every device.",
    epilog="Start here:  fedtailor init  then  fedtailor run fedtailor.toml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.command("init")(init.init)
app.command("run")(run.run)
app.command("resume")(resume.resume)
app.command("compare")(compare.compare)
app.command("watch")(watch.watch)
app.command("report")(report.report)
app.command("profile")(profile.profile)
app.command("attack")(attack.attack)
app.command("audit")(audit.audit)
app.command("privacy")(privacy.privacy)
app.command("deploy")(deploy.deploy)
app.command("check")(check.check)
app.command("bench-device")(bench_device.bench_device)
app.command("new-app")(flower.new_app)
app.command("flower-keys")(flower.flower_keys)
app.command("flower-link")(flower.flower_link)
app.command("flower-nodes")(flower.flower_nodes)
app.command("flower-node")(flower.flower_node)
app.command("flower-up")(flower.flower_up)
app.command("runs")(runs.runs)
app.command("methods")(methods.methods)
app.command("models")(models.models)
app.command("datasets")(datasets.datasets)
app.add_typer(data.app, name="data")
app.add_typer(fleet.app, name="fleet")


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False,
) -> None:
    """Resource-adaptive federated learning: one global PyTorch model, cut to fit every device."""
    if show:
        typer.echo(f"fedtailor {__version__}")
        raise typer.Exit


def main() -> None:
    """The console entry point: an error is one sentence and an exit code (2: a mistake in what was asked for)."""
    try:
        app()
    except FedtailorError as error:
        fail(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
