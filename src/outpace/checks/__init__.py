"""Checks of user input: arguments, ranges, names and output files.

Nothing here knows models.
"""
