"""tailor: FjORD's nested widths, spent where they are needed."""

from fedtailor.methods.tailor import tailor as tailor
