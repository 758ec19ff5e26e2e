"""Residual and gradient to payload, and back; what is measured and clipped on the way."""
