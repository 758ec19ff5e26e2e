"""State that lasts from step to step: residuals, named states and learning rates."""
