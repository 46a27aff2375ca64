"""Jobs for schedulers, and checks of machines."""
