"""The two apps that Flower runs: ``fedtailor new-app`` writes a Flower app that names them.

[tool.flwr.app.components]
serverapp = "my_app.app:server"        # from fedtailor.flower.apps import client, server
clientapp = "my_app.app:client"
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedtailor.engines.flower.post import content_of, parcel_of
from fedtailor.errors import FedtailorError, visible
from fedtailor.flower.app_folder import config_of
from fedtailor.flower.device import respond
from fedtailor.record import RoundRecord
from fedtailor.steps import WAITING, OnStep, heard_by
from fedtailor.storage.files import refuse_existing

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds; what Flower shows of it is one line per round."""
    from fedtailor.flower.server import serve  # clients import this file for every message, and serve nobody

    try:
        config = config_of(context.run_config)
        folder = Path(str(context.run_config.get("folder") or f"runs/{config.name}"))
        if not context.run_config.get("resume"):
            # As on one machine: what was changed in a configuration would be passed over.
            refuse_existing(folder)
        with heard_by(_tell_waits()):
            run = serve(grid, config, folder, _tell)
    except FedtailorError as error:
        print(f"error: {indented(error)}", flush=True)
        raise
    print(f"finished: {folder} after {run.state.round} rounds", flush=True)


def indented(error: FedtailorError) -> str:
    """An error as whoever listens reads it: what nodes have said in it begins no line, and steers no terminal."""
    return visible(str(error)).replace("\n", "\n  ")


def _tell(record: RoundRecord) -> None:
    told = [f"tier {tier}: {_best(values)}" for tier, values in (record.tiers or {}).items()]
    refused = sum(record.cohort.refused.values())
    told += [f"{refused} refused"] if refused else []
    print("  ".join([f"round {record.round}", *told]), flush=True)


def _tell_waits() -> OnStep:
    """Says whom a run waits for before its first round, whenever that changes."""
    last = ""

    def tell(step: str) -> None:
        nonlocal last
        if step.startswith(WAITING) and step != last:
            last = step
            print(step, flush=True)

    return tell


def _best(values: Mapping[str, float]) -> str:
    name = next((name for name in values if name != "loss"), "loss")
    return f"{name} {values[name]:.3f}"


@client.train()
@client.evaluate()
@client.query()
def answer(message: Message, context: Context) -> Message:
    """Do what the server asks, on the data that lies here."""
    parcel = respond(parcel_of(message.content), context.run_config, context.node_config)
    return Message(content_of(parcel), reply_to=message)
