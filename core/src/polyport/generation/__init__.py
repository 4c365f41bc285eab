"""Generation: taking a model's `generate` apart, exporting the parts, and running them as the model does."""
