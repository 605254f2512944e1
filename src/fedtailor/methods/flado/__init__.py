"""Flado: channels that follow the global trajectory."""

from fedtailor.methods.flado import flado as flado
from fedtailor.methods.flado import panel as panel
