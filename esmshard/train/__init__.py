"""Fine-tuning in the processes of a run: its inputs, training loop, optimizer and evaluation."""
