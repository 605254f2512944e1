"""Fleets: which devices there are, and what each of them can afford."""

from fedtailor.fleet.fleet import Fleet, Population, Tier
from fedtailor.fleet.presets import FleetSettings, fleet_by_name, fleet_examples

__all__ = ["Fleet", "FleetSettings", "Population", "Tier", "fleet_by_name", "fleet_examples"]
