"""Devices by what was measured of them: tables of classes, when they are there, and how long a task takes on one."""
