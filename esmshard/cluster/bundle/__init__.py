"""A directory with all files for an installation on machines without internet."""
