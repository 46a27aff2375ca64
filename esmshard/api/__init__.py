"""The Python interface: fine-tuning, a run's directory, an opened model, and a scikit-learn transformer."""
