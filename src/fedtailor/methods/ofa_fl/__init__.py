"""OFA-FL: nested masks of single weights."""

from fedtailor.methods.ofa_fl import ofa_fl as ofa_fl
from fedtailor.methods.ofa_fl import panel as panel
