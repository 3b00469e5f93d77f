"""Shared by all tests. Its presence puts this folder on the path, so that tests say ``from tiny import tiny_model``."""
