"""Measurements that users can repeat: ``outpace bench``."""
