"""Contacts between residues: task, heads, and precision of ranked contacts."""
