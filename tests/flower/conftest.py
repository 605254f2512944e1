"""Nothing in these tests asks anybody outside this machine."""

from __future__ import annotations

import os

from fedtailor.flower.link import QUIET

os.environ.update(QUIET)
