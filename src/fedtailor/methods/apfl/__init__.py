"""APFL: every client searches its own layer widths (FedCS), then all train together (FedPA)."""

from fedtailor.methods.apfl import apfl as apfl
from fedtailor.methods.apfl import fedcs as fedcs
from fedtailor.methods.apfl import fedpa as fedpa
from fedtailor.methods.apfl import panel as panel
