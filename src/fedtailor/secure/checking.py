"""What cannot be summed under masks is refused before a run starts."""

from __future__ import annotations

from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Fleet
from fedtailor.messages import Client, ServerState
from fedtailor.method import Method
from fedtailor.privacy.guard import same_for_all
from fedtailor.secure.streams import check_installed
from fedtailor.seeds import Seeds


def check_secure(
    method: Method, model: ElasticModel, data: FederatedData, fleet: Fleet, state: ServerState, seeds: Seeds
) -> None:
    """Refuse a method or a fleet whose pieces differ between clients of a tier, and what looks at single answers."""
    check_installed()
    if not method.only_shared_merge:
        raise FedtailorError(
            f"[secure]: {method.name} looks at single answers in its merge, and there are none under masks; expected a "
            "method that merges by the mean over holders, such as fedavg, heterofl, fedrolex or fjord"
        )
    if method.merging.active:
        raise FedtailorError(
            f"[secure]: {method.merging}: a rule compares single answers, and there are none under masks; expected "
            "merge.rule = 'mean'"
        )
    _refuse_server(method)
    if method.policy.kept_by_clients or (model.statistics and method.norm != "averaged"):
        raise FedtailorError(
            f"[secure]: method.norm = {method.norm!r} asks clients for statistics or scores in clear; expected averaged"
        )
    if data.remote and data.validation is not None:
        raise FedtailorError(
            "[secure]: clients would tell scores on the examples that they keep back, in clear; expected "
            "data.validation = 0, and nothing that is chosen by scores"
        )
    if fleet.macs_range is not None or fleet.equipment is not None:
        raise FedtailorError(
            "[secure]: who holds what must follow from tiers; expected a fleet of fixed widths"
        )
    if not same_for_all(method, model, fleet.tiers, state, seeds):
        raise FedtailorError(
            f"[secure]: {method.name} gives each client a piece of its own, and masks cancel only where others "
            "hold the same; expected one for each tier: heterofl, fedrolex, or federated-dropout with mask = 'round'"
        )
    begun = method.begin(state, model)
    for tier in fleet.tiers:
        lease = method.assign(begun, Client(0, tier.name, tier.budget, 1), model, seeds).lease
        if data.remote and lease.cut.mask is not None:
            raise FedtailorError(
                f"[secure]: {method.name} leaves out single weights, and on Flower tiers are told by channels alone; "
                "expected another method, granularity = 'channels' where it has that, or a simulation"
            )
        if lease.partial:
            raise FedtailorError(
                f"[secure]: clients of {method.name} send the rows of their own labels alone, which tells them; "
                "expected method.label_rows = false"
            )


def _refuse_server(method: Method) -> None:
    if method.server.active:
        own = method.server == type(method).server
        expected = f"server.momentum = 0, because {method.name} brings its own" if own else "no [server]"
        raise FedtailorError(
            f"[secure]: {method.server}: what rests for a round would be stepped all the same; expected {expected}"
        )
