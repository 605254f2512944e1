"""Messages that are copied field by field, because that takes a quarter of the time, stay complete."""

from __future__ import annotations

from dataclasses import fields, replace

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.levels import Levels
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.messages import Client, Lease, Task, Update, marked
from fedtailor.seeds import Seeds


def test_a_client_in_another_slot_is_the_same_in_all_else() -> None:
    device = Client(1, "tier", Budget(width=0.5), 2, 3)
    assert device.in_slot(4) == replace(device, slot=4)
    assert len(fields(Client)) == 5  # one more has to be handed on


def test_a_lease_with_another_mark_is_the_same_in_all_else() -> None:
    lease = Lease(frozenset({"a"}), Cut.everything(), frozenset({"group"}), 7, 8, "old")
    assert all(getattr(lease, each.name) != each.default for each in fields(Lease))
    assert lease.with_nonce("new") == replace(lease, nonce="new")


def test_a_marked_task_is_the_same_in_all_else() -> None:
    lease = Lease(frozenset(), Cut.everything())
    patch = Patch({}, Cut.everything())
    task = Task(
        Client(1, "", Budget(), 2), 3, patch, lease, Seeds(4), "validate", {}, 5, Levels({}), {"a": 6}
    )
    found = marked(task)
    assert found.lease.nonce
    assert all(
        getattr(found, each.name) is getattr(task, each.name) for each in fields(Task) if each.name != "lease"
    )


def test_a_marked_update_is_the_same_in_all_else() -> None:
    update = Update(1, 2, 3, Patch({}, Cut.everything()), 4.0, {"loss": 5.0}, {}, "old")
    assert update.marked("new") == replace(update, nonce="new")
