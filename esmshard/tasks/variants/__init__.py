"""Effects of variants of one protein: task, head, and what a language model expects without training."""
