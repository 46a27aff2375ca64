"""Fine-tuning in the processes of one run: inputs, loop, step, optimizer and evaluation."""
