"""Processes of a run: how they are started, find each other, are limited and are asked to stop."""
