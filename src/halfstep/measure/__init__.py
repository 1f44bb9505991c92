"""Clocks, memory and the facts of a device. What is measured here carries its unit, its count and its spread."""
