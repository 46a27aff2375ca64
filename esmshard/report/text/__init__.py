"""Sections, tables and sentences of a report, and the page that holds them."""
