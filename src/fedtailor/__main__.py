"""``python -m fedtailor``."""

from fedtailor.cli.main import main

main()
