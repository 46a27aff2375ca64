"""Jobs for schedulers, checks of machines, and installation without internet."""
