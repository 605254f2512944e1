"""FjORD: ordered dropout."""

from fedtailor.methods.fjord import fjord as fjord
