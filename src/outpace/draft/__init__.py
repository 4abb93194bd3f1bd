"""Drafters, which propose draft tokens.

A drafter is any object with ``propose``, ``commit`` and ``reset``: see ``outpace.draft.base``.
"""
