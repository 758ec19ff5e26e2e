"""What lasts from step to step: residuals, named states, learning rates; saved and resharded."""
