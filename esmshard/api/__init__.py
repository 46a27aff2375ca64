"""The Python interface: fine-tuning, directories of runs, opened models, and a scikit-learn transformer."""
