"""Fleets of real processes under load."""
