"""Clients on other machines, reached through Flower."""
