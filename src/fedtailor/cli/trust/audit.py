"""``fedtailor audit``: whether a run is what its signed log says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.output import JsonOption, console, print_json
from fedtailor.errors import FedtailorError

KeyOption = Annotated[
    str, typer.Option("--key", help="The public key that must have signed it, or the file that holds it.")
]
HeadOption = Annotated[
    str, typer.Option("--head", help="The hash of a line that you noted down: the log must still hold it.")
]
NewKeyOption = Annotated[
    Path | None, typer.Option("--new-key", help="Make a private key in this new file, and stop.")
]


def audit(
    run: Annotated[Path | None, typer.Argument(help="The folder of a run.")] = None,
    key: KeyOption = "",
    head: HeadOption = "",
    new_key: NewKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the signed log of a run, and the run against it, without any secret. The first untrue line is named."""
    from fedtailor.audit import keys, verifying

    if new_key is not None:
        public = keys.new_key(new_key)
        console.print(
            f"{new_key} signs: keep it to yourself, outside of run folders.", markup=False, soft_wrap=True
        )
        console.print(
            f"{new_key}{keys.PUBLIC} checks: give it to anybody.\n{public}", markup=False, soft_wrap=True
        )
        return
    if run is None:
        raise FedtailorError("audit: expected the folder of a run, or --new-key FILE")
    found = verifying.verify(run, keys.read_public(key) if key else "", head)
    if as_json:
        print_json({"folder": str(run), **vars(found)})
        return
    begins = f" after round {found.first}" if found.first else ""
    ends = "finished" if found.finished else "not finished"
    console.print(f"{run}: {found.rounds} rounds{begins}, {ends}; nothing was changed.", markup=False)
    if found.resumed:
        after = ", ".join(map(str, found.resumed))
        console.print(f"Resumed after round {after}.", markup=False)
    if found.redone:
        again = ", ".join(map(str, found.redone))
        console.print(f"Done again with another result: round {again}.", markup=False)
    console.print(f"Signed by  {found.key}", markup=False, soft_wrap=True)
    if not key:
        console.print("Whose key that is, only --key can say.", markup=False)
    console.print(f"Last line  {found.head}", markup=False, soft_wrap=True)
