"""What cannot be private is refused before a run starts, in one sentence that says what would be right."""

from __future__ import annotations

from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError, require
from fedtailor.fleet import Fleet
from fedtailor.messages import ServerState
from fedtailor.method import Method
from fedtailor.privacy.guard import by_client, same_for_all
from fedtailor.seeds import Seeds


def check_private(
    method: Method, model: ElasticModel, data: FederatedData, fleet: Fleet, state: ServerState, seeds: Seeds
) -> None:
    """Refuse a method, a network, data or a fleet with which something would be released that nobody has counted."""
    _check_method(method, model)
    _check_fleet(fleet)
    if data.remote:
        raise FedtailorError(
            "[privacy]: on Flower it is not known beforehand how many clients there are; expected a simulation"
        )
    if data.validation is not None:
        raise FedtailorError(
            "[privacy]: clients' validation examples would choose (early stopping, the best round or the method), and "
            "what they choose is not paid for; expected data.validation = 0 and stopping without such"
        )
    if not same_for_all(method, model, fleet.tiers, state, seeds):
        raise by_client(method.name)


def _check_method(method: Method, model: ElasticModel) -> None:
    """Stricter than ``shared_merge``: what a merge makes of clients' answers beyond their mean would be a release."""
    if not method.only_shared_merge:
        raise FedtailorError(
            f"[privacy]: {method.name} does more in its merge than the shared one, and that is not hidden by noise; "
            "expected a method without such, such as fedavg, heterofl, fedrolex or fjord"
        )
    if type(method).participants is not Method.participants and getattr(method, "only_able", True):
        raise FedtailorError(
            f"[privacy]: {method.name} chooses who may take part, and every client must be as likely as any other"
        )
    if method.merging.active:
        raise FedtailorError(
            f"{method.merging}: with [privacy] the merge sees sums with noise and no single client; expected "
            "merge.rule = 'mean': privacy.clip bounds what one client can do"
        )
    require(
        method.weighting == "count", "method.weighting", method.weighting,
        "count, with [privacy]: how many examples a client has is its own business",
    )  # fmt: skip
    if method.policy.kept_by_clients:
        raise FedtailorError(
            f"[privacy]: method.norm = {method.norm!r} lets clients score their own networks, which is not paid for; "
            "expected a method with norm = 'averaged'"
        )
    if model.statistics and method.norm != "averaged":
        raise FedtailorError(
            f"[privacy]: method.norm = {method.norm!r} measures batch norm on clients' data, which is not paid for; "
            "expected averaged, which clips and hides statistics as weights, or a network with group norm"
        )


def _check_fleet(fleet: Fleet) -> None:
    drawn = fleet.dynamic or fleet.macs_range is not None
    what = "redraws tiers or gives each client a budget of its own" if drawn else "has devices with a clock"
    if drawn or fleet.equipment is not None:
        raise FedtailorError(
            f"[privacy]: the fleet {what}, and what a client spends follows from its tier; expected fixed tiers, "
            "such as uniform-5"
        )
