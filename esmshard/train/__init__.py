"""Fine-tuning from the recipe to the evaluated model."""
