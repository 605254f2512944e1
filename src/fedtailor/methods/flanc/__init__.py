"""FLANC: every width composed from one basis."""

from fedtailor.methods.flanc import flanc as flanc
from fedtailor.methods.flanc import panel as panel
